"""The Python of pages that show parts of a loop runs, on small models of its own names."""

import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import optax
import pytest
import torch
from flax.training.train_state import TrainState
from mlx import nn
from mlx import optimizers as mlx_optimizers
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep import jax as halfstep_jax
from halfstep import mlx as halfstep_mlx
from halfstep.torch import AdamW, prepare

DOCS = Path(__file__).parents[2] / "docs"
NUMBERS = {"backends.md": 15, "checkpoints.md": 4, "models.md": 1, "monitor.md": 3, "recipes.md": 1, "tune.md": 2}
# Pages that another test runs, or whose Python is from files that others run.
OTHERS = {"examples.md", "export.md", "fp8.md", "index.md", "integrations.md", "many_gpus.md", "migration.md"}
OTHERS |= {"solve.md"}
BLOCKS = [
    (page, place, block)
    for page in NUMBERS
    for place, block in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), flags=re.S))
]


def run_block(page, place, **names):
    (block,) = [text for name, number, text in BLOCKS if (name, number) == (page, place)]
    exec(compile(block, f"docs/{page}", "exec"), names)
    return names


def test_every_block_has_a_test():
    with_python = {page.name for page in DOCS.glob("*.md") if "```python" in page.read_text("utf-8")}
    assert with_python - OTHERS == set(NUMBERS)
    assert [(page, place) for page, place, _ in BLOCKS] == [(p, n) for p in NUMBERS for n in range(NUMBERS[p])]


@pytest.mark.prove
def test_jax(capsys):
    params, batch = {"w": jnp.full((4, 4), 0.01)}, jnp.ones((2, 4))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]).astype(jnp.float32) ** 2)

    ran = run_block("backends.md", 0, params=params, batch=batch, loss_fn=loss_fn)
    assert np.isfinite(ran["result"].loss)
    assert not ran["result"].skipped
    names = {name: ran[name] for name in ("init", "make_step", "optimizer")}
    given = {"state": ran["state"], "batch": batch, "loss_fn": loss_fn, **names}
    ran = run_block("backends.md", 1, params=params, batch=jnp.ones((4, 2, 4)), loss_fn=loss_fn, **names)
    assert np.isfinite(ran["result"].loss)
    train = TrainState.create(apply_fn=loss_fn, params=params, tx=names["optimizer"])
    ran = run_block("backends.md", 2, train_state=train, batch=batch, loss_fn=loss_fn, **names)
    assert int(ran["train_state"].step) == 1
    ran |= {"jax": jax, "jnp": jnp, "make_params": lambda seed: {"w": jnp.full((4, 4), 0.01) * seed}}
    seeds = run_block("backends.md", 3, **{**ran, "batches": jnp.ones((3, 2, 4)), **names})
    assert seeds["results"].loss.shape == (4, 3)
    watched = run_block("backends.md", 4, **given)
    assert (watched["numbers"][..., 1] > 0).all()
    assert watched["lost"].tolist() == [0.0]
    narrow = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    run_block("backends.md", 5, params=narrow, batch=batch, loss_fn=loss_fn, optimizer=ran["optimizer"])
    assert "HS101 None `w` is stepped in bf16" in capsys.readouterr().out
    given = {"jax": jax, "optax": optax, **names}
    ran = run_block("backends.md", 6, params=params, batch=batch, loss_fn=loss_fn, **given)
    assert ran["state"].ema["w"].dtype == jnp.float32
    assert "1 dot_general (w): covered, multiplies in bf16, weight gradients in fp32" in capsys.readouterr().out


def test_mlx(capsys):
    model, batch = nn.Linear(4, 4), mx.ones((2, 4))
    names = {"loss_fn": lambda model, x: (model(x) ** 2).mean(), "micro_batches": [batch, batch]}
    ran = run_block("backends.md", 7, model=model, batch=batch, **names)
    assert np.isfinite(ran["result"].loss.item())
    assert ran["run"].num_applied == 2
    assert "multiplies in bf16" in capsys.readouterr().out
    watched = run_block("backends.md", 8, run=ran["run"], batch=batch, **names)
    assert (watched["numbers"][..., 1] > 0).all()
    assert watched["lost"].tolist() == [0.0]
    narrow = nn.Linear(4, 4)
    narrow.set_dtype(mx.bfloat16)
    run_block("backends.md", 9, model=narrow, optimizer=ran["optimizers"].AdamW(1e-5), batch=batch, **names)
    found = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("HS101"))
    assert "in bf16 by AdamW" in found
    assert {"weight", "bias"} <= set(re.findall(r"`(\w+)`", found))
    names |= {"optimizers": ran["optimizers"], "prepare": ran["prepare"], "mx": mx}
    ran = run_block("backends.md", 10, model=nn.Linear(4, 4), **names)
    assert ran["run"].num_applied == 1


def test_weights_that_others_trained(monkeypatch):
    from halfstep.config.model import ModelConfig
    from halfstep.config.weights import initial_weights
    from halfstep.torch.model import Decoder

    small = Decoder(ModelConfig(context=8, layers=1, width=16, heads=2))
    small.set_weights(initial_weights(small.config, seed=0))
    monkeypatch.setattr(halfstep, "load_model", lambda recipe, folder: small)
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    ran = run_block("backends.md", 11, tokens=tokens)
    assert torch.isfinite(ran["result"].loss)
    held = torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16()
    auto = SimpleNamespace(from_pretrained=lambda name, dtype: held)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=auto))
    ran = run_block("backends.md", 12, prepare=ran["prepare"], AdamW=ran["AdamW"])
    assert held[0].weight.dtype == torch.float32
    assert "fp32" in str(ran["run"].summary())


