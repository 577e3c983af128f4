"""What the whole service costs its clients, and whether it outlives its parts."""
