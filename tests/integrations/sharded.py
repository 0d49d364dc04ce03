"""What ranks do in tests of FSDP2 in Accelerate: prepare a small model by its plugin, and train by its loop."""

import os
import time
from collections import Counter

import accelerate
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from halfstep.integrations import fsdp
from halfstep.integrations.accelerate import Accelerator
from halfstep.torch.state import state_of
from tests.accelerate_state import reset
from tests.processes import killed_ranks
from tests.torch.parallel import jobs

SETTINGS = {
    "fsdp_version": 2,
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Block"],
}


def forget():
    """Makes this process one where no Accelerator was made."""
    reset()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def llama(**changes):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    sizes = {"hidden_size": jobs.WIDTH, "intermediate_size": 32, "vocab_size": jobs.WORDS}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **changes))


def accelerator(policy="bf16-mixed", *, plugin=None, compiled=None, steps=1, **options):
    forget()
    given = {**SETTINGS, **(plugin or {})}
    dynamo = None if compiled is None else TorchDynamoPlugin(backend="aot_eager", **compiled)
    sharded = FullyShardedDataParallelPlugin(**given)
    return Accelerator(
        policy=policy,
        cpu=True,
        fsdp_plugin=sharded,
        dynamo_plugin=dynamo,
        gradient_accumulation_steps=steps,
        **options,
    )


def begin(policy="bf16-mixed", *, model=jobs.net, optimizer="fused", **options):
    """An Accelerator, and what it prepared: a model, an optimizer and a scheduler."""
    made = accelerator(policy, **options)
    model = model()
    optimizer = jobs.OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6], 0.5)  # two a step
    return made, *made.prepare(model, optimizer, scheduler)


def begin_stock(kind, *, dtype=torch.float32, weight_decay=0.01):
    """Without a policy: what Accelerate itself prepares, under FSDP2 or, if `kind` is None, DDP."""
    forget()
    plugin = None if kind is None else FullyShardedDataParallelPlugin(**SETTINGS, state_dict_type=kind)
    made = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    fsdp.use(made, plugin)
    model = jobs.net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6], 0.5)  # two a step
    return made, *made.prepare(model, optimizer, scheduler)


def killed_saves(folder, saving, newest, longest, within=lambda folder: True):
    """30 folders that two ranks were saving to, on and on, when one of them was killed, or both.

    `newest(folder)` is the newest whole checkpoint: the kill comes up to so many seconds after the first of them,
    and each second one when a save is `within(folder)`.
    """
    for kill in range(30):
        into = folder / str(kill)
        victims = ((0,), (1,), (0, 1))[kill % 3]
        with killed_ranks(victims, saving, str(into)):
            over = time.monotonic() + 60
            while not newest(into):
                assert time.monotonic() < over
                time.sleep(0.001)
            time.sleep(longest * kill / 30)
            while kill % 2 and not within(into):
                assert time.monotonic() < over
                time.sleep(0.001)
            last = newest(into)
        yield into, last


def logits(model, tokens):
    found = model(tokens)
    return getattr(found, "logits", found)


def loss_of(model, rows):
    return torch.nn.functional.cross_entropy(
        logits(model, rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten()
    )


def train(parts, steps, first=0, micro_batches=1, spoil=None):
    """Accelerate's documented loop; returns losses of this rank, and whether updates were skipped."""
    made, model, optimizer, scheduler = parts
    seen = []
    for step in range(first, first + steps):
        for rows in jobs.batches(step, micro_batches):
            with made.accumulate(model):
                loss = loss_of(model, rows)
                made.backward(loss * torch.nan if (step, made.process_index) == spoil else loss)
                if made.sync_gradients:
                    made.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        seen.append((float(loss.detach()), made.optimizer_step_was_skipped))
    return seen


def whole_state(run):
    """Weights, moments and counts, gathered."""
    found = {}
    for name, tensor in state_of(run).items():
        if not name.startswith(("model.", "optimizer.")):
            continue
        kind, _, rest = name.partition(".")
        p = next(p for p, n in run.masters.names.items() if (rest if kind == "model" else rest[2:]).startswith(n))
        if isinstance(p, DTensor) and tensor.ndim:
            like = DTensor.from_local(tensor, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            tensor = like.full_tensor()
        found[name] = tensor.clone()
    return found


def sent(work):
    """Counts what a function sends, by operation and dtype: (tensors, bytes)."""
    with jobs.Wire() as wire:
        work()
    tensors, sizes = Counter(), Counter()
    for name, dtype, nbytes in wire.sent:
        tensors[name, dtype] += 1
        sizes[name, dtype] += nbytes
    return {key: (tensors[key], sizes[key]) for key in tensors}
