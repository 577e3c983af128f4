"""The fleet people already have: a `vllm serve` that somebody else started becomes a replica."""
