"""Code written against private parts of one version of vLLM."""
