"""Without a GPU, Triton's interpreter runs the kernels. It must be told before Triton is imported, and for good."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
