"""Which layer made a step on MLX not finite."""

import math

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.mlx.run import prepare
from halfstep.mlx.session import Session

SMALL = ["model.context=8", "model.layers=2", "model.width=16", "model.heads=2", "training.batch=2"]
TOKENS = np.arange(2 * 2 * 9, dtype=np.int32).reshape(2, 2, 9)


def test_a_layer_is_named_forward_and_backward_and_nothing_is_left_behind():
    made = Session(load("tiny", SMALL), Policy.parse("fp32"), "cpu")
    made.watch(16)
    before = {name: bytes(array.data) for name, array in made.state().items()}
    fine = made.blame(TOKENS)
    assert str(fine) == "backward: the loss is finite, a gradient is not"
    up = made.model.blocks[1].mlp.up
    own, up.weight = up.weight, mx.full(up.weight.shape, 1e38)
    cause = made.blame(TOKENS)
    assert (cause.where, cause.module, cause.micro_batch) == ("forward", "blocks.1.mlp.up", 0)
    assert str(cause) == "forward: blocks.1.mlp.up before `blocks.1.mlp.down`, which is given it"
    up.weight = mx.full(up.weight.shape, math.nan)
    assert str(made.blame(TOKENS)) == "forward: the weight `blocks.1.mlp.up.weight` itself"
    up.weight = own
    assert {name: bytes(array.data) for name, array in made.state().items()} == before
    assert made.blame(TOKENS, scale=3e38).where == "backward"


def test_a_loss_that_alone_is_not_finite_is_named_as_such():
    model = nn.Linear(2, 1)
    run = prepare(model, optimizers.SGD(0.1), "fp32")
    alone = "; the loss was not finite, its gradients were"
    cause = run.blame(lambda model, x: model(x).mean() - math.inf, [mx.ones((1, 2))])
    assert str(cause) == "forward: the loss" + alone
    assert str(run.blame(lambda model, x: model(x).mean() * math.inf, [mx.ones((1, 2))])) == "forward: the loss"
