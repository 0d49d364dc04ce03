"""What leaves through torch: our decoder as ONNX, and a model in transformers, run as it was written.

Nothing here is imported by training. The packages are optional, and the caller has checked that they are there.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from halfstep.config.model import ModelConfig
from halfstep.config.weights import Weights
from halfstep.core.errors import StateError
from halfstep.torch.measure import devices
from halfstep.torch.model import Decoder
from halfstep.torch.numerics.dtypes import as_device

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
        raise StateError(f"transformers does not find the tensors it expects ({'; '.join(odd)})")
    place = as_device(device or devices()[0])
    model = model.to(place).eval()

    @torch.no_grad()
    def forward(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = model(torch.from_numpy(np.ascontiguousarray(tokens)).to(place), use_cache=False).logits
        return logits.float().cpu().numpy()

    return forward


class Logits(nn.Module):
    """Our decoder as those who serve it call it: from tokens to the logits of each next one, after the softcap."""

    def __init__(self, config: ModelConfig, weights: Weights):
        super().__init__()
        self.decoder = Decoder(config)
        self.decoder.set_weights(weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits, in fp32."""
        return self.decoder.capped(self.decoder(tokens))


@torch.no_grad()
def write_onnx(config: ModelConfig, weights: Weights, file: Path) -> None:
    """Writes a decoder in fp32 as ONNX, for any number of rows and any number of tokens up to its context."""
    model, example = Logits(config, weights).eval(), torch.zeros((2, min(config.context, 8)), dtype=torch.int64)
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens", min=1, max=config.context)}
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes=(sizes,),
        input_names=["tokens"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    # The exporter writes into each node where in our code it is from, with this machine's paths.
    import_module("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(program.model)
    program.save(file)
