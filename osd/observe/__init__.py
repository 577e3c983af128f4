"""What a person sees of a running service: history, metrics, status, dashboard, `osd top`."""
