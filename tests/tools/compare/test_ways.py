"""What must make no difference to a training makes none: compiled, another backend, two processes."""

import json

import pytest

from halfstep.cli.main import run

CUT = ("model.layers=1", "model.width=16", "model.heads=1", "model.context=16", "training.batch=4")
CUT += ("training.validation_tokens=256", "monitor.on=false", "optimizer.name=adamw")


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
    settings = [word for each in (*CUT, f"data.source={shared / 'text.txt'}") for word in ("--set", each)]
    short = ["--steps", "4", "--seeds", "2", "--device", "cpu", "--out", str(shared / "out"), "--json"]
    assert run(["compare", "fp32", "fp32", *words, *settings, *short]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"]["kind"] == "same"
    assert data["settings"] == setting
