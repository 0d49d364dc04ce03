"""Functions that a model's own code calls: how a policy reaches them."""
