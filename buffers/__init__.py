"""Replay buffers, which keep captured traces for the trainer."""
