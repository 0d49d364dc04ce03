"""`python -O` strips assertions: none may have an effect, and nothing a user sees may depend on one.

`make prove` also runs tests under it; pytest keeps the assertions of the tests themselves.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "halfstep").rglob("*.py"))

# Trains under three policies, then makes mistakes that must be refused; prints everything a user would see.
SCRIPT = """
import hashlib, torch
from torch import nn
from halfstep.core.errors import HalfstepError
from halfstep.torch import AdamW, prepare

torch.manual_seed(0)
x = torch.randn(16, 16)


def prepared(policy, optimizer=AdamW, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    return model, prepare(model, optimizer(model.parameters(), lr=1e-3), policy, **options)


def attempt(action):
    try:
        print("no error:", action())
    except HalfstepError as error:
        print(type(error).__name__, error.message, error.hint)


for policy in ("bf16-mixed,param=fp32:split,emulate=true", "fp16-mixed,emulate=true", "fp8-mixed,emulate=true"):
    model, run = prepared(policy, clip_norm=1.0)
    for _ in range(3):
        result = run.step(lambda batch: (model(batch) - batch).square().mean(), [x, x])
    state = b"".join(w.numpy().tobytes() for w in run.weights().values())
    print(policy, result.loss.item().hex(), hashlib.sha256(state).hexdigest(), run.summary())

other = nn.Parameter(torch.zeros(2))
model, run = prepared("bf16-mixed,emulate=true")
attempt(lambda: prepare(nn.Linear(2, 2), AdamW([other]), "bf16-mixed"))
attempt(lambda: prepare(nn.Linear(2, 2).half(), AdamW([other]), "bf16-mixed"))
attempt(lambda: prepare(model, AdamW(model.parameters()), "bf16-mixed"))
attempt(run.update)
attempt(lambda: prepared("fp16-mixed,scale=none"))
attempt(lambda: prepared("fp8-mixed,compute=e9m9"))
attempt(lambda: run.load_state_dict(prepared("fp16-mixed,emulate=true")[1].state_dict()))
attempt(lambda: AdamW([other], betas=(2.0, 0.9)))
"""


# The only functions that an assertion may call: none has an effect.
PURE = {"all", "fields", "isinstance", "items", "named_parameters", "parameter_shapes", "set", "tuple"}


def effects(text):
    """Returns the lines of assertions that could have an effect, and of code that asks whether they are there."""
    changing = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    found = []
    for node in ast.walk(ast.parse(text)) if "assert " in text or "__debug__" in text else ():
        if isinstance(node, ast.Name) and node.id == "__debug__":
            found.append(node.lineno)
        for part in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
            called = part.func if isinstance(part, ast.Call) else None
            name = getattr(called, "attr", getattr(called, "id", None))
            if isinstance(part, changing) or (called is not None and name not in PURE):
                found.append(node.lineno)
    return found


def test_no_assertion_has_an_effect_and_no_code_depends_on_debug_mode():
    found = {str(source): effects(source.read_text("utf-8")) for source in SOURCES}
    assert {source: lines for source, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text", ["assert stack.pop()", "assert (x := 1)", "assert all(next(i) for i in y)", "if __debug__: pass"]
)
def test_an_effect_is_found(text):
    assert effects(text) == [1]


@pytest.mark.prove
def test_optimized_python_gives_the_same_numbers_summaries_and_errors():
    outputs = [
        subprocess.run(
            [sys.executable, *flags, "-c", SCRIPT],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flags in ([], ["-O"])
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("Error") >= 7
    assert "no error" not in outputs[0]
