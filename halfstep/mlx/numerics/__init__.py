"""What a number format is in MLX: dtypes, casts, matmuls, and how they are measured."""
