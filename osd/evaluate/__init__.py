"""What a model, a draft and a kind of traffic give, measured."""
