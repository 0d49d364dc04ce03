"""The Lightning examples: ported by the guide's diff, as good as plain Lightning, resumed to the same bits."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"\[examples/(lightning_\w+)\.py\].*?```diff\n(.*?)```", GUIDE, flags=re.S))
# The policy rounds activations to 8 and 11 bits, the losses of training differ by about as much.
BOUNDS = {"32-true": 2**-16, "bf16-mixed": 2**-8, "16-mixed": 2**-11}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def script(name, *, plain=False, dropout="0.1"):
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert "dropout=0.1" in text
    text = text.replace("dropout=0.1", f"dropout={dropout}")
    if plain:
        removed = ""
        for line in DIFFS[name].splitlines():
            kind, rest = line[0], line[1:] + "\n"
            if kind == "-":
                removed += rest
            elif kind == "+":
                assert text.count(rest) == 1, rest
                text, removed = text.replace(rest, removed), ""
        assert "halfstep" not in text.partition('"""\n\n')[2]
    names = {"__name__": name}
    exec(compile(text, name, "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("name", ["lightning_trainer", "lightning_fabric"])
def test_the_guide_counts_the_lines_that_change(name):
    lines = [line for line in DIFFS[name].splitlines() if line.startswith("+")]
    said = re.search(rf"\[examples/{name}\.py\].*?\*\*(\d+) lines\*\*", GUIDE, flags=re.S)
    assert len(lines) == int(said[1]) == 2


def train(name, precision, folder, *, plain=False, dropout="0.1", **given):
    main = script(name, plain=plain, dropout=dropout).main
    if name == "lightning_fabric":
        return main(precision, folder / "saved.ckpt", **given)
    return main(precision, folder, **given)


def loss_of(result):
    return result if isinstance(result, float) else float(result.callback_metrics["validation_loss"])


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("lightning_trainer", "32-true"),
        ("lightning_fabric", "bf16-mixed"),
        ("lightning_trainer", "16-mixed"),
        ("lightning_fabric", "16-mixed"),
    ],
)
def test_the_port_learns_as_plain_fp32_does(name, precision, tmp_path):
    # torch's fused attention draws other masks of dropout than the attention of a policy.
    plain = loss_of(train(name, "32-true", tmp_path / "plain", plain=True, dropout="0.0"))
    ported = loss_of(train(name, precision, tmp_path / "ported", dropout="0.0"))
    assert ported == pytest.approx(plain, rel=BOUNDS[precision])


@pytest.mark.prove
@pytest.mark.parametrize("precision", BOUNDS)
def test_the_trainer_example_resumes_to_the_same_bits(precision, tmp_path):
    whole = train("lightning_trainer", precision, tmp_path / "whole", epochs=2)
    first = train("lightning_trainer", precision, tmp_path, epochs=1)
    saved = first.checkpoint_callback.best_model_path
    resumed = train("lightning_trainer", precision, tmp_path, epochs=2, resume=saved)
    states = [each.lightning_module.state_dict() for each in (whole, resumed)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert resumed.callback_metrics["validation_loss"] == whole.callback_metrics["validation_loss"]


@pytest.mark.prove
@pytest.mark.parametrize("precision", BOUNDS)
def test_the_fabric_example_resumes_to_the_same_bits(precision, tmp_path):
    for folder, steps, resume in (("whole", 8, False), ("parts", 4, False), ("parts", 8, True)):
        (tmp_path / folder).mkdir(exist_ok=True)
        train("lightning_fabric", precision, tmp_path / folder, steps=steps, resume=resume)
    whole, parts = (torch.load(tmp_path / name / "saved.ckpt", weights_only=True) for name in ("whole", "parts"))
    tensors = [each["halfstep"]["optimizer"]["tensors"] for each in (whole, parts)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    assert all(torch.equal(value, parts["model"][name]) for name, value in whole["model"].items())
