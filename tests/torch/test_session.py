"""The session on torch. What every backend's session does is in tests/conformance."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from halfstep.config.load import load
from halfstep.core.errors import ConfigError
from halfstep.core.formats import E4M3
from halfstep.core.policy import Policy
from halfstep.torch import model
from halfstep.torch.numerics.dtypes import supported
from halfstep.torch.session import Session
from halfstep.torch.state import restored, stored
from tests.token_batches import batch
from tests.torch.nets import same

SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "optimizer.name=adamw"]
SMALL += ["training.batch=2", "training.micro_batches=2", "training.compile=false"]


def session(policy="fp32", *extra):
    config = load("tiny", [*SMALL, *extra])
    return Session(config, Policy.parse(policy), "cpu", lambda applied, xp: 1.0 / (1.0 + applied))


def test_compile_compiles_the_loss(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    session()
    assert compiled == []
    s = session("fp32", "training.compile=true")
    assert compiled == [s.model.loss]


def test_one_compilation_serves_every_block(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    losses = {}
    for value in ("false", "block"):
        torch.compiler.reset()
        counters.clear()
        s = session("fp32", f"training.compile={value}", "model.layers=3")
        losses[value] = [s.read(s.step(batch(step, s)))["loss"] for step in range(2)]
    assert counters["stats"]["unique_graphs"] == 2  # that of a block, and that of what follows the last
    assert losses["block"] == losses["false"]


@pytest.mark.parametrize(
    ("policy", "settings", "how", "why"),
    [
        ("fp32", [], "block", "its 12 blocks are alike"),
        ("bf16-mixed; blocks.11: compute=fp32", [], "block", "its 12 blocks are of 2 kinds"),
        ("fp32", ["model.value_residual=true"], "block", "its 12 blocks are of 2 kinds"),
        ("fp32", ["model.layers=3", "model.value_residual=true"], "whole", "would serve too few others"),
        ("fp32", ["model.layers=1"], "whole", "would serve too few others"),
        ("fp32", ["model.unet_skips=true"], "whole", "U-net skips"),
        ("fp32", ["training.recompute_blocks=true"], "whole", "runs again by itself"),
        ("fp32", ["training.compile=whole"], "whole", "training.compile says so"),
        ("fp32", ["model.unet_skips=true", "training.compile=block"], "block", "training.compile says so"),
        ("fp32", ["training.compile=false"], "no", "training.compile is false"),
    ],
)
def test_blocks_that_are_alike_are_compiled_one_by_one(policy, settings, how, why, monkeypatch):
    monkeypatch.setattr(model, "LEAST_WORK", 0)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    s = session(policy, "model.layers=12", "training.compile=true", *settings)
    assert (s.compilation.how, why in s.compilation.why) == (how, True)
    expected = {"no": [], "whole": ["loss"], "block": ["_call_impl"] * 12 + ["after_blocks"]}
    assert [function.__name__ for function in compiled] == expected[how]


@pytest.mark.parametrize(("compiles", "devices", "started"), [
    ("true", ("cpu",), 1), ("block", ("cpu",), 1), ("false", ("cpu",), 0), ("true", ("cuda",), 0),
])  # fmt: skip
def test_the_compiler_starts_while_weights_are_drawn(compiles, devices, started, monkeypatch):
    drawn, pools, loaded, set_weights = threading.Event(), [], [], model.Decoder.set_weights

    def start_pool():
        assert drawn.wait(60)
        pools.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    def set_and_say(*given):
        set_weights(*given)
        drawn.set()

    monkeypatch.setattr("halfstep.torch.session.COMPILED_BESIDE", devices)
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", start_pool)
    monkeypatch.setattr("halfstep.torch.session.import_module", loaded.append)
    monkeypatch.setattr(model.Decoder, "set_weights", set_and_say)
    session("bf16-mixed", f"training.compile={compiles}")
    assert (loaded, len(pools)) == (["torch._inductor.compile_fx"] * started, started)
    assert all(blocked >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} for blocked in pools)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_small_blocks_are_compiled_in_one_graph():
    assert session("fp32", "model.layers=12", "training.compile=true").compilation.how == "whole"


def test_other_backends_do_not_compile_by_block():
    with pytest.raises(ConfigError, match="backend jax compiles a step as a whole"):
        load("tiny", ["backend=jax", "training.compile=block"])


FIRST_STEP = """
import sys
import numpy as np
from torch._dynamo.utils import counters
from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.training.session import open_session

sizes = "width=32 heads=2 context=16 vocabulary=64 layers=2".split()
given = [*(f"model.{size}" for size in sizes), "training.compile=block", "training.batch=2", "monitor.on=false"]
session = open_session(load("gpt2", given), Policy.parse(sys.argv[1]), "cpu")
numbers = session.read(session.step(np.zeros((1, 2, 17), np.int32)))
print({name: value for name, value in numbers.items() if name in ("loss", "grad_norm")})
print(*(counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in ("miss", "hit", "bypass")))
print(*(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("miss", "hit", "bypass")))
"""


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed,param=fp32:split", "bf16-mixed,compute=e4m3,grad=e5m2"])
def test_a_second_process_finds_what_the_first_compiled(policy, tmp_path):
    """Nothing of ours keeps code out of torch's caches or changes its key, and what is found computes the same."""
    if "e4m3" in policy and not supported(E4M3, "cpu"):
        pytest.skip(supported(E4M3, "cpu").reason)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    (cold, *first), (warm, *second) = [
        subprocess.run(
            [sys.executable, "-c", FIRST_STEP, policy], env=environment, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for _ in range(2)
    ]
    # Of a block, and of what follows the last: its passes, and of each the forward and the backward one.
    assert (first, second) == (["2 0 0", "4 0 0"], ["0 2 0", "0 4 0"])
    assert warm == cold


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_stored_tensors_come_back_with_their_bits(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = restored(stored(tensor))
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_the_schedule_sees_skipped_steps():
    s = session()
    rates = []
    for step in range(4):
        tokens = batch(step, s)
        if step == 1:
            s.model.embed.weight.data[0, 0] = float("nan")
            tokens[...] = 0
        s.read(s.step(tokens))
        rates.append(float(s.run.optimizers[0].rate_of(s.run.optimizers[0].param_groups[0])) / 3e-3)
        if step == 1:
            s.model.embed.weight.data[0, 0] = 0.0
    assert rates == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3])


def test_emulated_bf16_true_rounds_the_gradients_that_native_bf16_true_has():
    found = {}
    for policy in ("bf16-true", "bf16-true,emulate=true"):
        # The two gradients of a tied weight are summed, in fp32 if emulated.
        s = session(policy, "model.tied=false")
        tokens = torch.from_numpy(batch(0, s)[0]).long()
        s.model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        found[policy] = [p.grad.float() for p in s.model.parameters()]
    for native, emulated in zip(*found.values(), strict=True):
        assert same((native, emulated), (native.bfloat16().float(), emulated.bfloat16().float()))
