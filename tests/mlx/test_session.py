"""What only MLX's session does. tests/conformance/session holds the rest."""

import mlx.core as mx
import pytest

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.mlx import session as module
from halfstep.mlx.session import Session
from tests.token_batches import batch

SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "optimizer.name=adamw"]
SMALL += ["training.batch=2", "training.micro_batches=2", "training.compile=false"]


def session(policy="fp32", *extra):
    config = load("tiny", [*SMALL, *extra])
    return Session(config, Policy.parse(policy), "cpu", lambda applied, xp: 1.0 / (1.0 + applied))


def weights(session):
    return {name: place.array for name, place in session.run.masters.places.items()}


def test_evaluation_may_be_wider_than_training_and_sees_the_whole_of_split_masters():
    wide, split = session("fp32"), session("bf16-mixed,param=fp32:split,eval=fp32")
    batches = [batch(1, wide)[0]]
    assert wide.evaluate(batches) == split.evaluate(batches)  # of the same first weights
    assert weights(split)["blocks.0.mlp.up.weight"].dtype == mx.bfloat16
    split.read(split.step(batch(0, split)))  # and training continues in bf16
    assert split.evaluate([]) == (0, 0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_matrices_decay_and_the_rest_does_not(optimizer):
    extra = ["model.layers=2", "model.unet_skips=true", "model.embedding_shortcut=channel", "model.bias=true"]
    s = session("fp32", f"optimizer.name={optimizer}", *extra)
    names = {f"optimizer.{i}": o for i, o in enumerate(s.run.optimizers)}
    seen = set()
    for name, array in weights(s).items():
        owners = [
            o for prefix, o in names.items() if any(k.startswith(f"{prefix}.{name}.") for k in s.run.state_dict())
        ]
        assert len(owners) == 1
        matrix = array.ndim == 2 and name.endswith(".weight")
        in_blocks = optimizer == "muon" and matrix and name.startswith("blocks.")
        assert type(owners[0]).__name__ == ("Muon" if in_blocks else "AdamW"), name
        assert (owners[0].weight_decay > 0) == (matrix and not in_blocks), name
        seen.add(id(owners[0]))
    assert len(seen) == len(names)


def test_emulated_bf16_true_rounds_the_gradients_that_native_bf16_true_has():
    for policy in ("bf16-true", "bf16-true,emulate=true"):
        # untied: the two gradients of a tied weight are summed, in fp32 if emulated
        s = session(policy, "model.tied=false")
        grads = s.run.value_and_grad(module._sum_and_count)(mx.array(batch(0, s)[0]))[1].arrays
        for name, g in grads.items():
            # of the sum of losses: 32 is a power of two, so that the mean has the same digits
            assert mx.array_equal(g, g.astype(mx.bfloat16).astype(mx.float32)), (policy, name)
