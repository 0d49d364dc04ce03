"""HS6xx: what checkpoints hold, and what a resume makes of it."""
