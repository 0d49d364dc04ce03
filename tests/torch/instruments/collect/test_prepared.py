"""What an audit knows of halfstep's own classes by name and attribute is what the engine really has."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep.torch.instruments.collect as collect
from halfstep.torch import prepare
from halfstep.torch.instruments.collect.formats import switches
from halfstep.torch.instruments.collect.tensors import format_name, is_split, stored_values
from halfstep.torch.instruments.collect.updates import formula_of
from halfstep.torch.instruments.collect.weights import weights_of
from halfstep.torch.numerics.cast import join
from halfstep.torch.numerics.dtypes import DTYPES
from halfstep.torch.numerics.split.operand import SPLIT
from halfstep.torch.optim.adamw import AdamW

MODULES = sorted(path.stem for path in Path(collect.__file__).parent.glob("*.py") if path.stem != "__init__")
LIST_MODULES = "import {name}, sys; print(*(m for m in sys.modules if m.startswith('halfstep.')))"


def test_collectors_import_no_engine():
    folder = collect.__name__
    names = ", ".join(f"{folder}.{name}" for name in MODULES)
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES.format(name=names)], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    own = {f"{folder}.{name}" for name in MODULES}
    assert own <= loaded
    assert {name for name in loaded - own if not name.startswith("halfstep.core")} == {
        "halfstep.torch",
        "halfstep.torch.instruments",
        folder,
    }


def test_formats_have_the_names_of_the_engine():
    assert {dtype: format_name(dtype) for dtype in DTYPES.values()} == {d: str(f) for f, d in DTYPES.items()}
    assert format_name(torch.int8) == "int8"


@pytest.mark.parametrize(("policy", "split"), [("bf16-mixed", False), ("bf16-mixed,param=fp32:split", True)])
def test_masters_are_recognized(policy, split):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = prepare(model, optimizer, policy)
    assert is_split(model.weight) is split
    if split:
        whole = join(model.weight.detach(), getattr(model.weight, SPLIT).remainder)
        assert torch.equal(stored_values(model.weight).view(torch.float32), whole)
    (weight, _) = weights_of(model, run.optimizers)
    assert (weight.master, weight.stepped) == ("fp32" if split else None, "fp32")


def test_our_own_optimizer_is_recognized():
    model = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters(), lr=0.1, masters="bf16:stochastic")
    assert formula_of(optimizer) == "AdamW"
    assert [weight.stochastic for weight in weights_of(model, [optimizer])] == [True, True]


def test_layers_of_a_policy_are_recognized():
    model = nn.Sequential(nn.Linear(16, 16))
    prepare(model, "fp8-mixed,emulate=true")
    assert {k: v for k, v in switches({"": model}, 0).items() if k != "fp32_matmul"} == {
        "fp8_asked": "the policy",
        "fp8_layers": 1,
    }