def test_saving(tmp_path, monkeypatch):
    """The blocks save and load; `tests/conformance` compares the bits."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed,emulate=true")
    run.step(lambda x: model(x).float().square().mean(), [torch.ones(2, 4)])
    run_block("checkpoints.md", 1, run=run, torch=torch)
    assert run.num_applied == 1
    state = halfstep_jax.init({"w": jnp.full((4, 4), 0.01)}, optax.adam(0.1), "bf16-mixed,moments=bf16")
    ran = run_block("checkpoints.md", 2, state=state, np=np)
    assert ran["state"] is not state
    run = halfstep_mlx.prepare(nn.Linear(4, 4), mlx_optimizers.Adam(0.1), "bf16-mixed,param=fp32:split")
    run.step(lambda model, x: (model(x) ** 2).mean(), [mx.ones((2, 4))])
    run_block("checkpoints.md", 3, run=run, mx=mx)
    assert run.num_applied == 1


def small_torch():
    torch.manual_seed(0)
    block = torch.nn.Sequential(OrderedDict(up=torch.nn.Linear(4, 8), down=torch.nn.Linear(8, 4)))
    model, batch = torch.nn.Sequential(OrderedDict(blocks=torch.nn.Sequential(block))), torch.randn(8, 4)
    return model, batch, lambda x: model(x).square().mean()


def test_instruments_of_torch(capsys):
    model, batch, loss_fn = small_torch()
    names = {"model": model, "loss_fn": loss_fn, "batch": batch, "optimizer": AdamW(model.parameters(), lr=1e-3)}
    ran = run_block("monitor.md", 0, batches=[batch] * 100, **names)
    assert "blocks.0.up" in capsys.readouterr().out
    run_block("monitor.md", 1, monitor=ran["monitor"], loss_fn=loss_fn, batch=batch)
    assert "sqnr" in capsys.readouterr().out
    model, batch, loss_fn = small_torch()
    names |= {"model": model, "loss_fn": loss_fn, "optimizer": AdamW(model.parameters(), lr=1e-3)}
    ran = run_block("monitor.md", 2, **names)
    assert list(ran["result"].outside) == []
    late = {"enumerate": lambda batches: enumerate(batches, 849)}
    run_block("recipes.md", 0, run=ran["run"], loss_fn=loss_fn, batches=[batch] * 2, **late)
    assert ran["run"].num_applied == 2


def test_the_kinds_of_operation():
    model, batch, loss_fn = small_torch()
    names = {"model": model, "loss_fn": loss_fn, "batch": batch, "optimizer": AdamW(model.parameters(), lr=1e-3)}
    assert 0 < run_block("tune.md", 0, prepare=prepare, **names)["lost"]["matmul"] < 1e-3


def test_a_factory_for_the_tuner():
    import torch.nn.functional as F

    batch = {"x": torch.randn(4, 4), "y": torch.arange(4)}
    given = {"Net": lambda: torch.nn.Linear(4, 4), "load_batches": lambda: ([batch], [batch])}
    model, _, loss_fn, batches, _ = run_block("tune.md", 1, torch=torch, F=F, **given)["factory"]()
    loss_fn(batches[0]).backward()
    assert model.weight.grad is not None


def test_shards_and_their_checkpoint(tmp_path):
    model, batch, loss_fn = small_torch()
    from functools import partial

    from halfstep.torch.state import Copies, load_state, restored, rows_here, written
    from halfstep.training.checkpoints.checkpoint import load
    from halfstep.training.checkpoints.parts import save_part

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        run = prepare(model, "bf16-mixed", clip_norm=1.0)
        fully_shard(model)
        run.attach(AdamW(model.parameters(), lr=3e-4))
        run.step(loss_fn, [batch])
        before = {name: weight.clone() for name, weight in run.weights().items()}
        rank = {"rank": 0, "ranks": 1, "token": "token"}
        state = {"load": load, "load_state": load_state, "restored": restored, "rows_here": rows_here}
        state |= {"written": written, "Copies": Copies, "save_part": save_part, "partial": partial}
        run_block("checkpoints.md", 0, run=run, folder=tmp_path, step=500, **rank, **state)
        assert all(torch.equal(weight, before[name]) for name, weight in run.weights().items())
    finally:
        torch.distributed.destroy_process_group()


def test_the_loss_of_a_layer():
    loss = run_block("models.md", 0)["loss"]
    assert loss.item() == pytest.approx(np.log(50257), rel=0.05)


def test_optimizers_and_averages_of_mlx():
    batch = mx.ones((2, 4))
    ran = run_block("backends.md", 13, model=nn.Linear(4, 4))
    names = {"loss_fn": lambda model, x: (model(x) ** 2).mean(), "micro_batches": [batch]}
    ran = run_block("backends.md", 14, run=ran["run"], prepare=ran["prepare"], AdamW=ran["AdamW"], **names)
    assert set(ran["average"]) == {"weight", "bias"}
    assert np.isfinite(ran["loss"].item())
