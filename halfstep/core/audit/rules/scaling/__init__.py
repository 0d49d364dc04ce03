"""HS2xx: the loss scale."""
