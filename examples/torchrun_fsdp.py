"""A bf16 fine-tune under FSDP2 in your own loop: its masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' transformers
    torchrun --nproc-per-node 2 examples/torchrun_fsdp.py

docs/integrations.md shows the lines that differ from a loop that trains in pure bf16.
"""

import torch
import torch.distributed as dist
from small_llama import counting, pretrained
from torch.distributed.fsdp import fully_shard

from halfstep.torch import prepare


def main():
    """Trains, and returns the losses of this rank."""
    dist.init_process_group()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = pretrained().to(device)
    run = prepare(model, "bf16-mixed")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run.attach(optimizer)
    losses = []
    for rows in counting(160, seed=dist.get_rank()).to(device).split(8):
        loss = model(input_ids=rows, labels=rows).loss
        run.backward(loss)
        run.update()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
