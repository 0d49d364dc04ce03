"""What processes begin with in the tests of integrations: what all begin with, and third-party packages."""

import gc

import lightning.pytorch  # noqa: F401
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

import halfstep.integrations.lightning
import halfstep.integrations.transformers  # noqa: F401
import tests.preload  # noqa: F401

gc.collect()
gc.freeze()
