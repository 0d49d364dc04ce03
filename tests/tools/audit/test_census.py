"""Precision faults of public projects, distilled into small scripts; docs/audit.md says what they cost.

Each is found by rule and tensor, and its mended twin is clean.
"""

import copy
import gc
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from halfstep.core.audit.engine import check
from halfstep.tools.audit.targets import collect
from halfstep.torch.instruments.collect.watch import Watch

BF16, FP16 = torch.bfloat16, torch.float16


def net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = {"up": nn.Linear(8, 32), "norm": nn.LayerNorm(32), "down": nn.Linear(32, 8)}
    return nn.Sequential(OrderedDict(layers)).to(dtype)


def train(model, optimizer, steps=4, dtype=None):
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 8)
        with torch.autocast("cpu", BF16, enabled=dtype is None):
            out = model(x.to(dtype or torch.float32))
        F.mse_loss(out.float(), torch.randn(4, 8)).backward()
        optimizer.step()
    return optimizer


def upcast_that_does_nothing(folder, mended):
    """The model is loaded in bf16; the parameters that are cast to fp32 are not those that it keeps."""
    model = net(BF16)
    if mended:
        model.float()
    else:
        dict(model.named_parameters())["up.weight"].float()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-5), dtype=None if mended else BF16)


def moments_follow_weights(folder, mended):
    model = net(torch.float32 if mended else BF16)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-4), dtype=None if mended else BF16)


def gains_on_resume(folder, mended):
    """`dtype="auto"` reads bf16 from a checkpoint that was trained with fp32 masters: gains of norms stop."""
    model = net(torch.float32 if mended else BF16)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-4), dtype=None if mended else BF16)
    return save(folder, model, model_optimizer(model))


def model_optimizer(model, cast=None):
    """The state of an optimizer that has stepped a model, cast as a whole if a format is given."""
    state = {
        i: {
            "step": torch.tensor(300.0),
            "exp_avg": torch.rand(p.shape) * 1e-3,
            "exp_avg_sq": torch.rand(p.shape) * 1e-6,
        }
        for i, p in enumerate(model.parameters())
    }
    if cast is not None:
        state = {i: {key: value.to(cast) for key, value in held.items()} for i, held in state.items()}
    return {"state": state, "param_groups": [{"params": [*state]}]}


def save(folder, model, optimizer=None, step=1, masters=None):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    save_file({name: p.detach().clone() for name, p in model.state_dict().items()}, path / "model.safetensors")
    if masters is not None:
        for i, master in enumerate(masters):
            optimizer["state"][i]["master_param"] = master
    if optimizer is not None:
        torch.save(optimizer, path / "optimizer.pt")
    return folder


def trained():
    """A model whose gains and biases are no longer at their first values."""
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape), alpha=0.05)
    return model


def state_saved_narrow(folder, mended):
    return save(folder, trained(), model_optimizer(trained(), None if mended else BF16))


def masters_rebuilt(folder, mended):
    """A resume makes the masters of bf16 weights again, instead of loading them."""
    exact = trained()
    weights = copy.deepcopy(exact).to(BF16)
    masters = [p.detach().clone() if mended else p.to(BF16).float().detach() for p in exact.parameters()]
    return save(folder, weights, model_optimizer(weights), masters=masters)


def masters_narrow_on_load(folder, mended):
    exact = trained()
    weights = copy.deepcopy(exact).to(BF16)
    for step, dtype in ((1, torch.float32), (2, torch.float32 if mended else BF16)):
        save(folder, weights, model_optimizer(weights), step, [p.detach().to(dtype) for p in exact.parameters()])
    return folder


def moments_widened_on_load(folder, mended):
    """Moments that are kept in bf16 on purpose come back in fp32, or as they were."""
    model = trained()
    for step, dtype in ((1, BF16), (2, BF16 if mended else torch.float32)):
        optimizer = model_optimizer(model)
        for held in optimizer["state"].values():
            held["exp_avg"] = held["exp_avg"].to(dtype)
        save(folder, model, optimizer, step)
    return folder


def masters_stale(folder, mended):
    """Weights are loaded alone: the masters keep their values from before, and the next step restores those."""
    loaded = trained()
    old = [p.detach() * 1.1 for p in loaded.parameters()]
    weights = copy.deepcopy(loaded).to(BF16)
    return save(
        folder,
        weights,
        model_optimizer(weights),
        masters=[p.detach() for p in loaded.parameters()] if mended else old,
    )


def ema_in_half(folder, mended):
    model = net()
    shadow = [p.detach().clone().to(torch.float32 if mended else FP16) for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(6):
        train(model, optimizer, steps=1)
        with torch.no_grad():
            for s, p in zip(shadow, model.parameters(), strict=True):
                s.sub_(1e-4 * (s - p))


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        angles = torch.arange(x.shape[0])[:, None].float() * self.inv_freq.float()
        return self.up(x * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))


def rotary_in_bf16(folder, mended):
    model = Rotary()
    if not mended:
        model.inv_freq = model.inv_freq.to(BF16)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


