"""What an audit sees of a training on MLX: formats of operations, weights, what happens to updates."""
