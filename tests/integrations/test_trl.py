"""TRL under a policy: SFTTrainer, which has a forward of its own, and GRPOTrainer, which generates.

On one device and sharded by FSDP2 over two ranks; all weights, or adapters of PEFT.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from halfstep.core.errors import HalfstepError
from halfstep.integrations import state
from halfstep.integrations.transformers import PolicyMixin
from tests.accelerate_state import fresh_accelerate, reset  # noqa: F401
from tests.integrations import sharded
from tests.refusals import refuses
from tests.torch.parallel import jobs

pytestmark = pytest.mark.prove
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def tokenizer():
    vocabulary = {text: i for i, text in enumerate(["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=98, max_position_embeddings=64, **sizes, **ends))


def make(folder, policy=None, lora=False, dtype=torch.float32, **changes):
    # Here, because every worker of the suite would wait for them to collect this file.
    pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    class PolicySFTTrainer(PolicyMixin, SFTTrainer):
        pass

    reset()
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "bf16": False,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_length": 32,
    }
    given = {
        "model": base().to(dtype),
        "args": SFTConfig(str(folder), **settings | changes),
        "train_dataset": Dataset.from_list([{"text": f"def f{i}(x): return x * {i}"} for i in range(32)]),
        "processing_class": tokenizer(),
        "peft_config": LoraConfig(**LORA) if lora else None,
    }
    return SFTTrainer(**given) if policy is None else PolicySFTTrainer(**given, policy=policy)


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(("policy", "lora", "packing"), [("bf16-mixed", False, True), ("fp16-mixed", True, False)])
def test_sft_learns_as_in_fp32_and_resumes_bit_for_bit(policy, lora, packing, tmp_path):
    stock = make(tmp_path / "stock", lora=lora, packing=packing, save_strategy="no")
    stock.train()
    ours = make(tmp_path / "ours", policy, lora, packing=packing)
    ours.train()
    bits = 8 if policy == "bf16-mixed" else 11
    assert losses(ours) == pytest.approx(losses(stock), rel=4 * 2.0**-bits)
    torch.manual_seed(5)
    resumed = make(tmp_path / "ours", policy, lora, packing=packing)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert losses(resumed) == losses(ours)
    wanted, given = ours.run.weights(), resumed.run.weights()
    assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    if lora:  # masters and two moments of the adapters; the base is not written
        trained = sum(p.nbytes for p in ours.model.parameters() if p.requires_grad)
        size = (tmp_path / "ours" / "checkpoint-2" / state.NAME).stat().st_size
        assert size < 3 * trained + 20_000 < sum(p.nbytes for p in ours.model.parameters())


def test_the_default_of_sft_config_is_refused_with_the_line_to_write(tmp_path):
    with refuses(HalfstepError, "bf16=True", "bf16=False"):
        make(tmp_path, "bf16-mixed", bf16=True)


# -- on two ranks, sharded


SHARDED = {"fsdp": True, "ddp_backend": "gloo", "packing": False, "per_device_train_batch_size": 1}


def sharded_sft(folder, lora, dtype):
    """Trains, and is resumed from the middle; returns losses, whole masters, and how parameters are held."""
    found = []
    for resume in (None, f"{folder}/checkpoint-2"):
        sharded.forget()
        trainer = make(folder, "bf16-mixed,export=bf16", lora, dtype, **SHARDED)
        trainer.train(resume_from_checkpoint=resume)
        masters = {name: jobs.whole_tensor(p) for p, name in trainer.run.masters.names.items()}
        found.append((losses(trainer), masters))
    held = {(type(p), p.dtype, p.requires_grad) for p in trainer.model.parameters()}
    trainer.save_model(f"{folder}/out")
    return *found, held


@pytest.mark.parametrize(("lora", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16)])
def test_sft_shards_learns_as_on_one_device_and_resumes_bit_for_bit(ranks, lora, dtype, tmp_path):
    alone = make(tmp_path / "alone", "bf16-mixed", lora, dtype, packing=False, save_strategy="no")
    alone.train()
    folder = tmp_path / "sharded"
    for (first, masters), (again, same), held in ranks(sharded_sft, 2, str(folder), lora, dtype):
        assert first == pytest.approx(losses(alone), rel=2.0**-8)
        assert again == first
        assert all(torch.equal(same[name], w) for name, w in masters.items())
        frozen = {(DTensor, torch.bfloat16, False)} if lora else set()
        assert held == {(DTensor, torch.float32, True), *frozen}  # masters are fp32; a base stays as it was loaded
    written = load_file(folder / "out" / ("adapter_model.safetensors" if lora else "model.safetensors"))
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    if lora:  # the rows of adapters and of their moments; the base is not written
        trained = sum(p.nbytes for p in alone.model.parameters() if p.requires_grad)
        parts = sum(file.stat().st_size for file in (folder / "checkpoint-2/step-000002").glob("*.safetensors"))
        assert 3 * trained < parts < 3 * trained + 60_000


def rewarded(completions, **_):
    return [completion.count("e") + len(set(completion)) / 50 for completion in completions]


def grpo(folder, beta, **changes):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class PolicyGRPOTrainer(PolicyMixin, GRPOTrainer):
        pass

    sharded.forget()
    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 3}
    settings |= {"bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    trainer = PolicyGRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder),
        reward_funcs=rewarded,
        args=GRPOConfig(f"{folder}/out", learning_rate=1e-2, beta=beta, **settings, **changes),
        train_dataset=Dataset.from_list([{"prompt": f"f{i}("} for i in range(32)]),
        processing_class=tokenizer(),
        policy="bf16-mixed",
    )
    trainer.train()
    shards = [isinstance(p, DTensor) for p in trainer.model.parameters()]
    logged = [
        (row["loss"], row["reward"], row["grad_norm"]) for row in trainer.state.log_history if "reward" in row
    ]
    return logged, all(shards), {name: jobs.whole_tensor(p) for p, name in trainer.run.masters.names.items()}


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo_generates_and_trains_sharded(ranks, beta, tmp_path):
    """With a reference model (beta) too, which TRL shards itself; both ranks end with the same weights."""
    pytest.importorskip("trl", reason="trl is not installed")
    base().save_pretrained(tmp_path)
    first, second = ranks(partial(grpo, str(tmp_path), beta, fsdp=True, ddp_backend="gloo"), 2)
    assert first[:2] == second[:2]
    assert first[1]
    assert len(first[0]) == 3
    assert all(norm > 0 for _, _, norm in first[0])
    assert all(torch.equal(w, second[2][name]) for name, w in first[2].items())


def test_grpo_trains_on_one_device(tmp_path):
    pytest.importorskip("trl", reason="trl is not installed")
    base().save_pretrained(tmp_path)
    logged, _, weights = grpo(str(tmp_path), 0.0)
    before = dict(base().named_parameters())
    assert len(logged) == 3
    assert any(not torch.equal(before[name], w) for name, w in weights.items())
