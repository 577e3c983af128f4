"""Swapping the draft of a running engine: a new one is built aside, put in place and proved."""
