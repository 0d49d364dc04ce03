"""Optimizers, their masters, and the drivers that step any optimizer of torch's interface."""
