"""Draft releases on disk: published whole or not at all, verified when read."""