class Policy(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.head = wide, nn.Linear(8, 8)

    def forward(self, x):
        logits = self.head(x)
        with torch.autocast("cpu", enabled=False):
            return F.log_softmax(logits.float() if self.wide else logits, -1)


def log_softmax_outside_autocast(folder, mended):
    model = Policy(mended)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def clip_before_unscale(folder, mended):
    model = net()
    optimizer, scaler = torch.optim.RMSprop(model.parameters(), lr=1e-4), torch.amp.GradScaler("cpu")
    for _ in range(3):
        with torch.autocast("cpu", FP16):
            out = model(torch.randn(4, 8))
        scaler.scale(F.mse_loss(out.float(), torch.randn(4, 8))).backward()
        if mended:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Experts(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.router = wide, nn.Linear(8, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        with torch.autocast("cpu", BF16, enabled=not self.wide):
            scores = self.router(x.float() if self.wide else x)
        share = F.softmax(scores.float(), -1).to(x.dtype)
        return sum(share[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def router_in_bf16(folder, mended):
    model = Experts(mended)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


class Table(nn.Module):
    """Rotary angles, as the product of positions and frequencies."""

    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, positions):
        with torch.autocast("cpu", BF16, enabled=not self.wide):
            angles = positions.float()[:, None] @ self.inv_freq[None]
        return torch.cat([angles.cos(), angles.sin()], -1).float()


class Image(nn.Module):
    """Places of an image begin at 65,536: in bf16 the next number is 512 away."""

    def __init__(self, wide):
        super().__init__()
        self.rope, self.up = Table(wide), nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x * self.rope(65536 + torch.arange(len(x))).to(x.dtype))


def positions_in_autocast(folder, mended):
    model = Image(mended)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


class Denoiser(nn.Module):
    """A share of the noise's time is cast before it becomes a timestep, and its embedding is computed in fp32."""

    def __init__(self, wide):
        super().__init__()
        self.dtype, self.time, self.up = torch.float32 if wide else BF16, Sinusoids(), nn.Linear(8, 8)

    def forward(self, x):
        sigma = torch.linspace(0.1, 0.99, len(x))
        return self.up(x + self.time(sigma.to(self.dtype) * 1000))


class Sinusoids(nn.Module):
    def forward(self, timestep):
        angles = timestep.float()[:, None] * torch.exp(-torch.arange(4) * 2.0)
        return torch.cat([angles.cos(), angles.sin()], -1)


def timesteps_cast_early(folder, mended):
    model = Denoiser(mended)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def shards_in_bf16(folder, mended):
    """FSDP2 shards a model that was loaded in bf16: its optimizer steps those shards."""
    world = dist.is_initialized()
    if not world:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, other = net(torch.float32 if mended else BF16), net()  # of which only the first is trained
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-5), dtype=BF16)
        del other
    finally:
        if not world:
            dist.destroy_process_group()


# project and number -> the script, the rule, and what is named
CENSUS = {
    "accelerate#3979": (upcast_that_does_nothing, "HS101", "up.weight"),
    "AReaL#1292": (moments_follow_weights, "HS104", "up.weight"),
    "speculators#668": (gains_on_resume, "HS701", "norm.weight"),
    "Model-Optimizer#2322": (gains_on_resume, "HS601", "norm.weight"),
    "speculators#899": (state_saved_narrow, "HS106", "up.weight"),
    "OpenTau#185": (masters_rebuilt, "HS702", "up.weight"),
    "Megatron-LM#1359": (masters_narrow_on_load, "HS602", "up.weight"),
    "torchtitan#4615": (moments_widened_on_load, "HS603", "up.weight/exp_avg"),
    "NeMo-RL#2372": (masters_stale, "HS703", "up.weight"),
    "sd_dreambooth_extension#1417": (ema_in_half, "HS108", "up.weight"),
    "transformers#29496": (rotary_in_bf16, "HS405", "inv_freq"),
    "minimind#814": (log_softmax_outside_autocast, "HS402", ""),
    "Pytorch-UNet#468": (clip_before_unscale, "HS202", ""),
    "prime-rl#2952": (router_in_bf16, "HS403", "router"),
    "diffusers#13920": (positions_in_autocast, "HS412", "rope"),
    "UniRL#438": (timesteps_cast_early, "HS412", "time"),
    "axolotl#3894": (shards_in_bf16, "HS101", "up.weight"),
}


def audit(script, folder, mended):
    folder.mkdir()
    with Watch() as watch:
        target = script(folder, mended)
    records = [watch.record()] if watch.log.updates else []
    if target is not None:
        records += collect(str(target)).records
    return {finding.rule: finding for finding in check(records)}


SAMPLE = ("accelerate#3979", "NeMo-RL#2372", "sd_dreambooth_extension#1417", "minimind#814")


@pytest.fixture(autouse=True, scope="module")
def objects_of_other_tests_are_set_aside():
    """A watch looks for models and averages among all objects of the process."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.prove]) for name in CENSUS]
)
def test_a_fault_is_named_and_its_mended_twin_is_clean(name, tmp_path):
    script, rule, tensor = CENSUS[name]
    found = audit(script, tmp_path / "faulty", False)
    assert rule in found, [*found]
    assert not tensor or tensor in found[rule].where
    left = audit(script, tmp_path / "mended", True)
    assert rule not in left
    assert [each.rule for each in left.values() if each.severity == "error"] == []


def test_the_page_lists_them():
    page = (Path(__file__).parents[3] / "docs" / "audit.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| (\S+#\d+) \|.*\[(HS\d+)\]", page, re.M))
    assert listed == {name: rule for name, (_, rule, _) in CENSUS.items()}
