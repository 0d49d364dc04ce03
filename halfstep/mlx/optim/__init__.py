"""AdamW and Muon on MLX, and the masters that its own optimizers lack."""
