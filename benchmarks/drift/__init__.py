"""Who proposes best when the traffic changes, and who forgets."""
