"""Checkpoints on disk: their files, which of them stay, and the thread that writes them."""
