"""Models and traffic of natural text that the project generates, for the benches that learn from
it."""
