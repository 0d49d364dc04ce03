"""The PyTorch backend: how a policy runs on torch tensors."""
