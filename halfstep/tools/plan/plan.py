"""What a training needs: memory by role, bytes on the wire, arithmetic, time and money, for one policy.

A step is followed on the meta device (torch/instruments/planning), as one process of the job makes it; sharding is
counted on top, by what FSDP2 and DDP send and hold. Times come from a machine file: where nearly the same shapes
were timed a number, elsewhere a range.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from halfstep.config.machines import Machine
from halfstep.config.run import RunConfig
from halfstep.core.errors import ConfigFileError, SettingConflictError
from halfstep.core.policy import Policy

ROLES = ("weights", "masters", "gradients", "moments", "activations", "logits", "buffers", "workspace")
Range = tuple[float, float]
BUCKET = 2 * 4 * 2**23  # what DDP's side of halfstep averages at once, and its copy
MOST = 2**20  # sequences in a batch
GATHERED = 2  # blocks whose weights are whole at once under FSDP2: one computes, the next arrives


@dataclass(frozen=True)
class Plan:
    """The answer for one policy."""

    policy: str
    memory_bytes: dict[str, int]  # at the peak, by role
    reserved_bytes: int  # what the allocator takes, and the driver
    capacity_bytes: int
    batch: int  # sequences of a micro-batch in one process
    micro_batches: int  # of one process
    largest_batch: int  # sequences of a micro-batch that fit; 0 if none does
    sent_bytes: dict[str, int]  # by one GPU in an update
    flops: float  # of an update, of all GPUs
    seconds: Range  # of an update
    timed_share: float  # share of the arithmetic whose shapes were timed on that machine
    steps: int
    gpus: int
    price: float

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated at the peak: torch.cuda.max_memory_allocated."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether the device can hold it."""
        return self.reserved_bytes <= self.capacity_bytes

    @property
    def gpu_hours(self) -> Range:
        """Hours of all GPUs together, for the whole run."""
        low, high = (seconds * self.steps * self.gpus / 3600 for seconds in self.seconds)
        return low, high

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as data."""
        hours = self.gpu_hours
        price = [hour * self.price for hour in hours] if self.price else None
        derived = {"peak_bytes": self.peak_bytes, "fits": self.fits, "gpu_hours": hours, "price": price}
        return asdict(self) | derived


@dataclass(frozen=True)
class Job:
    """How a training is spread over GPUs."""

    gpus: int
    shard: str  # none, full or hybrid
    shards: int  # processes that share the state
    copies: int  # groups of them
    batch: int
    micro_batches: int


def spread(config: RunConfig, gpus: int, machine: Machine) -> Job:
    """Returns what each process of a job does; refuses one that cannot be divided."""
    training, shard = config.training, config.parallel.shard
    batch, micro = training.batch, training.micro_batches
    if micro % gpus == 0:
        micro //= gpus
    elif batch % gpus == 0:
        batch //= gpus
    else:
        raise SettingConflictError(
            f"{gpus} GPUs divide neither {micro} micro-batches nor a batch of {batch}",
            hint=f"such as `--set training.micro_batches={math.ceil(micro / gpus) * gpus}`",
        )
    local = min(gpus, machine.gpus)
    if shard == "hybrid" and (gpus % local or gpus == local):
        why = "are on one machine" if gpus == local else f"are not {local} on each machine"
        raise SettingConflictError(
            f'parallel.shard = "hybrid" shards within a machine and copies between them, and {gpus} GPUs {why}',
            hint=f"use --set parallel.shard=full; or --gpus {2 * machine.gpus}, of {machine.gpus} on a machine",
        )
    shards = {"none": 1, "full": gpus, "hybrid": local}[shard]
    return Job(gpus, shard, shards, gpus // shards, batch, micro)


def plan_recipe(config: RunConfig, policy: Policy, machine: Machine, gpus: int, price: float) -> Plan:
    """Plans a recipe under a policy."""
    from halfstep.torch.instruments.planning.step import trace_recipe

    job = spread(config, gpus, machine)
    own = replace(config.training, batch=job.batch, micro_batches=job.micro_batches)
    traced = trace_recipe(replace(config, training=own), policy, machine.hardware, alone=gpus == 1)
    return _plan(traced, policy, machine, job, config.training.steps, price, compiled=bool(own.compile))


def plan_factory(
    made: Callable[[], Any],
    policy: Policy,
    machine: Machine,
    gpus: int,
    price: float,
    *,
    compiled: bool,
    steps: int,
    memory: str = "fast",
) -> Plan:
    """Plans what a factory returns: each GPU takes a batch of its own, and DDP averages gradients."""
    from halfstep.torch.instruments.planning.step import trace_factory

    traced = trace_factory(made, policy, machine.hardware, compiled=compiled, memory=memory)
    job = Job(gpus, "none", 1, gpus, traced.batch, 1)
    kernels = tuple(timed for timed in machine.timed if timed.kind not in ("pass", "update"))
    machine = replace(machine, timed=kernels)  # the host was timed with our code, not with theirs
    return _plan(traced, policy, machine, job, steps, price, compiled=compiled)


def _plan(
    traced: Any, policy: Policy, machine: Machine, job: Job, steps: int, price: float, *, compiled: bool
) -> Plan:
    memory = _memory(traced, traced.ledger, job)
    reserved = _reserved(traced, traced.ledger, machine, job)
    scale = job.micro_batches / traced.micro_batches
    work = [(w, scale if w.phase != "update" else 1.0) for w in traced.work]
    flops = sum(w.flops * times for w, times in work)
    sent = _sent(traced.parameters, policy, job)
    computing, timed = _device_seconds(work, machine)
    host = _host_seconds(traced, policy, machine, 0 if compiled else job.micro_batches)
    computing = (max(computing[0], host[0]), max(computing[1], host[1]))
    wire = _wire_seconds(sent, machine, job)
    # At best everything is sent while it computes, at worst nothing is.
    seconds = (max(computing[0], wire[0]), computing[1] + wire[1])
    return Plan(
        str(policy), memory, reserved, machine.memory, job.batch, job.micro_batches,
        _largest(traced, machine, job), sent, flops * job.gpus, seconds, timed, steps, job.gpus, price,
    )  # fmt: skip


def _memory(traced: Any, ledger: Any, job: Job) -> dict[str, int]:
    found = ledger.by_role(traced.role)
    memory = {role: found.get(role, 0) for role in ROLES}
    if job.shards > 1:
        memory |= _memory_of_shards(traced.parameters, memory, job)
    elif job.gpus > 1:
        memory["buffers"] += BUCKET
    return memory


def _memory_of_shards(parameters: Any, memory: dict[str, int], job: Job) -> dict[str, int]:
    """Returns what FSDP2 holds: shares of masters, gradients and moments; casts; what is gathered for a block."""
    numbers = sum(math.prod(p.shape) for p in parameters)
    narrow = sum(math.prod(p.shape) * p.wire_bytes for p in parameters if p.wire_bytes < 4)
    blocks: dict[str, int] = {}
    for p in parameters:
        if ".".join(p.name.split(".")[:1]) == "blocks":
            key = ".".join(p.name.split(".")[:2])
            blocks[key] = blocks.get(key, 0) + math.prod(p.shape)
    most, outside = max(blocks.values(), default=0), numbers - sum(blocks.values())
    width = min((p.wire_bytes for p in parameters), default=4)
    gathered = (outside + GATHERED * most) * width
    return {
        "weights": narrow // job.shards + gathered,
        "masters": 4 * numbers // job.shards,
        "gradients": 4 * numbers // job.shards + 4 * (outside + most),
        "moments": memory["moments"] // job.shards,
    }


def _reserved(traced: Any, ledger: Any, machine: Machine, job: Job) -> int:
    """Returns what the device must have: what the allocator reserves for the step, and the driver's own."""
    alone = sum(ledger.by_role(traced.role).values())
    changed = sum(_memory(traced, ledger, job).values()) - alone
    return int(ledger.reserved() + changed + machine.context)


