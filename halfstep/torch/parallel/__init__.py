"""Several processes: what travels between them, and what they must agree on, on torch.distributed's own engine."""
