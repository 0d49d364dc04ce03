"""GRPO under FSDP2 in TRL: masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' accelerate transformers trl
    torchrun --nproc-per-node 2 examples/grpo_fsdp.py --output_dir out --fsdp full_shard --bf16 false
    torchrun ... --use_cpu --ddp_backend gloo                              # without a GPU

The model is rewarded for the letter e. docs/integrations.md shows the lines that differ from a script for
`--bf16`.
"""

from datasets import Dataset
from small_llama import pretrained, tokenizer
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

from halfstep.integrations.transformers import PolicyMixin


class PolicyGRPOTrainer(PolicyMixin, GRPOTrainer):
    """TRL's trainer, which takes `policy=`."""


def reward(completions, **_):
    """Returns a reward for each completion: for each e, and a little for letters that differ."""
    return [completion.count("e") + len(set(completion)) / 50 for completion in completions]


def main(arguments=None):
    """Trains, saves the whole model, and returns the trainer."""
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(args=arguments)
    trainer = PolicyGRPOTrainer(
        policy="bf16-mixed",
        model=pretrained(),
        args=args,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": f"f{i}("} for i in range(32)]),
        processing_class=tokenizer(),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
