"""Real runs of `tiny`, cut to what takes seconds: what makes no difference to a training, and what does."""

import json

import pytest

from halfstep.cli.main import run
from halfstep.config.load import load
from halfstep.tools.compare.judge import judge
from halfstep.tools.compare.runs import train_policies
from tests.tools.compare.made_up import CUT


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One folder for all: the reference is trained once."""
    folder = tmp_path_factory.mktemp("ways")
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(400)))
    return folder


@pytest.mark.prove
@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--set-a", "training.compile=true"], {"training.compile": [True, False]}),
        (["--set-a", "backend=jax"], {"backend": ["jax", "torch"]}),
        (["--ranks-a", "2"], {"ranks": [2, 1]}),
    ],
    ids=["compiled against eager", "jax against torch", "two ranks against one"],
)
def test_it_is_the_same(words, setting, shared, capsys):
    cut = (*CUT, "monitor.on=false", f"data.source={shared / 'text.txt'}")
    settings = [word for each in cut for word in ("--set", each)]
    short = ["--steps", "4", "--seeds", "2", "--device", "cpu", "--out", str(shared / "out"), "--json"]
    assert run(["compare", "fp32", "fp32", *words, *settings, *short]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"]["kind"] == "same"
    assert data["settings"] == setting


@pytest.mark.prove
def test_bf16_mixed_is_the_same_and_bf16_true_is_different_at_a_low_rate(tmp_path):
    policies = ["bf16-mixed", "bf16-true", "fp32"]
    low = ("training.validation_tokens=1024", "monitor.on=false", "optimizer.rate=1e-4")
    curves = train_policies(load("tiny", [*CUT, *low]), policies, range(4), 60, out=tmp_path)
    runs = {policy: list(by_seed.values()) for policy, by_seed in curves.items()}
    mixed, true = (judge((name, "fp32"), runs[name], runs["fp32"]) for name in policies[:2])
    assert mixed.verdict.kind == "same"
    assert (mixed.parting, mixed.seeds) == (None, (0, 1, 2, 3))
    assert true.verdict.kind == "different"
    assert true.verdict.mean > 0  # it lost updates, and so learned less
