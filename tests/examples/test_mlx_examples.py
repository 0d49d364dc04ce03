"""The MLX example runs, learns and is short."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlx_prepare.py"


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_any_model_and_optimizer_of_mlx_learn(policy, capsys):
    train = runpy.run_path(str(EXAMPLE))["train"]
    first, last = train(policy, 1), train(policy, 25)
    assert last < first - 0.3
    printed = capsys.readouterr().out
    assert "12 Linear" in printed
    assert "after 25 steps" in printed
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 60
