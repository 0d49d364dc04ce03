"""Compares every bit of the training state after 20 steps with that of an older commit, on the same machine.

    python benchmarks/prove/same_bits.py [--base COMMIT] [--backends torch jax mlx]

For refactoring: this tree and a clone of COMMIT train the same things, each in a process of its own, and what they
end with must be equal. COMMIT is the newest tag or, without tags, the commit before this one.

    train     `halfstep train tiny` on each backend, in five policies: every tensor of the checkpoint (masters,
              moments, scale, random state), the loss, norm and scale of each step, and the monitor's numbers
    loop      a model of the framework's own layers in the user's own loop (torch also compiled): the same tensors

Exit code 1 if anything differs, with the names of what does.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
POLICIES = (
    "fp32",
    "bf16-mixed,param=fp32:split",
    "bf16-true,param=bf16:stochastic",
    "fp16-mixed",
    "fp8-mixed,emulate=true",
)
STEPS = 20
SETTINGS = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "model.context": 32,
    "training.batch": 2,
    "training.micro_batches": 2,
    "training.steps": STEPS,
    "training.save_every": STEPS,
}
# What an event says that does not depend on the clock.
COMPARED = {"step": ("loss", "grad_norm", "scale", "skipped"), "sample": ("layers", "weights", "updates")}

Record = dict[str, str]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def trained(backend: str, policy: str, folder: Path) -> Record:
    """What `halfstep train` leaves behind."""
    command = importlib.import_module("halfstep.cli.main").run
    words = ["train", "tiny", "--backend", backend, "--policy", policy, "--device", "cpu", "--out", str(folder)]
    words += [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command(words)
    if code:
        raise SystemExit(f"halfstep {' '.join(words)}\n{said.getvalue()}")
    record = {}
    for path in sorted(folder.glob("checkpoints/*/*.safetensors")):
        record |= safetensors(path)
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        for key in COMPARED.get(event["event"], ()):
            if key in event:
                value = json.dumps(event[key], sort_keys=True)
                record[f"{event['event']} {event['step']} {key}"] = digest(value.encode())
    return record


def safetensors(path: Path) -> Record:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    return {
        f"{name} {entry['dtype']} {entry['shape']}": digest(body[slice(*entry["data_offsets"])])
        for name, entry in sorted(header.items())
        if name != "__metadata__"
    }


def torch_loop(policy: str, compiled: bool = False) -> Record:
    import torch
    from torch import nn
    from torch.nn import functional as F

    from halfstep.torch import prepare

    class Net(nn.Module):
        """A little of everything: attention, norms, convolution, functions, a head tied to the embedding."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(31, 24)
            self.mix = nn.Conv1d(24, 24, 3, padding=1)
            self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, activation="gelu", batch_first=True)
            self.norm, self.gain = nn.LayerNorm(24), nn.Parameter(torch.ones(24))
            self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
            self.head = nn.Linear(24, 31, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            """Logits."""
            x = self.embed(tokens)
            x = self.block(x + self.mix(x.transpose(1, 2)).transpose(1, 2))
            x = x + self.down(F.silu(self.up(self.norm(x)))) * self.gain
            return self.head(F.rms_norm(x, (24,))) + torch.softmax(x, -1).sum(-1, keepdim=True)

    torch.manual_seed(0)
    model = Net()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy, clip_norm=1.0)
    call = torch.compile(model) if compiled else model

    def loss(batch: Any) -> Any:
        return F.cross_entropy(call(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    record: Record = {}
    for step in range(STEPS):
        result = run.step(loss, torch.randint(0, 31, (2, 4, 13)).unbind())
        record |= {f"loss {step}": str(float(result.loss)), f"norm {step}": str(float(result.grad_norm))}
    tensors = run.state_dict()["tensors"]
    return record | {
        name: digest(t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()
    }


def jax_loop(policy: str) -> Record:
    import jax
    import jax.numpy as jnp
    import optax

    from halfstep.jax import init, make_step

    def loss(params: Any, batch: Any) -> Any:
        x = params["embed"][batch[:, :-1]]
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * params["gain"]
        x = jax.nn.gelu(x @ params["up"]) @ params["down"]
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.take_along_axis(logits, batch[:, 1:, None], -1).mean()

    rng = np.random.default_rng(0)
    shapes = {"embed": (31, 24), "gain": (24,), "up": (24, 48), "down": (48, 24)}
    params = {name: jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32) for name, shape in shapes.items()}
    optimizer = optax.adamw(1e-3)
    state = init(params, optimizer, policy)
    step = make_step(loss, optimizer)
    record: Record = {}
    for number in range(STEPS):
        state, result = step(state, jnp.asarray(rng.integers(0, 31, (4, 13)), jnp.int32))
        record[f"loss {number}"] = str(float(result.loss))
    return record | {
        jax.tree_util.keystr(path): digest(np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }


def mlx_loop(policy: str) -> Record:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

    from halfstep.mlx import prepare

    mx.random.seed(0)
    layers = [nn.Embedding(31, 24), nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)]
    model = nn.Sequential(*layers, nn.RMSNorm(24), nn.Linear(24, 31))
    run = prepare(model, optim.AdamW(1e-3), policy)

    def loss(model: Any, batch: Any) -> Any:
        return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")

    rng = np.random.default_rng(0)
    record: Record = {}
    for number in range(STEPS):
        result = run.step(loss, [mx.array(rng.integers(0, 31, (4, 13)), mx.int32) for _ in range(2)])
        record[f"loss {number}"] = str(float(result.loss))
    tensors = run.state_dict()
    return record | {
        name: digest(np.asarray(t.reshape(-1).view(mx.uint8)).tobytes()) for name, t in tensors.items()
    }


def jobs(backend: str) -> Iterator[tuple[str, Callable[[Path], Record]]]:
    loops: dict[str, Callable[[str], Record]] = {"torch": torch_loop, "jax": jax_loop, "mlx": mlx_loop}
    for policy in POLICIES:
        yield f"train {backend} {policy}", lambda folder, policy=policy: trained(backend, policy, folder)  # type: ignore[misc]
        yield f"loop {backend} {policy}", lambda _, policy=policy: loops[backend](policy)  # type: ignore[misc]
    if backend == "torch":
        yield "loop torch compiled", lambda _: torch_loop("bf16-mixed", compiled=True)


def record(backend: str, file: Path) -> None:
    """Trains everything on one backend with the package that is imported here, and writes what it ended with."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, job) in enumerate(jobs(backend)):
            found[name] = job(Path(folder) / str(number))
    file.write_text(json.dumps(found))


def records(tree: Path, backends: Iterable[str], folder: Path) -> dict[str, Record]:
    """Runs this script with the package of another tree, once per backend."""
    found: dict[str, Record] = {}
    for backend in backends:
        file = folder / f"{tree.name}-{backend}.json"
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HALFSTEP_CACHE": str(folder)}
        words = [sys.executable, str(Path(__file__).resolve()), "--record", str(file), "--backends", backend]
        subprocess.run(words, cwd=folder, env=environment, check=True)
        found |= json.loads(file.read_text())
    return found


def base_commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0"]
    tagged = subprocess.run(git, capture_output=True, text=True)
    return tagged.stdout.strip() if tagged.returncode == 0 else "HEAD~1"


def differences(old: dict[str, Record], new: dict[str, Record]) -> list[str]:
    """What is not the same in both: a line for each run of training, with the first names."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name, {}), new.get(name, {})
        differing = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
        if differing:
            shown = ", ".join(differing[:5]) + (", ..." if len(differing) > 5 else "")
            lines.append(f"{name}: {len(differing)} of {len(a.keys() | b.keys())} differ: {shown}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", help="the commit to compare with")
    parser.add_argument("--backends", nargs="+", default=["torch", "jax", "mlx"], choices=["torch", "jax", "mlx"])
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.backends[0], options.record)
        return 0
    base = options.base or base_commit()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "base"
        subprocess.run(["git", "clone", "-q", "--no-checkout", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "-q", base], check=True)
        old, new = (records(tree, options.backends, Path(folder)) for tree in (clone, ROOT))
    lines = differences(old, new)
    values = sum(len(record) for record in new.values())
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(new)} runs of {STEPS} steps, {values} values: {len(lines)} runs differ from {base}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
