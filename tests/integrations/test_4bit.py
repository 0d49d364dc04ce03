"""Adapters on a base in 4 bits (QLoRA), alone and sharded: they resume, and merge into no other base."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from halfstep.core.errors import HalfstepError
from halfstep.integrations import adapters, state
from halfstep.integrations.accelerate import Accelerator
from halfstep.integrations.transformers import Trainer
from tests.accelerate_state import fresh_accelerate, reset  # noqa: F401
from tests.integrations import sharded, test_transformers, test_trl
from tests.refusals import refuses
from tests.torch.nets import same_by_name
from tests.torch.parallel import jobs

# Looked for, not imported: importing them takes seconds, and every worker collects this file.
missing = [name for name in ("bitsandbytes", "peft") if find_spec(name) is None]
pytestmark = [pytest.mark.prove, pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")]
TOKENS = torch.randint(2, 98, (16, 16), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]
SHARDED = {"fsdp": True, "ddp_backend": "gloo", "per_device_train_batch_size": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model in bf16 on the disk."""
    folder = tmp_path_factory.mktemp("base")
    wide().bfloat16().save_pretrained(folder)
    return str(folder)


def wide():
    """A model whose rows are blocks of 64 numbers, each of which has a scale in NF4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=98, max_position_embeddings=64, **sizes))


@pytest.fixture(autouse=True)
def same_environment():
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def load(folder, storage=torch.bfloat16, double=False):
    """Loads a model with its matrices in NF4."""
    from transformers import BitsAndBytesConfig

    held = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    held |= {"bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_quant_storage": storage}
    config = BitsAndBytesConfig(**held)
    options = {"quantization_config": config, "device_map": {"": "cpu"}}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def adapted(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**test_trl.LORA, task_type="CAUSAL_LM"))


def trained(model, folder, policy="bf16-mixed", resume=None, **changes):
    sharded.forget()
    args = test_transformers.arguments(folder, save_strategy="steps", save_steps=2, **changes)
    trainer = Trainer(adapted(model), args, train_dataset=DATA, policy=policy)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights_of(trainer):
    named = trainer.run.masters.names.items()
    return {name: jobs.whole_tensor(p) for p, name in named if p.requires_grad}


@pytest.mark.parametrize(("storage", "double"), [(torch.uint8, True), (torch.bfloat16, False)])
def test_adapters_learn_as_by_stock_trainer_and_resume_bit_for_bit(base, storage, double, tmp_path):
    import transformers

    args = test_transformers.arguments(tmp_path / "stock")
    stock = transformers.Trainer(adapted(load(base, storage, double)), args, train_dataset=DATA)
    stock.train()
    reset()
    whole = trained(load(base, storage, double), tmp_path)
    losses = test_transformers.losses(whole)
    assert losses == pytest.approx(test_transformers.losses(stock), abs=6e-4)
    torch.manual_seed(7)
    resumed = trained(load(base, storage, double), tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert test_transformers.losses(resumed) == losses
    assert same_by_name(weights_of(resumed), weights_of(whole))
    saved = tmp_path / "checkpoint-2"
    assert all("lora_" in name for name in load_file(saved / "adapter_model.safetensors"))
    assert all("lora_" in name for name in load_file(saved / state.NAME) if name.startswith("model."))


def test_a_base_of_the_same_codes_and_other_scales_is_refused(base, tmp_path):
    """Codes of 4 bits are the same for a base that was doubled; its scales are not."""
    trained(load(base), tmp_path)
    doubled = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in doubled.model.layers:
            layer.mlp.up_proj.weight.mul_(2)
    doubled.save_pretrained(tmp_path / "doubled")
    with refuses(HalfstepError, r"the frozen weight .*mlp.up_proj.weight.quant_state` is not the one"):
        trained(load(str(tmp_path / "doubled")), tmp_path, resume=str(tmp_path / "checkpoint-2"))


def by_accelerate(base, resume=None, save=None):
    sharded.forget()
    accelerator = Accelerator(policy="bf16-mixed", cpu=True)
    model = adapted(load(base))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume is not None:
        accelerator.load_state(resume)
    for step in range(0 if resume is None else 2, 4):
        accelerator.backward(model(input_ids=TOKENS[step : step + 2], labels=TOKENS[step : step + 2]).loss)
        optimizer.step()
        optimizer.zero_grad()
        if save is not None and step == 1:
            accelerator.save_state(save)
    return {name: weight for name, weight in accelerator.run.weights().items() if "lora_" in name}


def test_accelerate_saves_the_adapters_and_resumes_bit_for_bit(base, tmp_path):
    folder = str(tmp_path / "saved")
    ended = by_accelerate(base, save=folder)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)
    assert len(ended) == len(saved)
    assert same_by_name(by_accelerate(base, resume=folder), ended)


# -- on two ranks, sharded


def on_ranks(base, folder, storage, config=None):
    changes = {**SHARDED, "fsdp_config": config or {}}
    whole = trained(load(base, storage), folder, **changes)
    resumed = trained(load(base, storage), folder, resume=f"{folder}/checkpoint-2", **changes)
    same = same_by_name(weights_of(whole), weights_of(resumed))
    held = {(type(p), p.dtype) for p in whole.model.parameters() if not p.requires_grad}
    whole.save_model(f"{folder}/out")
    return test_transformers.losses(whole), test_transformers.losses(resumed), same, held


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [{}, {"cpu_ram_efficient_loading": True}])
def test_two_ranks_shard_the_base_learn_as_one_and_resume_bit_for_bit(ranks, base, storage, config, tmp_path):
    alone = test_transformers.losses(trained(load(base, storage), tmp_path / "alone"))
    for losses, again, same, held in ranks(on_ranks, 2, base, str(tmp_path), storage, config):
        assert losses == pytest.approx(alone, rel=2.0**-8)
        assert again == losses
        assert same
        assert held == {(DTensor, torch.bfloat16), (DTensor, storage)}
    told, expected = (
        json.loads((tmp_path / each / adapters.NAME).read_text()) for each in ("out", "alone/checkpoint-4")
    )
    assert told == expected


def refused_on_ranks(base, folder):
    try:
        trained(load(base, torch.uint8), folder, **SHARDED)
    except HalfstepError as error:
        return str(error)


def test_a_base_that_would_stay_whole_on_each_rank_is_refused(ranks, base, tmp_path):
    for said in ranks(refused_on_ranks, 2, base, str(tmp_path)):
        assert "held in torch.uint8" in said
        assert "bnb_4bit_quant_storage=torch.bfloat16" in said


# -- merging


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A folder of adapters, and the logits of the model that was trained: the 4-bit base with them."""
    folder = tmp_path_factory.mktemp("tuned")
    reset()
    trainer = trained(load(base), folder, max_steps=40, learning_rate=2e-2)
    trainer.save_model(str(folder / "out"))
    reset()
    return folder / "out", logits(trainer.run.unprepare())


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS).logits.float()


