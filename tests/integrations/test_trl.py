"""TRL's SFTTrainer under a policy: it computes the loss by its own forward; all weights, or adapters of PEFT."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from halfstep.core.errors import HalfstepError
from halfstep.integrations import state
from halfstep.integrations.transformers import PolicyMixin
from tests.accelerate_state import fresh_accelerate, reset  # noqa: F401
from tests.refusals import refuses

pytestmark = pytest.mark.prove
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def tokenizer():
    vocabulary = {text: i for i, text in enumerate(["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make(folder, policy=None, lora=False, **changes):
    # Here, because every worker of the suite would wait for them to collect this file.
    pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    class PolicySFTTrainer(PolicyMixin, SFTTrainer):
        pass

    reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=98, max_position_embeddings=64, **sizes, **ends))
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
        "model": model,
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
