"""`python -O` strips assertions: none may do anything, and nothing that a user sees may hang on one.

The whole suite runs under it too, its own assertions included: `python -O -m pytest`.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREES = {path: ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / "halfstep").rglob("*.py"))}

# Trains under three policies and makes the mistakes of the documentation; all that can be seen goes to stdout.
SCRIPT = """
import hashlib, torch
from torch import nn
from halfstep.core.errors import HalfstepError
from halfstep.torch import AdamW, prepare

torch.manual_seed(0)
x = torch.randn(16, 16)


def made(policy, optimizer=AdamW, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    return model, prepare(model, optimizer(model.parameters(), lr=1e-3), policy, **options)


def told(what):
    try:
        print("no error:", what())
    except HalfstepError as error:
        print(type(error).__name__, error.message, error.hint)


for policy in ("bf16-mixed,param=fp32:split,emulate=true", "fp16-mixed,emulate=true", "fp8-mixed,emulate=true"):
    model, run = made(policy, clip_norm=1.0)
    for _ in range(3):
        result = run.step(lambda batch: (model(batch) - batch).square().mean(), [x, x])
    state = b"".join(w.numpy().tobytes() for w in run.weights().values())
    print(policy, result.loss.item().hex(), hashlib.sha256(state).hexdigest(), run.summary())

other = nn.Parameter(torch.zeros(2))
model, run = made("bf16-mixed,emulate=true")
told(lambda: prepare(nn.Linear(2, 2), AdamW([other]), "bf16-mixed"))
told(lambda: prepare(nn.Linear(2, 2).half(), AdamW([other]), "bf16-mixed"))
told(lambda: prepare(model, AdamW(model.parameters()), "bf16-mixed"))
told(run.update)
told(lambda: made("bf16-mixed,scale=dynamic"))
told(lambda: made("fp8-mixed,compute=e9m9"))
told(lambda: run.load_state_dict(made("fp16-mixed,emulate=true")[1].state_dict()))
told(lambda: AdamW([other], betas=(2.0, 0.9)))
"""


def test_an_assertion_does_nothing_but_look():
    doing = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    changing = {"pop", "append", "add", "update", "remove", "close", "write", "read", "step", "add_", "copy_"}
    for source, tree in TREES.items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Assert)):
            for part in ast.walk(node):
                assert not isinstance(part, doing), f"{source}:{node.lineno}"
                named = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
                assert not (named and part.func.attr in changing), f"{source}:{node.lineno}"


def test_nothing_asks_whether_python_is_optimized():
    for source, tree in TREES.items():
        assert "__debug__" not in [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)], source


def test_a_user_sees_the_same_numbers_summaries_and_errors():
    seen = [
        subprocess.run(
            [sys.executable, *flags, "-c", SCRIPT],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flags in ([], ["-O"])
    ]
    assert seen[0] == seen[1]
    assert seen[0].count("Error") >= 7
    assert "no error" not in seen[0]
