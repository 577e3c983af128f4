"""Replay buffers: where captured traces wait for the trainer."""
