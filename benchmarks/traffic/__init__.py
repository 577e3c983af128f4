"""Which traffic comes when, of which family of models, and the target's recorded answers to it."""
