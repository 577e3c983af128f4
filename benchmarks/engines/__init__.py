"""Real vLLM in this process, stepped by hand: the engines that other rooms measure."""
