"""Adapters of PEFT, merged into the base that they were trained beside, or not at all.

    merge(base, "out").save_pretrained("merged")

Adapters make up for what the base beside them lacks, its rounding included: merged into another one, such as the
bf16 original of a base in 4 bits, they give a model that nobody has trained or evaluated. So Trainer's
`save_model` writes beside adapters which base they are of, as sums of its bytes, and `merge` compares.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.config.reading import parse_json, read_bytes
from halfstep.core.errors import StateError
from halfstep.integrations import state
from halfstep.torch.run import Run
from halfstep.training.files import write_whole

NAME = "halfstep_base.json"


def base_of(run: Run) -> dict[str, int]:
    """Returns what tells the base of a run's adapters from others; all ranks that share it call it."""
    return {_name_in_base(name): total for name, total in state.sums_of_frozen(run).items()}


def write_base(folder: Path, base: Mapping[str, int]) -> None:
    """Writes beside adapters which base they are of, as `base_of` returned it."""
    write_whole(folder / NAME, json.dumps({"base": dict(base)}, indent=1).encode())


def merge(base: Any, adapters: str | Path, *, dtype: torch.dtype | None = None) -> Any:
    """Returns a base of transformers with the adapters of a folder added to its weights.

    A base in 4 bits is dequantized first. Sums are fp32, and are rounded once to `dtype`, by default the base's.
    The base becomes the merged model. Any other base than the one of the adapters is refused.
    """
    folder = Path(adapters)
    try:
        wanted = parse_json(read_bytes(folder / NAME))["base"]
    except FileNotFoundError:
        raise StateError(
            f"`{folder}` does not say beside which base its adapters were trained: it has no {NAME}",
            hint="save them by save_model() of a Trainer with a policy; or merge them by PEFT, and evaluate what "
            "you get",
        ) from None
    weights = dict(base.named_parameters())
    here = state.sums_of_bytes(weights) | state.sums_of_scales(base)
    if odd := [name for name, total in wanted.items() if here.get(name) != total]:
        raise StateError(
            f"the adapters in `{folder}` were trained beside another base: `{odd[0]}` differs ({len(odd)} such "
            f"weights){_as_rounded(weights, odd, wanted)}",
            hint="load the base as it was loaded for training, with the same dtype and quantization_config",
        )
    whole = base.dequantize() if any(state.scales_of(base)) else base
    dtype = dtype or whole.dtype
    merged = import_module("peft").PeftModel.from_pretrained(whole.float(), folder).merge_and_unload().to(dtype)
    merged.config.dtype = dtype
    return merged


def _name_in_base(name: str) -> str:
    name = name.removeprefix("model.").removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _as_rounded(weights: Mapping[str, Tensor], odd: list[str], wanted: Mapping[str, int]) -> str:
    """Says how far the base in 4 bits is from this one, if this one is whole."""
    whole = {name: p.detach() for name, p in weights.items() if not hasattr(p, "quant_state")}
    name = next((name for name in odd if f"{name}.quant_state" in wanted and name in whole), None)
    if name is None:
        return ""
    functional = import_module("bitsandbytes.functional")
    rounded = functional.dequantize_4bit(*functional.quantize_4bit(whole[name], quant_type="nf4")).float()
    apart = float((rounded - whole[name].float()).norm() / whole[name].float().norm())
    held = str(whole[name].dtype).removeprefix("torch.")
    return f". It was in 4 bits: `{name}`, {held} here, changes by {apart:.1%} when it is rounded to NF4"
