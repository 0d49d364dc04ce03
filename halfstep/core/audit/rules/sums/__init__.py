"""HS3xx: sums over micro-batches, ranks and products."""
