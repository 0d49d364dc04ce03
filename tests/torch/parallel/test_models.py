"""Models of others, and models that are sharded in other ways: trained as in one process, or refused by name."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from halfstep.core.errors import HalfstepError
from halfstep.torch import AdamW, prepare
from tests.torch.parallel import jobs
from tests.torch.parallel.bounds import assert_same


def initialize(model):
    """Sets weights by their names alone, so that sharded and whole ones have the same."""
    model.head.weight = model.embedding.weight
    for place, (_, p) in enumerate(model.named_parameters()):
        drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(place)) / p.shape[-1] ** 0.5
        with torch.no_grad():
            p.copy_(jobs.like(drawn, p))


def from_meta(policy, way):
    """Prepares a model without numbers, shares it, and fills it."""
    with torch.device("meta"):
        model = jobs.Net()
    run = prepare(model, policy, clip_norm=1.0)
    if way == "fsdp" and dist.is_initialized():
        jobs.shard(model)
        with pytest.raises(HalfstepError, match="on the meta device and has no numbers"):
            run.attach(AdamW(model.parameters(), lr=1e-2))
    model.to_empty(device="cpu")
    initialize(model)
    wrapped = DistributedDataParallel(model) if way == "ddp" and dist.is_initialized() else model
    run.attach(AdamW(model.parameters(), lr=1e-2))
    results = [run.step(jobs.loss_of(wrapped), jobs.batches(step, 1)) for step in range(2)]
    return jobs.rows_of(results), jobs.whole(model) if way == "fsdp" else run.weights()


@pytest.mark.parametrize("way", [pytest.param("ddp", marks=pytest.mark.prove), "fsdp"])
def test_a_model_on_the_meta_device_is_prepared_sharded_and_filled(ranks, way):
    assert_same("bf16-mixed", from_meta("bf16-mixed", "ddp"), ranks(from_meta, 2, "bf16-mixed", way))


# What `fully_shard` may be given by mistake.
MISTAKES = {
    "computed in bf16": lambda model: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "reduced in bf16": lambda model: {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "on the host": lambda model: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "ignored": lambda model: {"ignored_params": {model.norm.weight}},
}


def refused(way):
    model = jobs.net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensors",))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    try:
        if way == "sharded before":
            jobs.shard(model)
            prepare(model, "bf16-mixed")
        elif way == "tensor parallel before":
            parallelize_module(model, mesh, plan)
            prepare(model, "bf16-mixed")
        elif way == "tensor parallel after":
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            run = prepare(model, "bf16-mixed")
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
            run.attach(AdamW(model.parameters(), lr=1e-2))
        elif way == "fsdp1 before":
            prepare(FullyShardedDataParallel(model, device_id=torch.device("cpu")), "bf16-mixed")
        elif way == "fsdp1 after":
            run = prepare(model, "bf16-mixed")
            wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False)
            run.attach(AdamW(wrapped.parameters(), lr=1e-2))
        else:
            run = prepare(model, "bf16-true" if way == "narrow" else "bf16-mixed")
            if way == "blocks alone":
                for block in model.blocks:
                    fully_shard(block, mesh=mesh)
            elif way in MISTAKES:
                fully_shard(model, mesh=mesh, **MISTAKES[way](model))
            else:
                jobs.shard(model)
            run.attach(AdamW(model.parameters(), lr=1e-2))
            copy.deepcopy(run) if way == "copied" else run.unprepare()
    except HalfstepError as error:
        return str(error), error.hint


@pytest.mark.parametrize(
    ("way", "said", "remedy"),
    [
        ("sharded before", "wrapped by FSDP already", "prepare(model, policy), then fully_shard"),
        ("tensor parallel before", "tensor parallelism is not implemented", "fully_shard alone"),
        ("tensor parallel after", "tensor parallelism is not implemented", "fully_shard alone"),
        ("fsdp1 before", "FSDP1", "FSDP2"),
        ("fsdp1 after", "FSDP1", "FSDP2"),
        ("blocks alone", "`embedding.weight` is not sharded (3 of 15 parameters", "takes the rest"),
        ("ignored", "`norm.weight` is not sharded", "leave out `ignored_params`"),
        ("computed in bf16", "mp_policy", "omit it"),
        ("reduced in bf16", "mp_policy", "omit it"),
        ("on the host", "elsewhere than gradients", "omit it"),
        ("narrow", "has no fp32 master", "param=fp32"),
        ("copied", "sharded", "state_dict"),
        ("given back", "sharded", "full_tensor"),
    ],
)
def test_what_is_not_implemented_is_refused_with_the_remedy(ranks, way, said, remedy):
    for message, hint in ranks(refused, 2, way):
        assert said in message
        assert remedy in hint


def adapted_llama(way):
    """A Llama of transformers whose weights are frozen but for low-rank adapters, checkpointed, three steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=jobs.WORDS, hidden_size=16, intermediate_size=33, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if way != "all":
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    run = prepare(model, "bf16-mixed", clip_norm=1.0)
    wrapped = model
    if dist.is_initialized() and way != "ddp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif dist.is_initialized():
        wrapped = DistributedDataParallel(model)
    run.attach(AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    loss = lambda rows: wrapped(input_ids=rows, labels=rows).loss  # noqa: E731
    with jobs.Wire() as wire:
        results = [run.step(loss, jobs.batches(step, 2)) for step in range(3)]
    return (jobs.rows_of(results), jobs.whole(model)), wire.sent


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 3, bias=False)
        self.up = nn.Linear(3, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.prove
@pytest.mark.parametrize("way", ["ddp", "fsdp", "all"])
def test_a_llama_trains_as_in_one_process_with_fp32_gradients_on_the_wire(ranks, way):
    alone, _ = adapted_llama(way)
    found = ranks(adapted_llama, 2, way)
    assert_same("bf16-mixed", alone, [trained for trained, _ in found])
    for _, sent in found:
        reduced = {dtype for name, dtype, _ in sent if name in ("allreduce", "reduce_scatter_base")}
        assert reduced == {torch.float32}
