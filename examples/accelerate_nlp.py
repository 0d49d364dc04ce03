"""Accelerate's nlp example under a precision policy: a small BERT learns whether two sentences say the same.

    pip install '.[torch]' accelerate transformers
    python examples/accelerate_nlp.py

The loop is Accelerate's own. Two lines differ from the script with `mixed_precision=`: docs/integrations.md shows
them. Weights are random and the data is made here, so that nothing is downloaded.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

from halfstep.integrations.accelerate import Accelerator

VOCABULARY, LENGTH, CLS, SEP = 64, 6, 1, 2


def sentence_pairs(count, seed):
    """Returns examples: sentences that say the same have words of one half of the vocabulary, others of both."""
    draw = torch.Generator().manual_seed(seed)
    examples = []
    for label in torch.randint(2, (count,), generator=draw).tolist():
        first, second = torch.randint(3, VOCABULARY // 2, (2, LENGTH), generator=draw)
        second = second if label else second + VOCABULARY // 2
        tokens = [CLS, *first.tolist(), SEP, *second.tolist(), SEP]
        examples.append({"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": label})
    return examples


def collate(examples):
    """Returns a batch of tensors."""
    return {key: torch.tensor([example[key] for example in examples]) for key in examples[0]}


def training_function(config, args):
    """Trains, evaluates after each epoch, and returns the losses and the last accuracy."""
    accelerator = Accelerator(
        policy="bf16-mixed",
        gradient_accumulation_steps=2,
        cpu=args.cpu,
    )
    set_seed(config["seed"])
    train_dataloader = DataLoader(
        sentence_pairs(config["examples"], 0), shuffle=True, collate_fn=collate, batch_size=config["batch_size"]
    )
    eval_dataloader = DataLoader(sentence_pairs(64, 1), collate_fn=collate, batch_size=32)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    steps = len(train_dataloader) * config["num_epochs"]
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=steps // 10, num_training_steps=steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    first_epoch = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        first_epoch = int(args.resume_from_checkpoint.rpartition("_")[2]) + 1
    losses = []
    for epoch in range(first_epoch, config["num_epochs"]):
        model.train()
        train_dataloader.set_epoch(epoch)
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        right = []
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            right += accelerator.gather_for_metrics(predictions == batch["labels"]).tolist()
        accuracy = sum(right) / len(right)
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}, accuracy {accuracy:.2f}")
        if args.output_dir:
            accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")
    accelerator.end_training()
    return losses, accuracy


def main(arguments=None, **changes):
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--output_dir", help="save after each epoch to this folder")
    parser.add_argument("--resume_from_checkpoint", help="a folder that was saved, `.../epoch_0`")
    config = {"lr": 3e-3, "num_epochs": 3, "seed": 42, "batch_size": 16, "examples": 512}
    return training_function(config | changes, parser.parse_args(arguments))


if __name__ == "__main__":
    main()
