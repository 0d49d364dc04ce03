"""What a number format is in torch: dtypes, casts, matmuls, norms, and what the backward pass keeps."""
