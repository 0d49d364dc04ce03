"""Accelerate and Trainer with two processes (DDP over gloo): the losses of one, the same bits on both."""

import math
import os
import signal
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from halfstep.core.errors import HalfstepError
from halfstep.integrations.accelerate import Accelerator
from tests.accelerate_state import fresh_accelerate, reset  # noqa: F401
from tests.integrations import test_accelerate, test_transformers
from tests.processes import preload_integrations, run_alone, run_ranks

pytestmark = pytest.mark.prove
# What another order of summation explains: the gradients of two halves are rounded apart, each to a format's unit.
SPLIT = "bf16-mixed,param=fp32:split"
BOUNDS = {"fp32": 2.0**-20, "bf16-mixed": 2.0**-8, "fp16-mixed": 2.0**-11, SPLIT: 2.0**-8}


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    preload_integrations()


def numbers(named):
    return {name: value.detach().numpy().copy() for name, value in named.items()}


def same(a, b):
    return a.keys() == b.keys() and all(numpy.array_equal(a[name], b[name]) for name in a)


def accelerated(policy, batch_size, *, kind="AdamW", dropout=False, save=None, load=None):
    """Trains by Accelerate's loop, two micro-batches per update; returns mean losses, masters, averages."""
    accelerator = Accelerator(policy=policy, cpu=True, gradient_accumulation_steps=2, ema=0.9)
    model = test_accelerate.Net().train(dropout)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    loader = DataLoader(test_accelerate.TOKENS, batch_size=batch_size)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # Accelerate steps it once per process
    parts = accelerator.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(accelerator.process_index)  # each draws its own dropout
    if save:
        test_accelerate.train(accelerator, *parts)
        accelerator.save_state(save)
    if load:
        accelerator.load_state(load)
    losses = torch.tensor(test_accelerate.train(accelerator, *parts)).view(-1, 2).mean(1)
    run, wrapped = accelerator.run, type(parts[0]).__name__
    return accelerator.reduce(losses, "mean").tolist(), numbers(run.weights()), numbers(run.ema), wrapped


def learn_as_one(policy, train, size):
    """Two processes with batches of a size against one with batches of twice that size."""
    (losses, *first), (_, *second) = run_ranks(partial(train, **{size[0]: size[1]}))
    assert first[-1] == "DistributedDataParallel"
    assert same(first[0], second[0])
    assert same(first[1], second[1])
    expected, *_ = run_alone(partial(train, **{size[0]: 2 * size[1]}))
    assert losses == pytest.approx(expected, rel=BOUNDS[policy])


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", SPLIT])
def test_two_processes_of_accelerate_learn_as_one(policy):
    learn_as_one(policy, partial(accelerated, policy, kind="SGD"), ("batch_size", 4))


def test_two_processes_of_accelerate_are_saved_and_resumed_bit_for_bit(tmp_path):
    given, folder = ("fp16-mixed", 4), str(tmp_path)
    whole = run_ranks(partial(accelerated, *given, dropout=True, save=folder))
    again = run_ranks(partial(accelerated, *given, dropout=True, load=folder))
    for before, after in zip(whole, again, strict=True):
        assert before[0] == after[0]
        assert same(before[1], after[1])
        assert same(before[2], after[2])


def skips(policy):
    accelerator, model, optimizer, _, scheduler = test_accelerate.make(policy)
    seen = []
    for bad in (None, 1, None):
        rate = scheduler.get_last_lr()
        loss = test_accelerate.loss_of(model, test_accelerate.TOKENS[:4])
        accelerator.backward(loss * (math.nan if bad == accelerator.process_index else 1.0))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        waited = scheduler.get_last_lr() == rate
        run = accelerator.run
        seen.append((accelerator.optimizer_step_was_skipped, waited, int(run.num_applied)))
    return seen, float(run.scale_state.scale), numbers(run.weights())


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_a_gradient_that_is_not_finite_in_one_process_is_skipped_in_both(policy):
    first, second = run_ranks(skips, policy)
    assert first[0] == second[0] == [(False, False, 1), (True, True, 1), (False, False, 2)]
    assert first[1] == second[1]
    assert same(first[2], second[2])


def refusal():
    reset()
    try:
        test_accelerate.make("bf16-true", steps=2)
    except HalfstepError as error:
        return str(error)


def test_masters_whose_gradients_ddp_does_not_exchange_are_refused():
    for narrow in run_ranks(refusal):
        assert "the policy leaves it none" in narrow
        assert "param=fp32" in narrow


def trained(folder, policy, *, resume=None, killed=False, dropout=0.1, **changes):
    """Trains by Trainer; returns the logged losses, masters, averages."""

    class Kill(test_transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if killed and state.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    backend = {"ddp_backend": "gloo"} if "RANK" in os.environ else {}
    trainer = test_transformers.make(folder, policy, ema=0.9, callbacks=[Kill()], **backend, **changes)
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = dropout
    trainer.train(resume_from_checkpoint=resume)
    run, wrapped = trainer.run, type(trainer.model_wrapped).__name__
    return test_transformers.losses(trainer), numbers(run.weights()), numbers(run.ema), wrapped


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", SPLIT])
def test_two_processes_of_trainer_learn_as_one(policy, tmp_path):
    """Rows have different numbers of tokens: the mean is over those of both processes."""
    train = partial(trained, str(tmp_path), policy, dropout=0.0, optim="sgd")
    learn_as_one(policy, train, ("per_device_train_batch_size", 1))


def test_two_processes_of_trainer_are_killed_and_resumed_bit_for_bit(tmp_path):
    train = partial(
        trained, policy="fp16-mixed", per_device_train_batch_size=1, save_strategy="steps", save_steps=2
    )
    whole = run_ranks(partial(train, str(tmp_path / "whole")))
    with pytest.raises(BrokenProcessPool):
        run_ranks(partial(train, str(tmp_path / "killed"), killed=True))
    again = run_ranks(partial(train, str(tmp_path / "killed"), resume=True))
    for before, after in zip(whole, again, strict=True):
        assert before[0][-2:] == after[0][-2:]
        assert same(before[1], after[1])
        assert same(before[2], after[2])
