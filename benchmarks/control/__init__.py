"""Whether the closed loop finds the best speculation, and how soon after a change."""
