"""The monitor's hands on MLX: numbers of every layer at every step, of updates, and of samples."""
