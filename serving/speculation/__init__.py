"""How many draft tokens are proposed at each step, and what that is known from."""
