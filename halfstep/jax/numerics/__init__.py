"""What a number format is in JAX: dtypes, casts, matmuls, and how they are measured."""
