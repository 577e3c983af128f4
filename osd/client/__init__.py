"""The other side of the HTTP interfaces: commands that ask a running service, and load for it."""
