"""A bf16 fine-tune under FSDP2 in your own loop: its masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' transformers
    torchrun --nproc-per-node 2 examples/torchrun_fsdp.py

docs/integrations.md shows the lines that differ from a loop that trains in pure bf16. Weights are random and the
data is made here, so that nothing is downloaded.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from halfstep.torch import prepare

VOCABULARY, LENGTH, STEPS = 64, 16, 20


def pretrained():
    """Returns a model as many are loaded: with weights in bf16."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def main():
    """Trains, and returns the losses of this rank."""
    dist.init_process_group()
    torch.manual_seed(0)
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
    draw, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        starts = torch.randint(VOCABULARY, (8, 1), generator=draw)
        rows = ((starts + torch.arange(LENGTH)) % VOCABULARY).to(device)
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
