"""`osd doctor`: checks in the order in which a start needs what they look at."""
