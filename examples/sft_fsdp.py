"""A bf16 fine-tune under FSDP2 in TRL's SFTTrainer: its masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' accelerate transformers trl
    torchrun --nproc-per-node 2 examples/sft_fsdp.py --output_dir out --fsdp full_shard --bf16 false
    torchrun ... --use_cpu --ddp_backend gloo                              # without a GPU

docs/integrations.md shows the lines that differ from a script for `--bf16`.
"""

from datasets import Dataset
from small_llama import pretrained, tokenizer
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

from halfstep.integrations.transformers import PolicyMixin


class PolicySFTTrainer(PolicyMixin, SFTTrainer):
    """TRL's trainer, which takes `policy=`."""


def main(arguments=None):
    """Trains, saves the whole model, and returns the trainer."""
    (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(args=arguments)
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
    main()
