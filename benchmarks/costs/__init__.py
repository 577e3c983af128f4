"""What each part of the product costs: capture, swap, buffer, trainer, attaching, the memory."""
