"""How a policy reaches the torch functions that a model's own code calls."""
