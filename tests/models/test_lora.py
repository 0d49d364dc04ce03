"""Peft's adapters on a frozen bf16 base: masters for the adapters, no copy of the base, no matmul in fp32."""

from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import lora
from halfstep.torch.run import prepare

# Looked for, not imported: importing peft takes ten seconds, and every worker collects this file.
missing = [name for name in ("transformers", "peft") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")
STEPS = 10


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.prove)])
def test_adapters_train_on_a_bf16_base_as_on_an_fp32_copy_of_it(name):
    narrow, wide = (lora.train(lora.build(name, dtype), STEPS) for dtype in (torch.bfloat16, torch.float32))
    assert (narrow.frozen, wide.frozen) == ({torch.bfloat16}, {torch.float32})
    limits = lora.bound(name, wide, STEPS)
    assert all(apart <= limit for apart, limit in zip(lora.distance(narrow, wide), limits, strict=True))
    assert (limits == (0.0, 0.0)) == (name == "gpt2")  # layers of torch.nn have the same bits
    assert narrow.lost == 0
    assert narrow.narrow_lost > 0  # as they would be in bf16
    assert narrow.losses[8] < narrow.losses[0]  # of the same batch


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split"])
def test_the_base_stays_as_it_is_held_and_adapters_get_masters(policy):
    model = lora.build("llama", torch.bfloat16)
    base = {n: p.data_ptr() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    run = prepare(model, torch.optim.AdamW(trained, lr=1e-3), policy)
    held = dict(model.named_parameters())
    assert {held[n].dtype for n in base} == {torch.bfloat16}
    assert {n: held[n].data_ptr() for n in base} == base  # no copy was made
    assert all("lora_" in name for name in run.conversion.masters)
    assert len(run.conversion.masters) == len(trained)
    tokens = next(lora.batches(1, "cpu"))
    run.step(lambda t: model(input_ids=t, labels=t).loss, [tokens])
    assert {n: held[n].data_ptr() for n in base} == base
    assert {state["exp_avg"].dtype for state in run.optimizers[0].state.values()} == {torch.float32}
    assert all(held[n].grad is None for n in base)


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.seen |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_casts_of_lora_make_no_fp32_matmul(name):
    """Hazard: `x.to(lora_A.weight.dtype)` is fp32, and a layer that follows its input then runs fp32 silently."""
    model = lora.build(name, torch.bfloat16)
    prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), "bf16-mixed")
    tokens = next(lora.batches(1, "cpu"))
    with Products() as products, torch.no_grad():
        model(input_ids=tokens, labels=tokens)
    # Angles of rotary positions are a product of fp32 numbers, none of which is a parameter.
    angles = {torch.float32} if name == "llama" else set()
    assert products.seen - angles == {torch.bfloat16}


def test_an_adapted_head_and_embedding_are_reached():
    from peft import LoraConfig, get_peft_model

    model, _ = lora.zoo.FAMILIES["llama"].make()
    config = LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"])
    peft = get_peft_model(model.bfloat16(), config)
    trained = [p for p in peft.parameters() if p.requires_grad]
    run = prepare(peft, torch.optim.SGD(trained, lr=0.1), "bf16-mixed")
    tokens = torch.randint(3, 48, (2, 8))
    found = run.coverage(lambda t: peft(input_ids=t, labels=t).loss, tokens)
    products = [row for row in found.rows if row.module.endswith("embed_tokens") and row.how == "covered"]
    assert {row.function.rpartition(".")[2] for row in products} >= {"embedding"}
    run.step(lambda t: peft(input_ids=t, labels=t).loss, [tokens])
