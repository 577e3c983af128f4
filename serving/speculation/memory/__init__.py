"""What was served, remembered: after the same words, what followed them is proposed."""
