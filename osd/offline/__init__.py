"""Training without a service: recorded traces in, a draft directory out."""
