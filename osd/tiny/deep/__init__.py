"""A tiny target of eight layers, whose hidden states an EAGLE-3 head can read, and its draft."""
