"""What processes of tests/processes.py begin with: imports that each would make for itself."""

import pytest  # noqa: F401
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

import halfstep.integrations.transformers  # noqa: F401
