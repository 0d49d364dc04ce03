"""A loss function as a policy reaches it: its jaxpr, evaluated again with casts."""
