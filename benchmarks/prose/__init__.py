"""Models and traffic of prose in five languages, out of Debian's packages, for the benches that
learn from it."""
