"""How a policy reaches a loss function: its jaxpr, evaluated again with casts."""
