"""A run of transformers.Trainer on a tiny random model, in the shape of run_clm."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main():
    set_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(64, (64, 16))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=12,
            warmup_steps=2,
            logging_steps=2,
            save_steps=6,
            bf16=sys.argv[1] == "bf16",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model, args, train_dataset=rows).train()


main()
