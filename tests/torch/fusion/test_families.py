"""What is fused in models that people use: a version of torch, or of theirs, that loses a fusion is found here."""

from importlib.metadata import version

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks import ways, zoo
from halfstep.torch import prepare
from halfstep.torch.fusion import APART, FUSED, mlp
from halfstep.torch.fusion import loss as loss_pass
from halfstep.torch.fusion.loss import OF_LAYER, OF_ROWS
from halfstep.torch.fusion.mlp import BETWEEN
from halfstep.torch.fusion.pointwise import EXACT, GELU, SQUARE
from halfstep.torch.kernels import epilogue
from halfstep.torch.loss import plain
from tests.torch.graphs import fused

# T5's forward copied its configuration, where dynamo breaks the graph.
COPIES_NOTHING = version("transformers") >= "5.22"
FAMILIES = {
    "gpt2": {BETWEEN: 2, OF_LAYER: 1},
    "llama": {OF_LAYER: 1},
    "qwen3": {OF_LAYER: 1},
    "t5": {GELU: 4, OF_LAYER if COPIES_NOTHING else OF_ROWS: 1},  # gated
    "bert": {EXACT: 3, OF_LAYER: 1},
    "vit": {EXACT: 2, OF_LAYER: 1},
    "mixtral": {OF_ROWS: 1},  # the first call installs hooks, a graph break
    "whisper": {EXACT: 3, OF_ROWS: 1},  # graph breaks, which depend on data: two layers are compiled as one
}
WAYS = {
    "plain": {BETWEEN: 2, OF_LAYER: 1},
    "custom norm": {BETWEEN: 2, OF_LAYER: 1},
    "written out": {BETWEEN: 2, OF_LAYER: 1},
    "outside": {BETWEEN: 2, OF_LAYER: 1},
    "shifted": {BETWEEN: 2, OF_LAYER: 1},
    "exact": {EXACT: 2, OF_LAYER: 1},
    "nanogpt": {EXACT: 2, OF_LAYER: 1},
    "nanochat": {SQUARE: 2, OF_LAYER: 1},
    "speedrun": {SQUARE: 2, OF_LAYER: 1},
}
SIZES = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 64, "context": 16}


def found(model, loss, monkeypatch):
    """Returns what is fused where the kernels are there, as on a GPU from Hopper on."""
    monkeypatch.setattr(loss_pass, "why_no_kernel", lambda x, dtype: "" if dtype in plain.NARROW else "wide")
    monkeypatch.setattr(epilogue, "device_lacks", lambda device: "")
    monkeypatch.setattr(mlp, "_has_form", lambda name, x, function: x.dtype is torch.bfloat16)
    torch.compiler.reset()
    FUSED.clear()
    APART.clear()
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed,param=fp32:split")
    run.backward(torch.compile(loss, backend=fused("eager"))(model))
    torch.compiler.reset()
    return dict(FUSED)


def test_every_way_of_writing_and_every_family_has_a_row():
    assert WAYS.keys() == ways.WAYS.keys()
    assert FAMILIES.keys() == {name for name, family in zoo.FAMILIES.items() if family.package == "transformers"}


@pytest.mark.prove
@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_transformers(name, monkeypatch):
    assert found(*zoo.FAMILIES[name].make(), monkeypatch) == FAMILIES[name]


@pytest.mark.parametrize(
    "name", ["nanogpt", *(pytest.param(n, marks=pytest.mark.prove) for n in WAYS if n != "nanogpt")]
)
def test_a_gpt2_in_several_ways_of_writing(name, monkeypatch):
    model, loss = ways.make(name, **SIZES)
    tokens = torch.randint(0, 64, (2, 16))
    assert found(model, lambda model: loss(model, tokens, tokens), monkeypatch) == WAYS[name]


@pytest.mark.prove
@pytest.mark.parametrize("name", sorted(zoo.FAMILIES.keys() - {"mixtral", "whisper"}))
def test_a_prepared_model_breaks_its_graph_no_more_often_than_under_autocast(name):
    """Those two break it by what they do; there the frames that we put around a forward break once more each."""

    def breaks(loss, model, backward):
        torch.compiler.reset()
        counters.clear()
        backward(torch.compile(loss, backend="eager")(model))
        return sum(counters["graph_break"].values())

    with torch.autocast("cpu", torch.bfloat16):
        model, loss = zoo.FAMILIES[name].make()
        theirs = breaks(loss, model, torch.Tensor.backward)
    for policy in ("bf16-mixed", "bf16-mixed,param=fp32:split"):
        model, loss = zoo.FAMILIES[name].make()
        run = prepare(model, torch.optim.AdamW(model.parameters()), policy)
        assert breaks(loss, model, run.backward) <= theirs
