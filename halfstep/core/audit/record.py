"""What was seen of a training, whatever the framework: collectors fill a `Record`, rules read it.

A collector writes down facts and judges nothing: a field that it could not see keeps its default, and `unseen`
says why. Formats are names such as `bf16` and `fp32`; other dtypes keep their own name (`int8`, `float64`).
Places are `file:line` in the code of the user. Everything is plain data, so that a record travels between
processes as JSON.
"""

import math
import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Source = Literal["script", "run", "checkpoint", "recipe", "factory", "jax", "mlx", "prepared"]
WeightKind = Literal["matrix", "embedding", "norm", "bias", "router", "adapter", "other"]
BufferKind = Literal["rope", "running", "other"]
OperationKind = Literal[
    "norm", "softmax", "router", "loss", "matmul", "attention", "accumulation", "reduction", "positions", "other"
]
CallKind = Literal[
    "scale", "unscale", "clip", "step", "update", "zero", "schedule", "backward", "autocast", "reduce", "load",
    "replace",
]  # fmt: skip
BY_HAND = "the script"  # the target of a `scale` call that no loss scaler makes


@dataclass(slots=True)
class UpdateCounts:
    """What happened to the updates of one tensor; every count is over elements and steps together."""

    steps: int = 0  # of the optimizer; those that the loss scaler or the loop skipped are left out
    elements: int = 0  # looked at; of a large tensor a part stands for all
    intended: int = 0  # updates that are not zero, by the optimizer's own formula in fp64
    lost: int = 0  # of those: the stored value is the one from before the step
    decay_intended: int = 0  # weight decays that are not zero
    decay_lost: int = 0  # of those: the decay alone would leave the stored value unchanged
    arrived_sum: float = 0.0  # sum of actual * intended
    intended_sum: float = 0.0  # sum of intended squared
    gradient: int = 0  # elements with a nonzero gradient
    moved: bool = False  # whether any element ever differed from its first value
    exact: bool = True  # False: an unknown optimizer, so `intended` counts elements with a nonzero gradient

    @property
    def applied_fraction(self) -> float | None:
        """The share of the intended update that arrived; None if nothing was intended, or that is not known."""
        return self.arrived_sum / self.intended_sum if self.exact and self.intended_sum else None

    def merge(self, other: "UpdateCounts") -> "UpdateCounts":
        """Returns the counts of both."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[:-2]}
        return UpdateCounts(**sums, moved=self.moved or other.moved, exact=self.exact and other.exact)


@dataclass(slots=True)
class Weight:
    """One parameter."""

    name: str
    format: str  # of the values that the model computes with
    trainable: bool = True
    kind: WeightKind = "other"
    optimizer: str | None = None  # the class of the optimizer that steps it
    master: str | None = None  # the format that the optimizer really steps; None if that is `format`
    moments: dict[str, str] = field(default_factory=dict)  # by their name in the optimizer's state
    stochastic: bool = False  # updates are rounded stochastically or compensated: none is lost on average
    grad_format: str | None = None
    place: str | None = None
    updates: UpdateCounts | None = None
    counter: str | None = None  # the format in which its optimizer counts steps, if that is a tensor's

    @property
    def stepped(self) -> str:
        """The format that the optimizer adds its updates to."""
        return self.master or self.format


@dataclass(slots=True)
class Average:
    """A narrow tensor beside a weight that is written to in every update, such as an EMA."""

    name: str  # of the weight
    format: str
    writes: int = 0
    behind: int = 0  # elements that are not the weight, rounded
    still: int = 0  # of those: none of the writes has ever changed the stored value


@dataclass(slots=True)
class Buffer:
    """A tensor of the model that is not trained."""

    name: str
    format: str
    kind: BufferKind = "other"


@dataclass(slots=True)
class Operation:
    """Calls of one kind that one module made."""

    module: str  # qualified name; empty if no module made the call
    kind: OperationKind
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    inside: str | None = None  # the format that it computes in
    count: int = 0
    amax: float | None = None
    overflow: int = 0  # elements beyond the largest number of the format, infinities included
    underflow: int = 0  # nonzero elements that the format turns into zero, or into one of its last 4 bits
    place: str | None = None
    promoted: bool = False  # an operand was silently widened to fp32
    backward: bool = False  # the numbers are of its gradient
    elements: int = 0  # looked at; 0 if only formats were seen, as in a compiled graph
    function: str = ""  # what was called, such as `log_softmax`; empty for a module
    rounded: int = 0  # of counted positions: those that the format does not have


@dataclass(slots=True)
class Call:
    """Something that the training loop did; the list of them is in order."""

    what: CallKind
    update: int = 0  # the optimizer steps that came before it
    target: str | None = None  # which optimizer, scaler or schedule; of a load, `weights` or `moments`
    skipped: bool = False
    place: str | None = None
    # of a load: weights `rounded` (fp32 here, narrower in the file), moments `narrowed` (to their weight's format)
    numbers: dict[str, float] = field(default_factory=dict)
    format: str | None = None  # of an autocast region, or of gradients that are reduced
    names: list[str] = field(default_factory=list)  # of the tensors it is about, the first few


@dataclass(slots=True)
class Sync:
    """A place that makes the host wait for the device."""

    place: str | None
    what: str = "item"
    per_step: float = 0.0


@dataclass(slots=True)
class StoredTensor:
    """What the numbers of one tensor in a file show."""

    name: str  # of a moment, that of its weight
    role: Literal["weight", "master", "moment", "step"]
    format: str
    kind: WeightKind = "other"
    moment: str = ""  # such as `exp_avg`
    elements: int = 0
    zeros: int = 0
    nonfinite: int = 0
    subnormal: int = 0
    saturated: int = 0  # at the largest finite number of the format
    constant: float | None = None  # the number that all of them are
    holds: str | None = None  # a narrower format that all of them fit, as after a cast
    changed: int | None = None  # how many differ from the file before, if there is one
    by_one: int = 0  # of those: by one step of their format
    partner: str = ""  # the tensor that this one must equal: the weight of a master, the embedding of a tied head
    differs: int = 0  # how many do not
    far: int = 0  # of those: by more than one step of the format


@dataclass(slots=True)
class CheckpointFacts:
    """What one checkpoint on disk holds."""

    path: str
    step: int | None = None
    weights: dict[str, str] = field(default_factory=dict)  # the format of each, by name
    masters: dict[str, str] = field(default_factory=dict)
    moments: dict[str, str] = field(default_factory=dict)  # by `parameter/moment`
    scaler: bool | None = None  # whether the state of a loss scaler is there; None: unseen, or none is needed
    policy: str | None = None  # of halfstep, if it wrote the checkpoint
    complete: bool = True
    problem: str | None = None  # why it is not complete
    tensors: list[StoredTensor] = field(default_factory=list)  # of the newest, if its numbers were read
    before: str | None = None  # what it was compared with
    declared: str | None = None  # the format that its config.json names


@dataclass(slots=True)
class Record:
    """Everything that one process, or one folder, showed."""

    source: Source
    framework: str = "torch"
    rank: int = 0
    updates: int = 0  # how many were watched
    weights: list[Weight] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    averages: list[Average] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    switches: dict[str, str | float | bool | None] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)  # as computed; None is a NaN or an infinity
    logged: list[float | None] = field(default_factory=list)  # as the framework showed them
    syncs: list[Sync] = field(default_factory=list)
    checkpoints: list[CheckpointFacts] = field(default_factory=list)  # oldest first
    policy: str | None = None  # of halfstep, if it trains
    unseen: list[str] = field(default_factory=list)  # what could not be seen, and why

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Record":
        """Returns the record of plain data; keys of a newer version are left out."""
        return from_plain(cls, data)

    def calls_of(self, *kinds: CallKind) -> list[Call]:
        """Returns the calls of some kinds, in order."""
        return [call for call in self.calls if call.what in kinds]


# float64 is wide; integers and booleans are not formats that training computes in.
_WIDE = {"fp32", "fp64", "float32", "float64", "double", "complex64", "complex128"}


def is_narrow(name: str | None) -> bool:
    """Returns whether numbers of a format have fewer bits than fp32: bf16, fp16, fp8, int8 of a moment."""
    return name is not None and name not in _WIDE


def group_calls(calls: Iterable[Call], by: Literal["target", "place"]) -> dict[str | None, list[Call]]:
    """Returns calls by the optimizer, scaler or schedule that they are about, or by the line that made them."""
    groups: dict[str | None, list[Call]] = {}
    for call in calls:
        groups.setdefault(getattr(call, by), []).append(call)
    return groups


def finite_or_none(value: Any) -> float | None:
    """Returns a loss as records hold it: None if it is not finite."""
    return number if math.isfinite(number := float(value)) else None


# Names of common models; a tensor that none fits is `other`, of which no rule asks anything special.
_ADAPTER = re.compile(r"lora|adapter|(^|\.)dora|ia3|prompt_encoder")
_ROUTER = re.compile(r"(^|[._])router([._]|$)")
_GATE = re.compile(r"(^|\.)(gate|gating)(\.|$)")  # of experts if it has few outputs; a SwiGLU's has many
_NORM = re.compile(r"norm|(^|\.)ln(_?\w+)?(\.|$)")
_EMBEDDING = re.compile(r"embed|(^|\.)wte(\.|$)|(^|\.)wpe(\.|$)")
_ROPE = re.compile(r"inv_freq|rope|rotary|freqs|(^|[._])(cos|sin)([._]|$)")
_RUNNING = re.compile(r"running_(mean|var)|num_batches")


def weight_kind(name: str, shape: Sequence[int], module: str = "") -> WeightKind:
    """Returns what a parameter is for, by its name, its shape and the class of the `module` that holds it."""
    lower, owner = name.lower(), module.lower()
    if _ADAPTER.search(lower):
        return "adapter"
    if "norm" in owner or (len(shape) < 2 and _NORM.search(lower)):
        return "norm"
    if "embedding" in owner or (len(shape) == 2 and _EMBEDDING.search(lower)):
        return "embedding"
    if lower.rpartition(".")[2].startswith("bias") or lower.endswith("_bias"):
        return "bias"
    few = len(shape) == 2 and 2 * shape[0] <= shape[1]
    if "router" in owner or _ROUTER.search(lower) or (few and _GATE.search(lower)):
        return "router"
    return "matrix" if len(shape) >= 2 else "other"


def buffer_kind(name: str) -> BufferKind:
    """Returns what a buffer is for, by its name."""
    lower = name.lower()
    if _ROPE.search(lower):
        return "rope"
    return "running" if _RUNNING.search(lower) else "other"


T = TypeVar("T")


def from_plain(kind: type[T], data: dict[str, Any]) -> T:
    """Returns a dataclass of plain data."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in data.items() if name in hints})


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return next((_value(each, value) for each in get_args(hint) if is_dataclass(each)), value)
    if origin is list:
        return [_value(get_args(hint)[0], each) for each in value]
    return from_plain(hint, value) if is_dataclass(hint) and isinstance(hint, type) else value
