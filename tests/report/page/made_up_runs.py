"""Events of runs that never happened."""

import dataclasses
import math
import random

from halfstep.config.load import load
from halfstep.report.history import History

BEGAN = 1_760_000_000.0
STEPS = load("tiny").training.steps
REASON = (
    "bf16 matmuls are 286x slower than fp32 (1.09 s against 3.8 ms at 512x512x512); "
    "fp16 is not supported: `float16` & <half> are not the same"
)


def read_history(events):
    history = History()
    for event in events:
        history.take(event)
    return history.finish()


def start(policy="fp32", *, time=BEGAN, choice=None, resumed_from=None, overrides=()):
    config = dataclasses.asdict(load("tiny", overrides))
    return {
        "event": "start", "time": time, "halfstep": "0.1.0",
        "config": config | {"policy": policy if choice is None else "auto"}, "policy": policy, "choice": choice,
        "backend": {"name": "torch", "version": "2.13.0"}, "device": {"kind": "cpu", "name": "Neoverse-N1"},
        "parameters": 820_352, "tokens_per_step": 4096, "resumed_from": resumed_from,
        "data": {"description": "standard library of Python 3.11 (730 texts): 1,000 bytes to learn, 100 held out",
                 "digest": "5f1d0c2a9be34d7f", "train_tokens": 12_345_678, "validation_tokens": 1_371_742,
                 "bigram_bits": 4.0},
    }  # fmt: skip


def learned(number):
    return 1.42 + 4.1 * math.exp(-number / 28) + 1.1 * math.exp(-number / 260)


def step(number, time, **more):
    return {"event": "step", "time": time, "step": number, "loss": learned(number), "tokens": 4096 * number,
            "seconds": 0.25, "tokens_per_second": 16384.0, "learning_rate": 3e-3 * min(1.0, number / 20),
            "grad_norm": 0.5, "scale": 1.0, "skipped": 0, "memory": 512 * 2**20} | more  # fmt: skip


def run(steps=60, policy="fp32", *, first=1, overflows=(), finished=True, seed=0, **begin):
    """Events of one session: an evaluation and a checkpoint every 20 steps; the scale halves at `overflows`."""
    chance, now = random.Random(seed), begin.get("time", BEGAN)
    events = [start(policy, **begin)]
    scale, skipped = (65536.0 if policy.startswith("fp16") else 1.0), 0
    for number in range(first, first + steps):
        now += 0.25
        skipped += number in overflows
        noise = {"loss": learned(number) + 0.05 * chance.gauss(0, 1), "grad_norm": chance.uniform(0.3, 0.6)}
        events.append(step(number, now, scale=scale, skipped=skipped, **noise))
        scale = scale / 2 if number in overflows else scale
        if number % 20 == 0:
            events.append(evaluation(number, now, learned(number)))
            events.append(checkpoint(number, now))
    last = first + steps - 1
    if finished:
        result = {"loss": learned(last), "validation_loss": math.log(2) * 2, "bits_per_byte": 2.0}
        events.append(
            {"event": "end", "time": now, "step": last, "seconds": 134.0, "tokens_per_second": 16000.0} | result
        )
    return events


def evaluation(number, time, loss):
    bits = loss / math.log(2)
    return {"event": "validation", "time": time, "step": number, "loss": loss, "bits_per_byte": bits,
            "tokens": 65536}  # fmt: skip


def checkpoint(number, time):
    path = f"checkpoints/step-{number:06d}"
    return {"event": "checkpoint", "time": time, "step": number, "path": path, "seconds": 0.04, "bytes": 9_848_320}


def eventful():
    """A run to which one of everything happened: a NaN, a spike and a rollback, a full disk, a stop, a resume."""

    def event(kind, number, **more):
        return {"event": kind, "time": BEGAN + number / 4, "step": number, **more}

    where = [{"file": "shards/b.bin", "offsets": [512, 8192]}]
    return [
        *run(29, finished=False),
        step(30, BEGAN + 7.5, loss=math.nan, grad_norm=math.nan, skipped=1),
        event("skip", 30, loss=math.nan, grad_norm=math.nan, in_a_row=1, scale=1.0, where=where),
        step(31, BEGAN + 7.75, loss=9.0, skipped=1),
        event("spike", 31, loss=9.0, median=2.0, in_a_row=1, where=where),
        event("rollback", 31, to=20, skipped_data=11, message="back from step 31 to the checkpoint of step 20"),
        *[step(number, BEGAN + 8) for number in range(21, 41)],
        event("save_failed", 40, message="no space is left in `runs/x`"),
        event("stop", 40, reason="SIGTERM", saved=20),
        *run(40, first=21, resumed_from=20, time=BEGAN + 3600, seed=1),
    ]


