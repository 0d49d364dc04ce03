"""GRPO under FSDP2 in TRL's GRPOTrainer: masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' accelerate transformers trl
    torchrun --nproc-per-node 2 examples/grpo_fsdp.py out

The model is rewarded for the letter e. docs/integrations.md shows the lines that differ from a script with
`bf16=True`.
"""

import sys

from datasets import Dataset
from small_llama import pretrained, tokenizer
from trl import GRPOConfig, GRPOTrainer

from halfstep.integrations.transformers import PolicyMixin


class PolicyGRPOTrainer(PolicyMixin, GRPOTrainer):
    """TRL's trainer with `policy=`."""


def letters_e(completions, **_):
    """Returns a reward for each completion, a little of it for different letters."""
    return [completion.count("e") + len(set(completion)) / 50 for completion in completions]


def main(out="grpo-fsdp"):
    """Trains, saves the whole model, and returns the trainer."""
    args = GRPOConfig(
        out,
        fsdp=True,
        bf16=False,
        learning_rate=1e-2,
        max_steps=6,
        logging_steps=2,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=8,
        report_to="none",
    )
    trainer = PolicyGRPOTrainer(
        policy="bf16-mixed",
        model=pretrained(),
        reward_funcs=letters_e,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"f{i}("} for i in range(32)]),
        processing_class=tokenizer(),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
