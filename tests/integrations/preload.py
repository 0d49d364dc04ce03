"""What processes of tests/processes.py begin with: imports that each would make for itself."""

import gc

import lightning.pytorch  # noqa: F401
import pytest  # noqa: F401
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

import halfstep.cli.app
import halfstep.integrations.lightning
import halfstep.integrations.transformers
import halfstep.training.loop  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a process would copy every page
