"""Whether token trees, or several drafts, would bring more than the chain that is verified."""
