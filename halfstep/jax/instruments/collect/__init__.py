"""What an audit sees of a training in JAX: its jaxpr, its numbers, and what its optimizer intends."""
