"""The functions that a model's own code calls, and how a policy reaches them."""
