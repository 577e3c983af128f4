"""`osd demo`: on a service of its own, traffic shifts, acceptance falls, and the draft learns."""
