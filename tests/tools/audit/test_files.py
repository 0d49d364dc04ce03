"""What files of weights show: each fault is planted in a file and found by rule and tensor; its twin is clean."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from halfstep.core.audit.engine import check
from halfstep.core.errors import HalfstepError
from halfstep.core.state_format import Stored
from halfstep.tools.audit.targets import collect
from halfstep.training.checkpoints import checkpoint
from halfstep.training.weights import disk
from halfstep.training.weights.disk import DiskTensor, Span, differences, numbers_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORM, UP, EMBED, HEAD = "layers.0.norm.weight", "layers.0.up.weight", "embed_tokens.weight", "lm_head.weight"


def model(dtype=FP32, gain=None, seed=0, **more):
    """A model of two matrices, a norm and a head, as it is after some training."""
    make = torch.Generator().manual_seed(seed)
    gains = 1 + 0.1 * torch.randn(16, generator=make) if gain is None else torch.full((16,), float(gain))
    embed = torch.randn(12, 16, generator=make)
    weights = {NORM: gains, UP: torch.randn(16, 16, generator=make), EMBED: embed, HEAD: embed.clone()}
    return {name: tensor.to(dtype).clone() for name, tensor in (weights | more).items()}


def state(weights, dtype=FP32, step=FP32, **moments):
    """The state of an optimizer that steps some weights."""
    held = {
        i: {
            "step": torch.tensor(300.0, dtype=step),
            "exp_avg": torch.full(tensor.shape, 0.25, dtype=dtype),
            "exp_avg_sq": torch.full(tensor.shape, 0.5, dtype=dtype),
        }
        | {key: value.expand(tensor.shape).clone() for key, value in moments.items()}
        for i, tensor in enumerate(weights.values())
    }
    return {"state": held, "param_groups": [{"params": [*held]}]}


def moved(weights, by):
    """Weights after updates of random size, to a share of each."""
    make = torch.Generator().manual_seed(1)
    return {
        name: (tensor.float() * (1 + by * torch.rand(tensor.shape, generator=make))).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def write(folder, weights, optimizer=None, config=None, masters=None):
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    if masters is not None:
        optimizer = state(weights)
        optimizer["state"] = {
            i: held | {"master_param": tensor}
            for (i, held), tensor in zip(optimizer["state"].items(), masters.values(), strict=True)
        }
    if optimizer is not None:
        torch.save(optimizer, folder / "optimizer.pt")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def narrowed(weights, dtype=BF16):
    return {name: tensor.to(dtype).to(FP32) for name, tensor in weights.items()}


TIED = {"tie_word_embeddings": True, "dtype": "float32"}
STALE = moved(model(), 0.01)
NAN = torch.full((16, 16), float("nan"))
LARGE = torch.cat([torch.full((1, 16), 65504.0), torch.rand(15, 16)])
# rule -> what is written, and a twin that is clean: (weights, options of `write`, weights before)
FAULTS = {
    "HS104": (
        (model(), {"optimizer": state(model(), BF16)}, None),
        (model(), {"optimizer": state(model())}, None),
    ),
    "HS106": (
        (model(), {"optimizer": state(model(), step=BF16)}, None),
        (model(), {"optimizer": state(model())}, None),
    ),
    "HS107": (
        (model(), {"optimizer": state(model(), exp_avg_sq=torch.zeros(()))}, None),
        (model(), {"optimizer": state(model(), exp_avg_sq=torch.zeros(()), exp_avg=torch.zeros(()))}, None),
    ),
    "HS701": (
        (model(gain=1), {"optimizer": state(model())}, None),
        (model(), {"optimizer": state(model())}, None),
    ),
    "HS701 of Gemma": (
        (model(BF16, gain=0), {}, model(BF16, gain=0, seed=1)),
        (model(BF16), {}, model(BF16, seed=1)),
    ),
    "HS702": (
        (narrowed(model()), {"optimizer": state(model())}, None),
        (model(), {"optimizer": state(model())}, None),
    ),
    "HS702 of fp16": ((narrowed(model(), FP16), {}, narrowed(model(seed=1), FP16)), (model(), {}, model(seed=1))),
    "HS703": ((model(BF16), {"masters": STALE}, None), (model(BF16), {"masters": model()}, None)),
    "HS704": ((model(**{UP: NAN}), {}, None), (model(), {}, None)),
    "HS704 at the largest": ((model(FP16, **{UP: LARGE}), {}, None), (model(FP16), {}, None)),
    "HS705": (
        (model(), {"config": {"dtype": "bfloat16"}, "optimizer": state(model())}, None),
        (model(), {"config": {"torch_dtype": "float32"}, "optimizer": state(model())}, None),
    ),
    "HS706": ((model(**{HEAD: torch.ones(12, 16)}), {"config": TIED}, None), (model(), {"config": TIED}, None)),
    "HS707": (
        (model(BF16, seed=1) | {NORM: model(BF16)[NORM]}, {}, model(BF16)),
        (model(BF16, seed=1), {}, model(BF16)),
    ),
    "HS708": ((moved(model(BF16), 0.003), {}, model(BF16)), (moved(model(BF16), 0.1), {}, model(BF16))),
}
OF_ONE = {"HS701": [NORM], "HS701 of Gemma": [NORM], "HS704": [UP], "HS704 at the largest": [UP]}
OF_ONE |= {"HS706": [HEAD], "HS707": [NORM]}


def audit(folder, weights, options, before):
    path = write(folder, weights, **options)
    earlier = str(write(folder.with_name(f"{folder.name} before"), before)) if before is not None else None
    return {f.rule: f for f in check(collect(str(path), before=earlier).records) if f.severity != "note"}


@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_found_and_its_twin_is_clean(case, tmp_path):
    planted, twin = FAULTS[case]
    rule = case.split(" ")[0]
    found = audit(tmp_path / "planted", *planted)
    assert [*found] == [rule]
    assert found[rule].where == OF_ONE.get(case, found[rule].where)
    assert audit(tmp_path / "twin", *twin) == {}


NOTES = {
    "HS701": model(gain=1),
    "HS702": narrowed(model()),
    "HS704": model(FP16, **{UP: torch.full((16, 16), 1e-6) * torch.rand(16, 16)}),
}


@pytest.mark.parametrize("rule", NOTES)
def test_what_a_file_alone_shows_is_a_note(rule, tmp_path):
    (found,) = check(collect(str(write(tmp_path / "x", NOTES[rule]))).records)
    assert (found.rule, found.severity) == (rule, "note")


def test_a_frozen_layer_is_a_note(tmp_path):
    before = model() | {"layers.1.up.weight": torch.rand(8, 8)}
    after = model(seed=1) | {"layers.1.up.weight": before["layers.1.up.weight"]}
    write(tmp_path / "before", before)
    found = check(collect(str(write(tmp_path / "after", after)), before=str(tmp_path / "before")).records)
    assert [(f.rule, f.severity, f.where) for f in found] == [("HS707", "note", ["layers.1.up.weight"])]


def as_torch(folder, weights, optimizer):
    torch.save({"state_dict": weights, "optimizer": optimizer}, folder / "last.ckpt")
    return folder / "last.ckpt"


def as_shards(folder, weights, optimizer):
    names = [*weights]
    where = {}
    for i, part in enumerate((names[:2], names[2:])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    torch.save(optimizer, folder / "optimizer.bin")
    return folder


def as_dcp(folder, weights, optimizer):
    import torch.distributed.checkpoint as dcp

    named = dict(zip(weights, optimizer["state"].values(), strict=True))
    dcp.save({"model": weights, "optim": {"state": named}}, checkpoint_id=folder, no_dist=True)
    return folder


def as_fsdp_of_accelerate(folder, weights, optimizer):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return folder


def as_our_own(folder, weights, optimizer):
    arrays = {
        f"model.{name}": Stored("F32", tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in weights.items()
    }
    for name, held in zip(weights, optimizer["state"].values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            data = held[key].contiguous().numpy().tobytes()
            arrays[f"optimizer.0.{name}.{key}"] = Stored("F32", tuple(held[key].shape), data)
    meta = {"policy": "fp32", "config": {}, "data": {}}
    return checkpoint.save(folder / "checkpoints", 7, arrays, meta)


LAYOUTS = [as_torch, as_shards, as_dcp, as_fsdp_of_accelerate, as_our_own]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout, tmp_path):
    for planted in (True, False):
        weights = model(gain=1 if planted else None) | ({UP: NAN} if planted else {})
        (folder := tmp_path / str(planted)).mkdir()
        path = layout(folder, weights, state(weights))
        record = collect(str(path)).records[0]
        facts = record.checkpoints[0]
        own = [name.removeprefix("model.") for name in facts.weights]
        assert sorted(own) == sorted(weights)
        assert len(facts.moments) == 2 * len(weights)
        found = {f.rule: f for f in check(record)}
        assert {f.rule: f.severity for f in found.values()} == (
            {"HS701": "error", "HS704": "error"} if planted else {}
        )


@pytest.mark.parametrize(
    ("after", "before", "problem"),
    [("a", "missing", "holds no weights to compare with"), ("tiny", "a", "holds no tensors to compare")],
)
def test_what_cannot_be_compared_is_refused(after, before, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", model())
    with pytest.raises(HalfstepError, match=problem):
        collect(after, before=before)


def test_a_damaged_file_of_torch_is_refused_by_name(tmp_path):
    file = as_torch(tmp_path, model(), state(model()))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(HalfstepError, match="torn or damaged"):
        collect(str(file))


# The numbers themselves, against numpy and torch


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
def test_counts_are_those_of_torch(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "CHUNK", 1000)
    info = torch.finfo(dtype)
    torch.manual_seed(0)
    wide = torch.randn(5000, dtype=torch.float64) * torch.exp2(torch.linspace(-160, 20, 5000, dtype=torch.float64))
    wide[:3], wide[3:5], wide[5:9] = float("nan"), info.max, 0
    values = wide.to(dtype)
    (tmp_path / "x").write_bytes(values.view(torch.uint8).numpy().tobytes())
    format = disk.FORMATS[str(dtype).removeprefix("torch.")]
    tensor = DiskTensor(format, (5000,), (Span(tmp_path / "x", 0, 5000 * values.itemsize),))
    (found,) = numbers_of([tensor])
    exact = values.double()
    size = exact.abs()
    assert found.elements == 5000
    assert found.nonfinite == int((~exact.isfinite()).sum())
    assert found.saturated == int((size == info.max).sum())
    assert found.zeros == int((size == 0).sum())
    assert found.subnormal == int(((size > 0) & (size < info.smallest_normal)).sum())
    if format == "e4m3":
        assert disk.value_of(tensor, 0x38) == 1.0


@pytest.mark.parametrize("wanted", [BF16, FP16])
def test_a_master_is_rounded_as_torch_rounds_it(wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "CHUNK", 1000)
    torch.manual_seed(0)
    master = torch.randn(4096)
    weight = master.to(wanted)
    weight[5] *= 2
    raw = [master.numpy().tobytes(), weight.view(torch.uint8).numpy().tobytes()]
    (tmp_path / "x").write_bytes(b"".join(raw))
    size, width = len(raw[0]), len(raw[1])
    spans = (Span(tmp_path / "x", 0, 4), Span(tmp_path / "x", 4, size - 4))  # in pieces
    first = DiskTensor("fp32", (4096,), spans)
    format = disk.FORMATS[str(wanted).removeprefix("torch.")]
    (found,) = differences([(first, DiskTensor(format, (4096,), (Span(tmp_path / "x", size, width),)))])
    assert (found.changed, found.by_one) == (1, 0)


LARGE_FOLDER = """
import re, sys, time
from halfstep.tools.audit.targets import collect
began = time.perf_counter()
record = collect(sys.argv[1]).records[0]
seconds = time.perf_counter() - began
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(seconds, int(peak) / 1024)
assert len(record.checkpoints[0].tensors) > 1
"""


@pytest.mark.prove
def test_a_large_folder_takes_little_memory(tmp_path):
    """3 GB here; its files may be in the page cache."""
    shards = {}
    for i in range(3):
        weights = {f"layers.{i}.{j}.weight": torch.randn(8192, 8192).to(BF16) for j in range(8)}
        save_file(weights, tmp_path / f"model-{i}.safetensors")
        shards |= dict.fromkeys(weights, f"model-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    done = subprocess.run(
        [sys.executable, "-c", LARGE_FOLDER, str(tmp_path)], capture_output=True, text=True, check=True
    )
    seconds, mebibytes = map(float, done.stdout.split())
    assert mebibytes < 1000
    assert 3 * 2**10 / seconds > 300
