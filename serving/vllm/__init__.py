"""All that is written against one version of vLLM."""
