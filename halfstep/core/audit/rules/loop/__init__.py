"""HS5xx: what the training loop does and hides."""
