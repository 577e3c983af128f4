"""The small models and the traffic this project makes itself, so that nothing is ever downloaded."""