def _largest(traced: Any, machine: Machine, job: Job) -> int:
    """Returns the largest batch that fits; memory is nearly linear in it, so that few have to be tried."""

    def left(batch: int) -> int:
        return machine.memory - _reserved(traced, traced.with_batch(batch), machine, job)

    low, high, step, batch = 1, MOST, 1, MOST
    if (least := left(low)) < 0:
        return 0
    if (now := left(high)) >= 0:
        return high
    while high - low > 1:
        of_a_row = max(1, (least - now) // (batch - 1))
        guess = batch + now // of_a_row + (step if now >= 0 else 0)
        batch = guess if low < guess < high else (low + high) // 2
        now, step = left(batch), 2 * step
        low, high = (batch, high) if now >= 0 else (low, batch)
    return low


def _sent(parameters: Any, policy: Policy, job: Job) -> dict[str, int]:
    from halfstep.torch.parallel.sizes import block_traffic, gradient_traffic

    if job.gpus == 1:
        return {"weights": 0, "gradients": 0}
    sizes = [(p.name.startswith("blocks."), math.prod(p.shape), p.wire_bytes) for p in parameters]
    if job.shards == 1:
        sent = gradient_traffic(sum(n for _, n, _ in sizes), policy, job.gpus)
    else:
        inside, outside = ([(n, width) for here, n, width in sizes if here is part] for part in (True, False))
        sent = block_traffic(inside, outside, policy, job.shards, job.copies)
    return {"weights": (sent.forward + sent.backward) * job.micro_batches, "gradients": sent.gradients}


def _wire_seconds(sent: dict[str, int], machine: Machine, job: Job) -> Range:
    if not (total := sum(sent.values())):
        return 0.0, 0.0
    crosses = job.gpus > machine.gpus
    speed = (machine.network if crosses else machine.link) or machine.network
    if not speed:
        raise ConfigFileError(
            f"the machine file of {machine.name} does not say how fast GPUs exchange data",
            hint="write `link = ` and `network = `, in bytes per second, each way",
        )
    low, high = machine.reached.wire
    return total / (speed * high), total / (speed * low)


def _device_seconds(work: list[tuple[Any, float]], machine: Machine) -> tuple[Range, float]:
    """Returns the seconds of the device, and the share of the arithmetic that was timed there."""
    low = high = known = total = 0.0
    copied = next((t for t in machine.timed if t.kind == "bytes" and not t.format), None)
    for item, times in work:
        total += item.flops * times
        timed = machine.nearest(item.kind, item.format, item.shape) or (copied if item.kind == "bytes" else None)
        if timed is not None:
            amount = item.flops if item.kind != "bytes" else item.nbytes
            low, high = (end + times * timed.seconds * amount / timed.work for end in (low, high))
            known += item.flops * times
            continue
        rate = _rate(item, machine)
        shares = machine.reached.bandwidth if item.kind == "bytes" else getattr(machine.reached, item.kind)
        moved = item.nbytes / machine.bandwidth
        arithmetic = item.flops / rate if rate else 0.0
        bound = max(moved / machine.reached.bandwidth[1], arithmetic / shares[1])
        low, high = (
            low + times * bound,
            high + times * max(moved / machine.reached.bandwidth[0], arithmetic / shares[0]),
        )
    return (low, high), known / total if total else 0.0


def _host_seconds(traced: Any, policy: Policy, machine: Machine, passes: int) -> Range:
    """Returns the seconds of the host: what it took for nearly as many operations, or a range for each of them."""
    from halfstep.torch.instruments.planning.step import force_measured

    named = str(force_measured(policy))
    update = sum(w.phase == "update" for w in traced.work)
    each = (len(traced.work) - update) // traced.micro_batches
    low = high = 0.0
    for kind, operations, times in (("pass", each, passes), ("update", update, 1)):
        timed = machine.nearest(kind, named, (operations,)) if operations else None
        rates = machine.launch if timed is None else (timed.seconds / timed.work,) * 2
        low, high = (end + times * operations * rate for end, rate in zip((low, high), rates, strict=True))
    return low, high


def _rate(item: Any, machine: Machine) -> float:
    if item.kind == "bytes":
        return 0.0
    rate = float(getattr(machine.rates, item.format, 0.0))
    if item.format == "e4m3" and not rate:
        rate = machine.rates.e4m3fnuz
    if not rate:
        raise ConfigFileError(
            f"the machine file of {machine.name} has no rate for {item.format}",
            hint=f"choose a policy that does not multiply in {item.format}, or add it under [rates]",
        )
    return rate
