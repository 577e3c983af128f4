"""`osd doctor`: checks everything that a start needs, in the order in which it needs it."""
