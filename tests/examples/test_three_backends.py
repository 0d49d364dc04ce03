"""examples/three_backends.py prints a row for each backend and policy, and they agree."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "three_backends.py"


@pytest.mark.prove
def test_the_table_has_every_backend_and_they_agree(capsys):
    spec = importlib.util.spec_from_file_location("three_backends", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["bf16-mixed", "--width", "16", "--layers", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(name, policy) for name, policy, *_ in rows] == [
        (name, policy) for policy in ("fp32", "bf16-mixed") for name in ("torch", "jax", "mlx")
    ]
    for _, policy, _, off, gradients, _ in rows:
        # some twenty operations in sequence, each rounding once: in fp32 after a sum of 64 terms
        bound = 20 * 64**0.5 * 2.0**-24 if policy == "fp32" else 2 * 2.0**-8 * 20**0.5
        assert abs(float(off)) <= bound
        assert float(gradients) <= bound
