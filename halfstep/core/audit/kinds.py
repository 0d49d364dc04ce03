"""What a tensor is for, by its name and shape and the class of the module that holds it.

Names are those of common models; a tensor that none fits is `other`, of which no rule asks anything special.
"""

import re
from collections.abc import Sequence

from halfstep.core.audit.record import BufferKind, WeightKind

_ADAPTER = re.compile(r"lora|adapter|(^|\.)dora|ia3|prompt_encoder")
_ROUTER = re.compile(r"(^|[._])router([._]|$)")
_GATE = re.compile(r"(^|\.)(gate|gating)(\.|$)")  # of experts if it has few outputs; a SwiGLU's has many
_NORM = re.compile(r"norm|(^|\.)ln(_?\w+)?(\.|$)")
_EMBEDDING = re.compile(r"embed|(^|\.)wte(\.|$)|(^|\.)wpe(\.|$)")
_ROPE = re.compile(r"inv_freq|rope|rotary|freqs|(^|[._])(cos|sin)([._]|$)")
_RUNNING = re.compile(r"running_(mean|var)|num_batches")


def weight_kind(name: str, shape: Sequence[int], module: str = "") -> WeightKind:
    """Returns what a parameter is for; `module` is the name of the class of the module that holds it."""
    lower, owner = name.lower(), module.lower()
    if _ADAPTER.search(lower):
        return "adapter"
    if "norm" in owner or (len(shape) < 2 and _NORM.search(lower)):
        return "norm"
    if "embedding" in owner or (len(shape) == 2 and _EMBEDDING.search(lower)):
        return "embedding"
    if lower.rpartition(".")[2].startswith("bias") or lower.endswith("_bias"):
        return "bias"
    few = len(shape) == 2 and 2 * shape[0] <= shape[1]
    if "router" in owner or _ROUTER.search(lower) or (few and _GATE.search(lower)):
        return "router"
    return "matrix" if len(shape) >= 2 else "other"


def buffer_kind(name: str) -> BufferKind:
    """Returns what a buffer is for."""
    lower = name.lower()
    if _ROPE.search(lower):
        return "rope"
    return "running" if _RUNNING.search(lower) else "other"
