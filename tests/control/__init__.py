"""The control plane and its pages in a real browser, without an engine."""
