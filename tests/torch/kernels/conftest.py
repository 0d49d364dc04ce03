"""Without a GPU, Triton's interpreter runs the kernels; Triton must be told before it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
