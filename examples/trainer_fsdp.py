"""A bf16 fine-tune under FSDP2 in Trainer: its masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' accelerate transformers
    torchrun --nproc-per-node 2 examples/trainer_fsdp.py --output_dir out --fsdp full_shard --max_steps 16
    torchrun ... --use_cpu --ddp_backend gloo                              # without a GPU

docs/integrations.md shows the two lines that differ from a script for `--bf16`. Run it again with the same folder,
on any number of processes, and it resumes from its newest checkpoint.
"""

from pathlib import Path

from small_llama import counting, pretrained
from transformers import HfArgumentParser, TrainingArguments

from halfstep.integrations.transformers import Trainer


def main(arguments=None):
    """Trains, saves the whole model, and returns the trainer."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args=arguments)
    trainer = Trainer(
        policy="bf16-mixed",
        model=pretrained(),
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in counting(256, seed=1)],
    )
    trainer.train(resume_from_checkpoint=any(Path(args.output_dir).glob("checkpoint-*")))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
