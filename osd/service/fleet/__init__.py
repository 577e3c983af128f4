"""The engines of a service: how many there are, and the front door before several."""
