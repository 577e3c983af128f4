"""EAGLE-3 heads in the trainer: the head itself, the target's features, its files."""
