"""The service as processes: what is planned, started on Ray, watched over and ended."""
