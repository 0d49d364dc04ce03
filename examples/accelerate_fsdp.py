"""A bf16 fine-tune under FSDP2 in Accelerate: its masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' accelerate transformers
    accelerate launch --use_fsdp --fsdp_version 2 --mixed_precision no examples/accelerate_fsdp.py
    torchrun --nproc-per-node 2 examples/accelerate_fsdp.py --cpu          # without a GPU

The loop is Accelerate's own. docs/integrations.md shows the two lines that differ from a script with
`mixed_precision=`. Run it again with the same `--out`, on any number of processes, and it resumes from there.
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from small_llama import counting, pretrained
from torch.utils.data import DataLoader

from halfstep.integrations.accelerate import Accelerator


def main(argv=None):
    """Trains, saves after each epoch, and returns the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", default="fsdp-checkpoint")
    args = parser.parse_args(argv)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(policy="bf16-mixed", fsdp_plugin=plugin, cpu=args.cpu)
    model = pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(counting(256, seed=1), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if Path(args.out).is_dir():
        accelerator.load_state(args.out)
    losses = []
    for epoch in range(args.epochs):
        for rows in loader:
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.save_state(args.out)
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
