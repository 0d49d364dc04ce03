"""The Python of the page on MLX runs, block by block."""

import re
from pathlib import Path

import mlx.core as mx
from mlx import nn

PAGE = (Path(__file__).parents[2] / "docs" / "mlx.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


def test_the_blocks_run_one_after_another():
    names = {"model": nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 4)), "mx": mx}
    names |= {"micro_batches": [mx.ones((2, 4))] * 2, "loss_fn": lambda model, x: mx.square(model(x)).mean()}
    for block in BLOCKS:
        exec(compile(block, "docs/mlx.md", "exec"), names)
    assert names["run"].step(names["loss_fn"], names["micro_batches"]).loss.item() > 0
