"""What the three backends have in common, generic over an array namespace: torch, jax.numpy or mlx.core."""
