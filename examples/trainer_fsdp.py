"""A bf16 fine-tune under FSDP2 in Trainer: its masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' accelerate transformers
    torchrun --nproc-per-node 2 examples/trainer_fsdp.py out

docs/integrations.md shows the lines that differ from a script with `bf16=True`. Run it again with the same folder,
on any number of processes, and it resumes from its newest checkpoint.
"""

import sys
from pathlib import Path

from small_llama import counting, pretrained
from transformers import TrainingArguments

from halfstep.integrations.transformers import Trainer


def main(out="trainer-fsdp"):
    """Trains, saves the whole model, and returns the trainer."""
    args = TrainingArguments(
        out,
        fsdp=True,
        learning_rate=3e-3,
        max_steps=16,
        save_steps=8,
        logging_steps=4,
        report_to="none",
    )
    data = [{"input_ids": row, "labels": row} for row in counting(256, seed=1)]
    trainer = Trainer(
        policy="bf16-mixed",
        model=pretrained(),
        args=args,
        train_dataset=data,
    )
    trainer.train(resume_from_checkpoint=any(Path(out).glob("checkpoint-*")))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
