"""The monitor's hands on JAX: numbers of every layer at every step, of updates, and of samples."""
