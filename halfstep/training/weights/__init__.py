"""Weights that come from elsewhere, and models that leave: pretrained weights, layouts, artifacts."""
