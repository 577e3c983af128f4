"""HTTP clients of a running service: the one of the commands, and one that makes load."""
