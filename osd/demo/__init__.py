"""`osd demo`: traffic shifts, acceptance falls, the draft learns, on a service of its own."""
