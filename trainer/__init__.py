"""The trainer: distils captured target distributions into the draft model."""
