"""`halfstep probe --save`: a machine file of this machine, with the shapes of a recipe timed."""

import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from halfstep.config.machines import Machine, Rates, Reached, Timed
from halfstep.config.run import RunConfig
from halfstep.core.errors import OptionError
from halfstep.core.formats import parse
from halfstep.core.policy import Policy

# The policies under which a recipe is timed, and the formats that they multiply.
POLICIES = {"fp32": "fp32", "bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8-mixed": "e4m3"}
STEPS = 10
NOTE = """# Written by `halfstep probe --save` on {name}, torch {version}: timed here, at the shapes of `{title}`.
# `link` and `network` are the bytes per second, each way, to GPUs of this machine and of others: they were not
# timed, and a plan for several GPUs needs them. `context` is assumed.
"""


def save(path: Path, config: RunConfig, device: str | None) -> Machine:
    """Times the matmuls and attention of a recipe under the usual policies, and writes a machine file."""
    import tomli_w

    from halfstep.torch.measure import devices, version

    if path.exists():
        raise OptionError(f"`{path}` exists", hint="name another file, or delete it")
    if path.suffix != ".toml":
        raise OptionError(f"`{path}` is not the name of a TOML file", hint="such as mine.toml")
    device = device or devices()[0]
    machine = measure_machine(config, device)
    table = asdict(machine)
    table["timed"] = [{**each, "shape": list(each["shape"])} for each in table["timed"]]
    table = {key: value for key, value in table.items() if value != ()}
    text = NOTE.format(name=machine.name, version=version(), title=config.title or "a recipe")
    path.write_text(text + tomli_w.dumps(table), encoding="utf-8")
    return machine


def measure_machine(config: RunConfig, device: str) -> Machine:
    """Returns this machine."""
    from halfstep.torch.instruments.planning.step import trace_recipe
    from halfstep.torch.instruments.planning.timing import time_work
    from halfstep.torch.numerics import memory
    from halfstep.torch.numerics.dtypes import as_device, describe

    hardware = describe(device)
    training = replace(config.training, compile=False, micro_batches=1)
    work = [
        item
        for policy in _policies(device)
        for item in trace_recipe(replace(config, training=training), policy, hardware).work
    ]
    host = [timed for policy in _on_host(device) for timed in _host(config, policy, device)]
    taken = time_work(work, device)
    launch = [t.seconds / t.work for t in host if t.kind == "pass"]
    best: dict[str, float] = {}
    for each in taken:
        if each.kind == "matmul":
            best[each.format] = max(best.get(each.format, 0.0), each.work / each.seconds)
    copied = next(each for each in taken if each.kind == "bytes" and not each.format)
    known = {name: rate for name, rate in best.items() if name in Rates.__dataclass_fields__}
    return Machine(
        hardware.name,
        hardware.kind,
        memory.capacity(as_device(device)) or 0,
        copied.work / copied.seconds,
        Rates(**known),
        capability=hardware.capability or (),
        architecture=hardware.architecture,
        context=0 if hardware.kind == "cpu" else Machine.context,
        launch=(min(launch) / 2, max(launch)) if launch else Machine.launch,  # third-party code may be simpler
        reached=Reached(matmul=(0.5, 1.0), bandwidth=(0.6, 1.0)),  # of what was reached here
        timed=(*taken, *host),
    )


def _host(config: RunConfig, policy: Policy, device: str) -> list[Timed]:
    """Times what the host takes for a pass and for an update, in steps so small that it is the limit."""
    from halfstep.torch.instruments.planning.step import force_measured, trace_recipe
    from halfstep.torch.numerics.dtypes import describe
    from halfstep.training.session import open_session

    policy = force_measured(policy)
    training = replace(config.training, compile=False, micro_batches=1, batch=1)
    small = replace(config, training=training, model=replace(config.model, context=min(64, config.model.context)))
    work = trace_recipe(small, policy, describe(device)).work
    operations = {"update": sum(item.phase == "update" for item in work)}
    operations["pass"] = len(work) - operations["update"]
    session = open_session(small, policy, device)

    def seconds(passes: int) -> float:
        tokens = np.zeros((passes, 1, small.model.context + 1), np.int32)
        taken = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            float(session.step(tokens).loss)  # waits for the device
            taken.append(time.perf_counter() - begun)
        return min(taken[STEPS // 2 :])  # what else runs only adds

    one, three = seconds(1), seconds(3)
    took = {"pass": (three - one) / 2, "update": one - (three - one) / 2}
    return [
        Timed(kind, str(policy), (operations[kind],), took[kind], operations[kind]) for kind in ("pass", "update")
    ]


def _on_host(device: str) -> list[Policy]:
    """Returns the policies under which the host is timed: none where the host is the device."""
    from halfstep.torch.numerics.dtypes import describe

    return [] if describe(device).kind == "cpu" else _policies(device)


def _policies(device: str) -> list[Policy]:
    """Returns the policies whose formats this machine multiplies, and not slowly."""
    from halfstep.torch.numerics.dtypes import describe, supported

    if describe(device).kind == "cpu":
        return [Policy.parse("fp32")]
    return [Policy.parse(name) for name, fmt in POLICIES.items() if supported(parse(fmt), device)]
