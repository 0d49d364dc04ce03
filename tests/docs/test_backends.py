"""The Python of the pages on backends and fp8 runs, on small models of its own names."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    (page, place, block)
    for page in ("backends.md", "fp8.md")
    for place, block in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), flags=re.S))
]


def run_block(page, place, **names):
    (block,) = [text for name, number, text in BLOCKS if (name, number) == (page, place)]
    exec(compile(block, f"docs/{page}", "exec"), names)
    return names


def test_every_block_has_a_test():
    tested = [*(("backends.md", n) for n in range(10)), ("fp8.md", 0)]
    assert [(page, place) for page, place, _ in BLOCKS] == tested


def test_jax(capsys):
    jnp = pytest.importorskip("jax.numpy")
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
    watched = run_block("backends.md", 2, **given)
    assert (watched["numbers"][..., 1] > 0).all()
    assert watched["lost"].tolist() == [0.0]
    narrow = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    run_block("backends.md", 3, params=narrow, batch=batch, loss_fn=loss_fn, optimizer=ran["optimizer"])
    assert "HS101 None `w` is stepped in bf16" in capsys.readouterr().out


def test_mlx(capsys):
    nn = pytest.importorskip("mlx.nn")
    import mlx.core as mx

    model, batch = nn.Linear(4, 4), mx.ones((2, 4))
    names = {"loss_fn": lambda model, x: (model(x) ** 2).mean(), "micro_batches": [batch, batch]}
    ran = run_block("backends.md", 4, model=model, batch=batch, **names)
    assert np.isfinite(ran["result"].loss.item())
    assert ran["run"].num_applied == 2
    assert "multiplies in bf16" in capsys.readouterr().out
    watched = run_block("backends.md", 5, run=ran["run"], batch=batch, **names)
    assert (watched["numbers"][..., 1] > 0).all()
    assert watched["lost"].tolist() == [0.0]
    narrow = nn.Linear(4, 4)
    narrow.set_dtype(mx.bfloat16)
    run_block("backends.md", 6, model=narrow, optimizer=ran["optimizers"].AdamW(1e-5), batch=batch, **names)
    assert "HS101 `weight` is stepped in bf16 by AdamW" in capsys.readouterr().out
    names |= {"optimizers": ran["optimizers"], "prepare": ran["prepare"], "mx": mx}
    ran = run_block("backends.md", 7, model=nn.Linear(4, 4), **names)
    assert ran["run"].num_applied == 1


def test_weights_that_others_trained(monkeypatch):
    torch = pytest.importorskip("torch")
    import halfstep
    from halfstep.config.model import ModelConfig
    from halfstep.torch.model import Decoder

    small = Decoder(ModelConfig(context=8, layers=1, width=16, heads=2))
    monkeypatch.setattr(halfstep, "load_model", lambda recipe, folder: small)
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    ran = run_block("backends.md", 8, tokens=tokens)
    assert torch.isfinite(ran["result"].loss)
    held = torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16()
    auto = SimpleNamespace(from_pretrained=lambda name, dtype: held)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=auto))
    ran = run_block("backends.md", 9, prepare=ran["prepare"], AdamW=ran["AdamW"])
    assert held[0].weight.dtype == torch.float32
    assert "fp32" in str(ran["run"].summary())


def test_fp8(capsys):
    torch = pytest.importorskip("torch")
    ran = run_block("fp8.md", 0, torch=torch, model=torch.nn.Sequential(torch.nn.Linear(16, 16)))
    assert "bf16" in capsys.readouterr().out
    assert ran["model"] is not None
