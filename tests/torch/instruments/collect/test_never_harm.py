"""An error of the collector never reaches the script: planted in any of its functions, it leaves the losses."""

import importlib
import inspect
import json
import os
import pkgutil
import struct
import subprocess
import sys

import pytest
import torch
from torch import nn

from halfstep.tools.audit.script import run
from halfstep.torch.instruments import collect
from halfstep.torch.instruments.collect.guard import Guard
from halfstep.torch.instruments.collect.patches import Patches
from halfstep.torch.instruments.collect.watch import Process

# What itself catches errors, and what only the end of a `with` block calls.
APART = {"guard", "Patches.wrap", "ResultMode.__torch_function__", "Process.write", "Process.note_failure"}
APART |= {"Watch.__enter__", "Watch.__exit__", "Patches.undo"}


def functions():
    """Yields every function of the collector, with its owner."""
    for found in pkgutil.iter_modules(collect.__path__):
        module = importlib.import_module(f"{collect.__name__}.{found.name}")
        owners = [module, *(k for k in vars(module).values() if inspect.isclass(k))]
        for owner in owners:
            for name, value in vars(owner).items():
                here = getattr(value, "__module__", None) == module.__name__
                if inspect.isfunction(value) and here and not {found.name, value.__qualname__} & APART:
                    yield owner, name


PLANTS = sorted({(owner.__name__, name): (owner, name) for owner, name in functions()}.values(), key=str)


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Softmax(-1), nn.Linear(16, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    bits = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 8)).float(), torch.randint(2, (4,)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(filter(lambda p: p.grad is not None, model.parameters()), 0.1)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        bits.append(struct.pack("ff", loss.item(), norm.item()).hex())
    return bits


@pytest.fixture(scope="module")
def plain():
    return train()


def watched(folder):
    """Returns what the loop prints under the watch of a process, and what is noted of failures."""
    try:
        process = Process(str(folder), 100)
    except RuntimeError as error:  # what the `sitecustomize` of an audit catches
        return train(), [str(error)]
    with process.watch:
        bits = train()
        process.write()
    notes = [path.read_text() for path in folder.glob("unwatched-*.txt")]
    records = [json.loads(path.read_text())["record"] for path in folder.glob("record-*.json")]
    return bits, notes + [text for record in records for text in record["unseen"] if "cheese" in text]


@pytest.mark.parametrize(
    ("nth", "each"), [(1, 4), *(pytest.param(nth, 1, marks=pytest.mark.prove) for nth in (1, 2, 3))]
)
def test_an_error_in_any_function_leaves_the_losses(nth, each, plain, tmp_path, monkeypatch):
    assert len(PLANTS) > 150
    failed = 0
    for index, (owner, name) in enumerate(PLANTS[::each]):
        calls, original = [0], getattr(owner, name)

        def broken(*args, original=original, calls=calls, **kwargs):
            calls[0] += 1
            if calls[0] == nth:
                raise RuntimeError("out of cheese")
            return original(*args, **kwargs)

        folder = tmp_path / str(index)
        folder.mkdir()
        with monkeypatch.context() as context:
            context.setattr(owner, name, staticmethod(broken) if is_static(owner, name) else broken)
            bits, notes = watched(folder)
        assert bits == plain, (owner, name)
        assert hooks_left() == [], (owner, name)
        if calls[0] >= nth:
            failed += 1
            assert any("out of cheese" in note for note in notes), (owner, name, notes)
    assert failed > 60 // each


def hooks_left():
    """Returns every hook and mode of torch's that holds for all modules, optimizers and functions."""
    modules, optimizers = vars(nn.modules.module), vars(sys.modules["torch.optim.optimizer"])
    hooks = [modules[name] for name in modules if name.startswith("_global_") and name.endswith("_hooks")]
    hooks += [optimizers[name] for name in optimizers if name.startswith("_global_") and name.endswith("_hooks")]
    return [hook for each in hooks for hook in each] + torch.overrides._get_current_function_mode_stack()


def is_static(owner, name):
    return isinstance(vars(owner)[name], staticmethod)


def test_what_the_script_raises_passes(tmp_path):
    def raise_error(*_, **__):
        raise KeyError("the script's own")

    guard = Guard()
    with pytest.raises(KeyError):
        guard.call(lambda original, *args: original(*args), raise_error, (1,), {})
    assert guard.failure is None

    def fails_after(original, *args):
        try:
            original(*args)
        finally:
            raise RuntimeError("ours")

    with pytest.raises(KeyError):
        guard.call(fails_after, raise_error, (1,), {})
    assert guard.failure.startswith("RuntimeError: ours (at ")


def test_after_a_failure_the_hooks_are_silent():
    guard, seen = Guard(), []
    patches = Patches(guard)

    class Owner:
        def double(self, x):
            return 2 * x

    def around(original, *args):
        seen.append(args)
        raise RuntimeError("ours")

    patches.wrap(Owner, "double", around)
    assert [Owner().double(i) for i in range(3)] == [0, 2, 4]
    assert len(seen) == 1
    patches.undo()


SCRIPT = """
import sys, torch
w = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([w], lr=0.1)
for _ in range(5):
    optimizer.zero_grad(); (w * w).sum().backward(); optimizer.step(); print(w.tolist())
sys.exit(7)
"""


@pytest.mark.parametrize("where", [pytest.param("import", marks=pytest.mark.prove), "step"])
def test_a_script_keeps_its_output_and_its_exit_code(where, tmp_path, monkeypatch, capfd):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    plain = subprocess.run(command, capture_output=True, text=True)
    # Without the audit's Python path, as in the environment of a script: this one breaks the collector there.
    target = "watch.begin" if where == "import" else "loop_hooks.LoopHooks.before_step"
    module, _, name = target.partition(".")
    owner = "module" if "." not in name else f"module.{name.partition('.')[0]}"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.abc\n"
        "class Plant:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name != 'halfstep.torch.instruments.collect.{module}': return None\n"
        "        sys.meta_path.remove(self)\n"
        "        import importlib.util\n"
        "        spec = importlib.util.find_spec(name)\n"
        "        run = spec.loader.exec_module\n"
        "        def broken(module):\n"
        "            run(module)\n"
        "            def fail(*_, **__): raise RuntimeError('out of cheese')\n"
        f"            setattr({owner}, {name.rpartition('.')[2]!r}, fail)\n"
        "        spec.loader.exec_module = broken\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Plant())\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    outcome = run(command, steps=3)
    out, err = capfd.readouterr()
    assert (out, err, outcome.exit_code) == (plain.stdout, plain.stderr, plain.returncode) == (out, "", 7)
    assert ["out of cheese" in failure for failure in outcome.failures] == [True]
