"""The service as processes: planned, started on Ray, supervised and ended."""
