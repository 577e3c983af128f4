"""A cluster of hosts that are network, process and mount namespaces of this machine. Needs root."""
