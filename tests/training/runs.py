"""Small runs on the CPU, for tests: starting, resuming and interrupting them, and reading what they left."""

import errno
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.core.state_format import Part, Stored
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.parts import save_part
from halfstep.training.loop import Loop
from halfstep.training.paths import CHECKPOINTS, EVENTS
from halfstep.training.run.response import RollBackError
from halfstep.training.run.resume import open_run
from halfstep.training.telemetry.events import read_events

SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=2",
         "training.micro_batches=1", "training.validate_every=100", "training.validation_tokens=64"]  # fmt: skip


def starter(*base):
    """Returns a function that begins or resumes a small run with some settings.

    The monitor is off unless a setting is about it: it would double the time of a run of a few steps.
    """

    def start(source, out, *settings, policy="fp32", resume=False, allow_older=False, **options):
        given = [f"data.source={source}", *SMALL, *base, *settings]
        given += [] if any(each.startswith("monitor.") for each in given) else ["monitor.on=false"]
        config, opened = load("tiny", given), None
        if resume:
            opened = open_run(out, config, allow_older=allow_older)
            config = opened.config
        return Loop(config, Policy.parse(policy), out, device="cpu", opened=opened, **options)

    return start


def resume(out, **options):
    """Resumes a run with its own settings, as `halfstep train --resume` does if no recipe is named."""
    opened = open_run(out)
    return Loop(opened.config, Policy.parse(opened.policy), out, device="cpu", opened=opened, **options)


def final_state(out):
    """Returns the tensors of the newest checkpoint without random state, and its manifest."""
    arrays, manifest = checkpoint.load(checkpoint.latest(out / CHECKPOINTS))
    return {name: (*a[:2], bytes(a.data)) for name, a in arrays.items() if name != "rng.cpu"}, manifest


def spread(path, folder, ranks=2):
    """Writes a checkpoint again as so many ranks that share its tensors would; returns its folder."""
    arrays, manifest = checkpoint.load(path)
    meta = {key: value for key, value in manifest.items() if key not in checkpoint.OWN_KEYS}
    folder.mkdir()

    def save(rank):
        held = {}
        for name, (dtype, shape, data) in arrays.items():
            if len(shape) < 2:
                held |= {name: arrays[name]} if rank == 0 else {}
                continue
            size = -(-shape[0] // ranks)
            start, stop = min(rank * size, shape[0]), min((rank + 1) * size, shape[0])
            row = len(data) // shape[0]
            part = Stored(dtype, (stop - start, *shape[1:]), bytes(data[start * row : stop * row]))
            held[name] = Part(part, start, shape[0])
        return save_part(folder, manifest["step"], lambda: held, meta, rank=rank, ranks=ranks, token="test")

    with ThreadPoolExecutor(ranks) as pool:
        first, *_ = pool.map(save, range(ranks))
        return first


def events_of(out, *kinds):
    return [event for event in read_events(out / EVENTS) if not kinds or event["event"] in kinds]


class InterruptedByTestError(Exception):
    """What a kill is to a run inside a test."""


def interrupt_when(loop, condition):
    """Runs a loop until a condition holds when a step is launched."""

    def act():
        if condition(loop):
            raise InterruptedByTestError

    before_step(loop, act)
    with pytest.raises(InterruptedByTestError):
        loop.run()
    loop.lock.release()


def interrupt_at(loop, steps):
    """Runs a loop that breaks off in the middle of the step after so many."""
    interrupt_when(loop, lambda loop: loop.tally.step == steps)


def before_step(loop, act):
    """Calls `act` before every step is launched."""
    launch = loop.session.step

    def step(batch):
        act()
        return launch(batch)

    loop.session.step = step
    return loop


def at_step(loop, number, act):
    """Calls `act` as a step is launched, once."""
    done = []

    def once():
        if loop.tally.launched == number - 1 and not done:
            done.append(1)
            act()

    return before_step(loop, once)


def ruin_by_update(loop, number):
    """Makes the update of a step leave weights that are not finite; its own loss was finite."""
    launch = loop.session.step

    def step(batch):
        result = launch(batch)
        if loop.tally.step == number - 1:
            ruin(loop)
        return result

    loop.session.step = step
    return loop


def ruin(loop):
    loop.session.model.blocks[0].mlp.up.weight.data[:] = math.nan


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def raising(error):
    """Returns a function that raises, instead of a call that would not."""

    def call(*_, **__):
        raise error

    return call


def full(*_, **__):
    """Raises what a full disk raises, instead of a call that writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def evaluations_find(losses, monkeypatch):
    """Makes the loop's evaluations find the given losses, by step."""
    from halfstep.training import loop as module

    real = module.evaluate

    def evaluate(session, *rest, **options):
        found = real(session, *rest, **options)
        return type(found)(losses[session.applied()], found.tokens, None, found.bigram_bits)

    monkeypatch.setattr(module, "evaluate", evaluate)


def poison(loop, indices, factor):
    """Multiplies the loss of some data, wherever and whenever it is seen."""
    bad = {loop.batches.at(index)[0, :, :-1].tobytes() for index in indices}
    real = loop.session._loss

    def loss(x, y):
        return real(x, y) * (factor if x.numpy().astype(np.int32).tobytes() in bad else 1.0)

    loop.session._loss = loss
    return loop


def give_up(loop, good):
    """Gives up the steps since the checkpoint of a good one, as the responder does: once it is written."""
    loop.health.good = good
    if not loop.checkpointer.can_roll_back(loop.tally.step):  # no assert, which `python -O` would leave out
        pytest.fail("there is no checkpoint to go back to")
    raise RollBackError


def roll_back_at(loop, number, good):
    """Gives up the steps after the good one, once, when a step has been recorded."""
    record, gone = loop._record, []

    def back_once(result):
        record(result)
        if loop.tally.step == number and not gone:
            gone.append(1)
            give_up(loop, good=good)

    loop._record = back_once
