"""The draft model sleeps at k = 0: what it misses (`missed.py`), and how it is left out and catches
up on vLLM's V1 (`v1.py`, `unseen_tokens.py`) and V2 (`v2.py`) model runners."""
