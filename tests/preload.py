"""What processes of tests/processes.py begin with: imports that each would make for itself."""

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import halfstep.cli.app
import halfstep.torch.session
import halfstep.training.loop  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a process would copy every page
