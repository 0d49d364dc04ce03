"""A bf16 fine-tune under FSDP2 in TRL's SFTTrainer: its masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' accelerate transformers trl
    torchrun --nproc-per-node 2 examples/sft_fsdp.py out

docs/integrations.md shows the lines that differ from a script with `bf16=True`.
"""

import sys

from datasets import Dataset
from small_llama import pretrained, tokenizer
from trl import SFTConfig, SFTTrainer

from halfstep.integrations.transformers import PolicyMixin


class PolicySFTTrainer(PolicyMixin, SFTTrainer):
    """TRL's trainer with `policy=`."""


def main(out="sft-fsdp"):
    """Trains, saves the whole model, and returns the trainer."""
    args = SFTConfig(
        out,
        fsdp=True,
        bf16=False,
        learning_rate=3e-3,
        max_steps=16,
        save_steps=8,
        logging_steps=4,
        report_to="none",
    )
    trainer = PolicySFTTrainer(
        policy="bf16-mixed",
        model=pretrained(),
        args=args,
        train_dataset=Dataset.from_list([{"text": f"{i} and 1 are {i + 1}."} for i in range(256)]),
        processing_class=tokenizer(),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
