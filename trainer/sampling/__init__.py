"""Text that the draft samples itself, labelled by the target: student sampling."""
