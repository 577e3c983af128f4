"""Serving: vLLM behind its own OpenAI API, with capture and draft swap hooked into the worker."""
