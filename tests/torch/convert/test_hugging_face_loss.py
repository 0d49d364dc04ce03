"""Losses that models of transformers build inside their forward, in compiled code too."""

import pytest
import torch
from torch import nn

from benchmarks import zoo
from halfstep.torch import prepare
from halfstep.torch.convert import hugging_face

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def test_a_subclass_of_torchs_cross_entropy_stands_in_their_modules_and_computes_the_same():
    model, _ = zoo.FAMILIES["bert"].make()
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    from transformers.models.bert import modeling_bert

    kind = modeling_bert.CrossEntropyLoss
    assert kind is hugging_face.CrossEntropyLoss
    assert issubclass(kind, nn.CrossEntropyLoss)
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    assert torch.equal(kind()(x, y), nn.CrossEntropyLoss()(x, y))
    assert nn.CrossEntropyLoss is torch.nn.modules.loss.CrossEntropyLoss


class Head(nn.Module):
    """As a model of transformers does it."""

    kind = hugging_face.CrossEntropyLoss

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x, y):
        return self.kind(ignore_index=-1)(self.layer(x), y)


@pytest.mark.prove
def test_it_is_fp32_in_compiled_code():
    torch.manual_seed(0)
    model = Head()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    x, y = torch.randn(3, 4), torch.tensor([0, -1, 2])
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(x, y)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, model(x, y))
    run.backward(loss)


def test_a_model_whose_loss_is_not_known_by_its_name_has_the_one_they_would_take_until_it_is_given_back():
    config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    assert model.loss_function is transformers.loss.loss_utils.ForCausalLMLoss
    run.unprepare()
    assert not hasattr(model, "_loss_function")
    model.loss_function = mine = lambda *_, **__: None
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    assert model.loss_function is mine
    run.unprepare()
    assert model.loss_function is mine
    bert, _ = zoo.FAMILIES["bert"].make()
    assert hugging_face.default_loss(bert) is None