MODULES = ("attn.norm", "attn.qkv", "attn.out", "mlp.norm", "mlp.up", "mlp.down")
SPECS = {"e4m3": 31.5, "e5m2": 25.5, "fp16": 73.7, "bf16": 55.7, "e4m3:row": 32.0, "e5m2:block": 25.9}


def layer_names(layers):
    names = [f"blocks.{i // len(MODULES)}.{MODULES[i % len(MODULES)]}" for i in range(layers)]
    return ["embedding", *names[: layers - 2], "lm_head"]


def monitored(steps=200, layers=26, every=10, sample_every=50, policy="fp16-mixed"):
    """Events of the monitor: in one layer activations grow beyond fp16, another loses most of its updates."""
    names, chance = layer_names(layers), random.Random(1)
    formats = {"activation": "fp16", "gradient": "fp16", "weight": "fp32"}
    kinds = ["embedding", *("norm" if "norm" in name else "matmul" for name in names[1:])]
    watched = [{"name": name, "kind": kind, "formats": formats} for name, kind in zip(names, kinds, strict=True)]
    yield {"event": "monitor", "time": BEGAN, "step": 0, "layers": watched, "every": every, "slice": 4096}
    hot, weak = layers // 2, layers // 3
    for number in range(every, steps + 1, every):
        grown = number / steps
        activation = [3.0 * 2 ** (i % 5) * (1 + chance.random()) for i in range(layers)]
        activation[hot] *= 2.0 ** (15 * grown)
        gradient = [2.0 ** (-4 - i % 7) * chance.random() for i in range(layers)]
        lost = [None if i % 9 == 4 else round(1e-4 * chance.random(), 6) for i in range(layers)]
        lost[weak] = round(0.988 * (1 - math.exp(-6 * grown)), 6)
        yield {"event": "layers", "time": BEGAN + number / 4, "step": number, "since": number - every,
               "activation": counted(activation, [400.0 * (a > 65504) for a in activation], [1.0] * layers),
               "gradient": counted(gradient, [0.0] * layers, [40.0 * (i % 7) ** 2 for i in range(layers)]),
               "weight": {"norm": [12.0] * layers, "gradient_norm": [0.2] * layers, "lost": lost,
                          "update_norm": [2e-3 * 2.0 ** -(i % 11) for i in range(layers)]}}  # fmt: skip
        if number % sample_every == 0 or number == steps:
            why = "schedule" if number % (3 * sample_every) else "alarm: loss spike"
            yield {"event": "sample", "time": BEGAN + number / 4, "step": number, "why": why,
                   "layers": {name: sampled(i, grown, hot == i) for i, name in enumerate(names)}}  # fmt: skip


def counted(amax, overflow, underflow):
    nothing = [0.0] * len(amax)
    return {"count": [4096.0] * len(amax), "amax": amax, "overflow": overflow, "underflow": underflow,
            "subnormal": nothing}  # fmt: skip


def sampled(place, grown, hot):
    """Roles of a layer: exponents in a bell; activations of the hot one grow, each seventh has tiny gradients."""
    centers = {"activation": 1 + place % 5 + 14 * grown * hot, "gradient": -12 - 2 * (place % 7), "weight": -6.0}
    return {
        role: {
            "format": "fp16", "sqnr": 70.1, "headroom": 12.5, "kurtosis": 3.2,
            "exponents": {str(e): round(1e5 * math.exp(-((e - center) ** 2) / 12))
                          for e in range(int(center) - 11, int(center) + 6)},
            "what_if": {spec: {"sqnr": best - (9 if hot and role == "activation" and ":" not in spec else 0),
                               "overflow": 0.0, "exact": False,
                               "underflow": 0.06 if center == -24 and spec != "bf16" else 2e-4}
                        for spec, best in SPECS.items()},
        }
        for role, center in centers.items()
    }  # fmt: skip


