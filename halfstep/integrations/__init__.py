"""The policy inside other training loops: Accelerate, transformers.Trainer and Lightning."""
