"""The small models and the traffic that this project makes itself. Nothing is downloaded."""
