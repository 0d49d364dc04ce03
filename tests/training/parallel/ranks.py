"""`halfstep train` on several ranks, in processes that are forked, with faults that are planted in one of them."""

import hashlib
import os
from functools import partial

import pytest
import torch

from halfstep.cli import outcome
from halfstep.cli.main import run
from tests.processes import run_ranks
from tests.training.runs import SMALL, events_of

BASE = [*SMALL, "training.batch=4", "training.steps=6", "training.validate_every=4", "training.save_every=2",
        "training.validation_tokens=112", "training.measure_ceiling=false"]  # fmt: skip


def words(text, out, *settings, policy="fp32", resume=False):
    given = [word for each in (*BASE, f"data.source={text}", *settings) for word in ("--set", each)]
    own = ["train", "tiny", "--out", str(out), "--policy", policy, "--device", "cpu", *given]
    return [*own, "--resume"] if resume else own


def train(commands, plant=None, count=2, local=None):
    """Runs a command on each rank; returns (exit code, what it printed, digest of its weights) of each."""
    commands = commands if isinstance(commands[0], list) else [commands] * count
    return run_ranks(_command, commands, plant, local or count, count=count)


def train_to_end(*given, **options):
    """Trains as `train` does; fails the test unless every rank ends with exit code 0."""
    ends = train(*given, **options)
    if any(code for code, *_ in ends):
        pytest.fail(str(ends))
    return ends


def _command(commands, plant, local):
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    log = log_of(commands[0], rank)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if "training.compile=true" in commands[0]:
        torch.compile = partial(torch.compile, backend="aot_eager")  # inductor would take a minute
    digests, end = [], outcome.run

    def planted(loop, *, json):
        if plant is not None:
            plant(loop)
        code = end(loop, json=json)
        digests.append(digest(loop.session.run.weights()))
        return code

    outcome.run = planted
    code = run(commands[rank])
    with open(log, encoding="utf-8") as file:
        return code, file.read(), digests


def log_of(command, rank):
    return f"{command[command.index('--out') + 1]}-{rank}.log"


def digest(weights):
    found = hashlib.sha256()
    for name, tensor in weights.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.encode() + whole.numpy().tobytes())
    return found.hexdigest()


def numbers(out, kind="step", keys=("step", "loss", "grad_norm")):
    return [tuple(event.get(key) for key in keys) for event in events_of(out, kind)]
