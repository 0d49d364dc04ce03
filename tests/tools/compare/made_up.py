"""Run folders that nobody trained, and settings of runs that take seconds."""

import json
import random
from pathlib import Path

from tests.report.page.made_up_runs import BEGAN, start, step

CUT = ("model.layers=1", "model.width=16", "model.heads=1", "model.context=16", "training.batch=4",
       "training.validation_tokens=256", "optimizer.name=adamw")  # fmt: skip


def make_run(
    folder: Path, *, seed: int = 0, worse: float = 0.0, steps: int = 40, digest: str = "d1", overrides=(), **more
) -> Path:
    """Writes a run whose losses depend on its seed; `worse` is added to them from the middle on."""
    luck, noise = random.Random(seed), random.Random(1000 + seed)
    offset = luck.gauss(0, 0.02)
    begin = start(more.pop("policy", "fp32"), overrides=[f"seed={seed}", *overrides])
    begin["data"] = begin["data"] | {"digest": digest}
    layers = [{"name": name, "kind": "linear", "formats": {}} for name in ("blocks.0.up", "blocks.0.down")]
    events = [begin, {"event": "monitor", "time": BEGAN, "step": 0, "layers": layers, "every": 4, "slice": 64}]
    for number in range(1, steps + 1):
        loss = 3 + 2 / number + offset + noise.gauss(0, 0.05) + (worse if number > steps // 2 else 0.0)
        events.append(step(number, BEGAN + number, loss=loss, grad_norm=0.5 + 0.1 * noise.random()))
        if number % 4 == 0:
            norms = [0.3 + 0.05 * noise.random(), 0.4 + 0.05 * noise.random()]
            weight = {"norm": norms, "gradient_norm": norms, "update_norm": norms, "lost": [0.0, 0.0]}
            empty = {"count": [1.0, 1.0]}
            events.append({"event": "layers", "time": BEGAN, "step": number, "since": number - 4,
                           "activation": empty, "gradient": empty, "weight": weight})  # fmt: skip
    events.append({"event": "validation", "time": BEGAN, "step": steps, "loss": 3 + offset + worse, "tokens": 64,
                   "bits_per_byte": 4.0})  # fmt: skip
    end = {"event": "end", "time": BEGAN, "step": steps, "seconds": 9.0, "loss": 3.0, "validation_loss": 3.0,
           "tokens_per_second": 1000.0, "spent": None, "mfu": None, "memory": 2**30}  # fmt: skip
    events.append(end | more)
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def make_runs(folder: Path, seeds: int = 4, **more) -> Path:
    """Writes a folder of runs, one for each seed."""
    for seed in range(seeds):
        make_run(folder / f"seed-{seed}", seed=seed, **more)
    return folder
