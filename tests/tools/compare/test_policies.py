"""bf16-mixed is the same as fp32, and bf16-true is not: real runs of `tiny`, cut to what takes seconds."""

import pytest

from halfstep.config.load import load
from halfstep.tools.compare.judge import judge
from halfstep.tools.compare.runs import paired

CUT = ("model.layers=1", "model.width=16", "model.heads=1", "model.context=16", "training.batch=4")
RATE = ("training.validation_tokens=1024", "monitor.on=false", "optimizer.name=adamw", "optimizer.rate=1e-4")


@pytest.mark.prove
def test_mixed_is_the_same_and_true_is_different_at_a_low_rate(tmp_path):
    policies = ["bf16-mixed", "bf16-true", "fp32"]
    curves = paired(load("tiny", [*CUT, *RATE]), policies, range(4), 60, out=tmp_path)
    runs = {policy: list(by_seed.values()) for policy, by_seed in curves.items()}
    mixed, true = (judge((name, "fp32"), runs[name], runs["fp32"]) for name in policies[:2])
    assert mixed.verdict.kind == "same"
    assert (mixed.parting, mixed.seeds) == (None, (0, 1, 2, 3))
    assert true.verdict.kind == "different"
    assert true.verdict.mean > 0  # it lost updates, and so learned less
