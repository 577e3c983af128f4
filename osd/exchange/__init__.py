"""What replicas, controller and trainer tell each other through Redis."""
