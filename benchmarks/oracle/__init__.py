"""How near the service comes to who knows what will be accepted."""
