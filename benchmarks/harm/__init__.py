"""Whether traffic can make the service worse than a draft that never learns."""
