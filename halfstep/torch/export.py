"""What leaves through torch: a model in transformers, run as it was written.

Nothing here is imported by training. The packages are optional, and the caller has checked that they are there.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep.core.errors import HalfstepError
from halfstep.torch.dtypes import as_device
from halfstep.torch.measure import devices

Forward = Callable[[NDArray[np.int64]], NDArray[np.float32]]


def open_transformers(folder: Path, device: str | None) -> Forward:
    """Loads a folder with transformers, in fp32, and returns its forward pass; refuses one that does not fit."""
    transformers = import_module("transformers")
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    finally:
        if shown:
            logging.enable_progress_bar()
    if odd := [f"{kind}: {sorted(map(str, names))[0]}" for kind, names in info.items() if names]:
        raise HalfstepError(f"transformers does not find the tensors it expects ({'; '.join(odd)})")
    place = as_device(device or devices()[0])
    model = model.to(place).eval()

    @torch.no_grad()
    def forward(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = model(torch.from_numpy(np.ascontiguousarray(tokens)).to(place), use_cache=False).logits
        return logits.float().cpu().numpy()

    return forward
