"""What models of transformers need beyond their modules and functions: attention without a mask, and a loss.

**A mask that is plainly causal is left out**, in compiled code included.

transformers leaves a mask out if it can read that it says nothing beyond "causal". Compiled, it reads nothing: it
builds the mask of every token for every token, and the kernel that takes one is half as fast as the causal kernel
(H200, GPT-2, 32 x 1024: 18.9 against 8.8 ms a pass). So a prepared model has an attention implementation of its
own: the attention is transformers' `sdpa`, the mask is None where all of this is known while the code is traced:

    no padding      no `attention_mask` was given
    no cache        queries start at 0, and there are as many keys
    no window       none is shorter than the sequence
    no packing      no `position_ids` were given, nor anything else from which a model could make its own

Without a cache transformers compares positions in case sequences are packed, though the positions are its
own. What it would have built from them is then compared with the causal mask on the device, without waiting for
it and without writing a mask: a model for which they differ stops (`PACKED`), and never trains on wrong attention.

A mask that says "no token is masked" of attention in both directions (BERT) is left out in the same way. All
other masks, and all masks outside of compiled code, are transformers' own.

**A loss that is built inside a forward.** `nn.CrossEntropyLoss()` there is a function for dynamo: it puts
`F.cross_entropy` straight into its graph, past every mode, and the loss of bf16 logits is bf16. A subclass is
traced like any other code. So the modules of transformers get one: the same loss, under the name by which their
code knows it. A model whose name does not say what its loss is (`GPT2LMHeadModel`) has the one for causal language
models, and a warning through which no compiler can go; `default_loss` is that loss.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from halfstep.torch.convert.modules import Root

NAME = "halfstep_causal"
# Arguments of a model from which it makes neither positions nor masks.
_PLAIN = (
    "input_ids inputs_embeds labels shift_labels use_cache return_dict output_attentions output_hidden_states "
    "output_router_logits num_items_in_batch logits_to_keep"
)
PLAIN = frozenset(_PLAIN.split())
# Without quotes, which torch's compiler does not escape.
PACKED = (
    "this model makes positions of its own by which sequences are packed, and was compiled as if it did not; "
    "choose sdpa by model.set_attn_implementation after prepare"
)
# What a model's source has if it asks for `sdpa` by name, or adds to the causal mask.
_BY_NAME = ('_attn_implementation == "sdpa"', '_attn_implementation != "sdpa"')
_ADDS = ("or_mask_function", "and_mask_function", "block_sequence_ids")


class Attention(NamedTuple):
    """The attention of one model of transformers, which a prepared model may consist of."""

    model: str  # the name of its class
    config: Any
    why_not: str  # why it keeps its own implementation; empty if it has ours


class _Call:
    """What is known about the arguments of the model that is called now; only code that is traced looks at it."""

    def __init__(self) -> None:
        self.own_positions = False


_call = _Call()


class CausalRoot(Root):
    """A model some of whose attention has our implementation: it says whether its positions are its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output."""
        # The first argument is input_ids or inputs_embeds; what comes after has no name here.
        _call.own_positions = len(args) < 2 and all(v is None or k in PLAIN for k, v in kwargs.items())
        try:
            return super().forward(*args, **kwargs)
        finally:
            _call.own_positions = False


def choose_attention(model: nn.Module) -> list[Attention]:
    """Gives our implementation to every part of a model that has transformers' `sdpa`; lists them, and others."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    found: list[Attention] = []
    if modeling is None:
        return found
    for part in model.modules():
        config = getattr(part, "config", None)
        if not isinstance(part, modeling.PreTrainedModel) or any(config is row.config for row in found):
            continue
        if getattr(config, "_attn_implementation", None) in ("sdpa", NAME):  # models may share a configuration
            row = Attention(type(part).__name__, config, _why_not(type(part)))
            found.append(row)
            if not row.why_not:
                register()
                row.config._attn_implementation_internal = NAME
    return found


def restore_attention(chosen: Iterable[Attention]) -> None:
    """Gives the models their implementation back, unless another was chosen since."""
    for row in chosen:
        if not row.why_not and row.config._attn_implementation == NAME:
            row.config._attn_implementation_internal = "sdpa"


def _why_not(kind: Any) -> str:
    if not kind._can_set_attn_implementation():
        return "its code does not ask for an implementation"
    source = inspect.getsource(sys.modules[kind.__module__])
    if any(words in source for words in _BY_NAME):
        return "its code asks for `sdpa` by name"
    return "its code adds to the causal mask" if any(words in source for words in _ADDS) else ""


def register() -> None:
    """Makes our implementation known to transformers, by its name, once."""
    attention: Any = sys.modules["transformers.modeling_utils"].AttentionInterface
    masking: Any = sys.modules["transformers.masking_utils"]
    if NAME not in attention():
        attention.register(NAME, attention()["sdpa"])
        masking.AttentionMaskInterface.register(NAME, partial(causal_mask, masking.sdpa_mask))


def causal_mask(sdpa_mask: Callable[..., Any], **given: Any) -> Any:
    """Returns what transformers' `sdpa_mask` does; in code that is traced, None if the mask is plain."""
    if not torch.compiler.is_compiling() or not _may_be_plain(given):
        return sdpa_mask(**given)
    if not given.get("allow_is_causal_skip", True) and not given.get("allow_is_bidirectional_skip", False):
        length, device = given["q_length"], given["device"]
        place = torch.arange(length, device=device)
        plain = place[None, :] <= place[:, None]
        torch._assert_async((sdpa_mask(**given) == plain).all(), PACKED)
    return None


def _may_be_plain(given: dict[str, Any]) -> bool:
    """Whether nothing that is known while code is traced speaks against attention without a mask."""
    start, keys, window = given.get("q_offset", 0), given["kv_length"], given.get("local_size")
    if given.get("attention_mask") is not None or (window is not None and keys >= window):
        return False
    if given.get("allow_is_bidirectional_skip", False):
        return True
    if (
        isinstance(start, torch.Tensor)
        or start != 0
        or given.get("kv_offset", 0) != 0
        or keys != given.get("q_length")
    ):
        return False
    own = _call.own_positions and not given.get("use_vmap", False)
    return own or given.get("allow_is_causal_skip", True)


_NAME = "CrossEntropyLoss"


# --- the loss


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's, whose `F.cross_entropy` a function mode sees in compiled code too."""


def reach_losses(model: nn.Module) -> None:
    """Gives the modules of transformers that a model's classes are from a loss that dynamo traces, once."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    for name in names:
        module = sys.modules.get(name)
        if name.startswith("transformers.") and getattr(module, _NAME, None) is nn.CrossEntropyLoss:
            setattr(module, _NAME, CrossEntropyLoss)


def default_loss(module: nn.Module) -> Any:
    """Returns what transformers takes if it does not know the loss of one of its models; None if it does."""
    losses = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
    asks = isinstance(getattr(type(module), "loss_function", None), property) and hasattr(module, "loss_type")
    if not asks or hasattr(module, "_loss_function") or module.loss_type in losses:
        return None
    return losses.get("ForCausalLM")
