"""`halfstep tune` on `tiny` with a layer that e4m3 breaks: it is found, stays fp32, and the rest becomes e4m3."""

import json

import pytest

from examples.fragile_layer import plant
from halfstep.cli.main import run
from halfstep.config.load import load, read_policy
from halfstep.config.model import module_names
from halfstep.core.policy import Policy

SMALL = (
    "model.layers=2",
    "model.width=32",
    "model.context=32",
    "model.heads=2",
    "training.validation_tokens=4096",
)


@pytest.mark.prove
def test_planted_layer_is_found_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fragile = plant("fragile", SMALL, "blocks.1.mlp")
    assert run(["tune", "fragile.toml", "--base", "fp32", "--steps", "20", "--grad", "e5m2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    everything, chosen = found["policies"][0], found["policies"][-1]
    assert fragile in everything["modules"]
    assert everything["verdict"]["kind"] == "different"
    assert chosen["policy"] == found["policy"]
    assert chosen["verdict"]["kind"] == "same"
    policy = Policy.parse(read_policy(found["file"]))
    assert str(policy) == found["policy"]
    names = module_names(load("tiny", SMALL).model)
    formats = {name: str(value.values["compute"].format) for name, value in policy.resolve(names).items()}
    assert formats[fragile] == "fp32"
    assert {formats[name] for name in found["modules"] if name != fragile} == {"e4m3"}
    assert run(["train", "fragile.toml", "--set", "training.steps=1", "--policy", found["file"]]) == 0
