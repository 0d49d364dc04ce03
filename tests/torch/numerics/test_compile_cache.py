"""What torch keeps of compiled code: every graph of ours has a key, and whatever changes the code changes the key.

The key is taken where torch makes it, and nothing is compiled after that. tests/torch/test_session.py compiles.
"""

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd import autograd_cache

from halfstep.core.formats import E4M3
from halfstep.torch.convert import apply
from halfstep.torch.fusion import loss as fusion
from halfstep.torch.numerics import compile_cache
from halfstep.torch.numerics.dtypes import supported
from halfstep.torch.run import prepare

FP8 = "bf16-mixed,compute=e4m3,grad=e5m2"


class Net(nn.Module):
    """Whatever modules and functions have forms of ours: `split` is a method that torch wrote in Python."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).split(16, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        logits = self.head(nn.functional.gelu(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Stop(BaseException):
    """Ends a compilation."""


@pytest.fixture
def key_of(monkeypatch):
    """Returns the key that torch gives to what it compiles of a network; why it has none is an error."""
    made, real = [], autograd_cache.autograd_cache_key

    def take(*given, **options):
        made.append(real(*given, **options)[0])
        raise Stop

    def key_of(policy, memory="fast"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, tokens=16, memory=memory)
        with pytest.raises(Stop):
            torch.compile(model)(torch.zeros(2, 8, dtype=torch.int64))
        return made.pop()

    # Autograd asks for the key, and takes an error of it as the answer that the graph is not kept.
    monkeypatch.setattr(autograd_cache, "autograd_cache_key", take)
    yield key_of
    torch._dynamo.reset()


@pytest.mark.prove
def test_every_prepared_model_has_a_key_of_its_own(key_of):
    """Of narrow layers, dynamo's graph has no more than a name and the precision in words."""
    narrow = (FP8, "bf16-mixed,compute=e4m3,grad=bf16", "bf16-mixed,compute=e4m3:delayed,grad=e5m2")
    policies = ("bf16-mixed", "bf16-mixed,param=fp32:split", *(narrow if supported(E4M3, "cpu") else ()))
    keys = [*map(key_of, policies), key_of(policies[1], "lean")]
    assert len(set(keys)) == len(keys)
    assert key_of(policies[-1]) == keys[-2]


@pytest.mark.prove
def test_the_kernel_of_the_loss_does_not_prevent_it(key_of, monkeypatch):
    without = key_of("bf16-mixed")
    monkeypatch.setattr(fusion, "why_no_kernel", lambda *given: "")
    assert key_of("bf16-mixed") != without


@pytest.mark.prove
def test_other_code_of_ours_has_another_key(key_of, monkeypatch):
    before = key_of("bf16-mixed")
    monkeypatch.setattr(compile_cache, "code_digest", lambda backend: "other")
    with torch.compiler.config.patch(cache_key_tag="theirs"):
        theirs = key_of("bf16-mixed")
        compile_cache.keep_compiled()  # adds nothing the second time
        assert torch.compiler.config.cache_key_tag == "theirs halfstep-other"
    with torch.compiler.config.patch(cache_key_tag=""):
        assert len({before, theirs, key_of("bf16-mixed")}) == 3


def test_a_model_that_gets_its_optimizers_later_is_traced_as_any_other(monkeypatch):
    put: list[str] = []
    monkeypatch.setattr(apply, "allow_in_graph", lambda *functions: put.extend(f.__name__ for f in functions))
    run = prepare(net := Net(), None, "bf16-mixed")
    put.clear()
    run.attach(torch.optim.AdamW(net.parameters()))
    assert put == ["linear_in_graph"]
