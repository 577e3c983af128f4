"""The control plane: when to train, whether to publish, what to serve, when to go back."""
