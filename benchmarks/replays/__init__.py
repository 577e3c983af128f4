"""How recorded answers would have been served, under the service's own control, and how long it
would have taken."""