def apart(model, wanted):
    return float((logits(model) - wanted).norm() / wanted.norm())


def test_merged_into_the_base_in_4_bits_the_model_is_the_one_that_was_trained(base, tuned):
    """And merged by PEFT into its bf16 original, or into 4 bits again, it is not."""
    from peft import PeftModel

    folder, wanted = tuned
    merged = adapters.merge(load(base), folder)
    assert type(merged) is LlamaForCausalLM
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16} == {merged.dtype}
    ours, wide = apart(merged, wanted), apart(adapters.merge(load(base), folder, dtype=torch.float32), wanted)
    original = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    theirs = apart(PeftModel.from_pretrained(original, folder).merge_and_unload(), wanted)
    again = apart(PeftModel.from_pretrained(load(base), folder).merge_and_unload(), wanted)
    print(f"apart: ours {ours:.4f}, in fp32 {wide:.4f}, original {theirs:.4f}, 4 bits again {again:.4f}")
    assert max(ours, wide) < 0.2 * min(theirs, again)


def test_the_lines_of_the_page_merge(base, tuned, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.S | re.M)
    monkeypatch.chdir(tuned[0].parent)
    config = load(base).config.quantization_config
    exec(block, {"AutoModelForCausalLM": AutoModelForCausalLM, "torch": torch, "name": base, "config": config})
    assert apart(LlamaForCausalLM.from_pretrained("merged"), tuned[1]) < 0.02


def test_merging_into_another_base_is_refused_with_how_far_it_is(base, tuned, tmp_path):
    folder, _ = tuned
    original = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    with refuses(HalfstepError, r"was in 4 bits: .*bfloat16 here, changes by 9\.\d% when", "quantization_config"):
        adapters.merge(original, folder)
    other = load(base)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    with refuses(HalfstepError, r"another base: `model.norm.weight` differs \(1 such"):
        adapters.merge(other, folder)
    (tmp_path / "adapter_config.json").write_text("{}")
    with refuses(HalfstepError, "does not say beside which base"):
        adapters.merge(other, tmp_path)


def test_adapters_of_a_bf16_base_merge_into_it_and_not_into_the_fp32_original(base, tmp_path):
    trainer = trained(LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16), tmp_path, max_steps=20)
    trainer.save_model(str(tmp_path / "out"))
    wanted = logits(trainer.run.unprepare())
    for dtype in (torch.bfloat16, torch.float32):  # the same numbers
        merged = adapters.merge(LlamaForCausalLM.from_pretrained(base, dtype=dtype), tmp_path / "out")
        assert apart(merged, wanted) < 2.0**-6
    with refuses(HalfstepError, "trained beside another base"):
        adapters.merge(wide(), tmp_path / "out")