def shadow(number, *, outside=(), **more):
    """A `shadow` event of two layers, of which some are outside."""
    band = {"cosine": 0.9999, "norm_ratio": [0.99, 1.01], "sqnr": 40.0}
    layers = {
        name: {"cosine": 1 - 0.1 * (name in outside), "norm_ratio": 1.0, "sqnr": 7.0 if name in outside else "inf",
               "band": band, "outside": name in outside} for name in ("blocks.0.mlp_norm", "blocks.0.mlp.up")
    }  # fmt: skip
    numbers = {"loss": 2.0002, "reference": 2.0, "difference": 2e-4, "band": [-1e-3, 1e-3], "noise": "bf16"}
    return {"event": "shadow", "time": BEGAN + number / 4, "step": number, "layers": layers,
            "causes": list(outside[:1]), **numbers, **more}  # fmt: skip


def finding(rule, severity, message, **more):
    base = {"confidence": "certain", "fix": "hold the weights in fp32: `param=fp32`", "page": "docs/audit.md",
            "place": None, "where": [], "evidence": {}, "policy_rule": None, "ranks": []}  # fmt: skip
    return {"event": "finding", "time": BEGAN, "step": 20, "rule": rule, "severity": severity, "message": message,
            **base, **more}  # fmt: skip


def watched_run(steps=200, layers=26, **more):
    """A run with everything that the monitor and the audit record, a spike and the cause of a NaN."""
    weak = layer_names(layers)[layers // 3]
    where = [{"file": "shards/b.bin", "offsets": [512]}]
    extra = [
        *monitored(steps, layers, **more),
        *(shadow(number, outside=("blocks.0.mlp_norm",) * (number == 50)) for number in (25, 50, 75)),
        finding("HS101", "error", "weights without a master lose most of their updates", where=[weak],
                evidence={"lost": 0.988, "arrived": 0.21}, policy_rule=f'"{weak}" = "param=fp32"'),
        finding("HS303", "note", "matmuls may add up in fp16", place="train.py:41", confidence="likely",
                fix="set `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False`"),
        {"event": "spike", "time": BEGAN, "step": steps * 3 // 4, "loss": 9.0, "median": 2.0, "where": where},
        {"event": "cause", "time": BEGAN, "step": steps * 9 // 10, "pass": "forward", "operation": "matmul",
         "module": layer_names(layers)[layers // 2], "micro_batch": 1, "rank": None, "where": where,
         "message": "the matmul of `blocks.2.attn.out` is the first with finite inputs and another output"},
    ]  # fmt: skip
    plain, *rest = run(steps, "fp16-mixed", overflows=(3, 4, 5))
    numbered = [*rest, *extra]
    order = {"step": 0, "monitor": -1, "shadow": -1, "end": 2}
    numbered.sort(key=lambda event: (event.get("step", 0), order.get(event["event"], 1)))
    return [plain, *numbered]


FP16 = run(200, "fp16-mixed; lm_head: compute=fp32", overflows=(3, 4, 5, 180))
RUNS = {
    "fp32": run(200, choice={"preset": "fp32", "reason": REASON}), "fp16": FP16,
    "fp8": run(60, "fp8-mixed", finished=False),
    "resumed": [*run(50, finished=False),
                *run(25, first=41, resumed_from=40, time=BEGAN + 3600, seed=1, finished=False)],
    "just started": [start("bf16-mixed")], "one step": run(1, "bf16-mixed", finished=False),
    "eventful": eventful(), "watched": watched_run(),
}  # fmt: skip
HOSTILE = "</script><script>document.documentElement.className='owned'</script><img onerror=x src=x>\"'&`"


def poison(value):
    """The same event with every text in it hostile, keys of the configuration too."""
    if isinstance(value, dict):
        return {key: poison(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def hostile_run():
    kinds = [
        *run(40, choice={"preset": "fp32", "reason": "r"}, finished=False),
        {"event": "warning", "time": BEGAN, "message": "m"},
        {"event": "skip", "time": BEGAN, "step": 38, "where": [{"file": "f", "offsets": [16, "o"]}]},
        {"event": "spike", "time": BEGAN, "step": 39, "where": [{"file": "f", "offsets": [16, "o"]}]},
        {"event": "save_failed", "time": BEGAN, "step": 40, "message": "m"},
        checkpoint(40, BEGAN),
        {"event": "rollback", "time": BEGAN, "step": 40, "to": 40, "message": "m"},
        {"event": "stop", "time": BEGAN, "step": 40, "reason": "r"},
        start(resumed_from=40),
        step(41, BEGAN + 50),
    ]
    events = [{**poison(event), "event": event["event"]} for event in kinds]
    for event in events:
        if event["event"] == "start":
            event["config"][HOSTILE] = {HOSTILE: HOSTILE}
    return events
