"""Another draft in a running engine: built beside the live one, exchanged, proven."""
