"""Machine files: what a GPU has, how fast it is, and what was timed on it. Each number says where it is from.

`halfstep probe --save FILE` writes one for this machine, with the shapes of a recipe timed.
"""

import math
from dataclasses import dataclass
from typing import Literal

from halfstep.config import schema
from halfstep.config.load import packaged_names, parse_toml, read_packaged, read_text
from halfstep.core.devices import Device, Kind
from halfstep.core.errors import UnknownRecipeError, did_you_mean

NEAR = math.log(1.5)  # how far each size of a timed shape may be from another that it stands for


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matmuls by format, dense; 0 if there is no such format."""

    fp32: float = 0.0
    tf32: float = 0.0
    bf16: float = 0.0
    fp16: float = 0.0
    e4m3: float = 0.0
    e4m3fnuz: float = 0.0


@dataclass(frozen=True)
class Reached:
    """Shares of a datasheet's numbers that programs attain, from and to; the defaults span what is reported."""

    matmul: tuple[float, float] = (0.5, 0.8)
    attention: tuple[float, float] = (0.25, 0.55)
    bandwidth: tuple[float, float] = (0.6, 0.9)
    wire: tuple[float, float] = (0.5, 0.85)


@dataclass(frozen=True)
class Timed:
    """A kernel that was timed; or the host, and its time for the operations of a pass or of an update."""

    kind: Literal["matmul", "attention", "bytes", "pass", "update"]
    format: str
    """Of matmuls and attention; of others, their names and dtypes; empty of a copy. Of the host: the policy."""
    shape: tuple[int, ...]
    """Matmul: rows, summed, columns. Attention: batch, heads, tokens, features. Host: how many operations."""
    seconds: float
    work: float
    """FLOPs, bytes, or the operations of the host."""


@dataclass(frozen=True)
class Machine:
    """A GPU and what connects it with others."""

    name: str
    kind: Kind
    memory: int
    """Bytes that a process can have."""
    bandwidth: float
    """Bytes of its memory per second."""
    rates: Rates
    """FLOP/s of matmuls."""
    capability: tuple[int, ...] = ()
    """NVIDIA's compute capability."""
    architecture: str = ""
    """AMD's gfx name; a CPU's."""
    context: int = 600_000_000
    """Bytes of its memory that the driver takes."""
    link: float = 0.0
    """Bytes per second, each way, between GPUs of one machine; 0 if there is one."""
    network: float = 0.0
    """Bytes per second, each way, of a GPU's share of the network."""
    gpus: int = 1
    """GPUs of one machine."""
    launch: tuple[float, float] = (4e-6, 16e-6)
    """Seconds that the host takes for an operation outside of compiled code, from and to."""
    reached: Reached = Reached()
    """The shares of the numbers above that programs attain."""
    timed: tuple[Timed, ...] = ()
    """What was timed here."""

    @property
    def hardware(self) -> Device:
        """The device, of which `supported` can be asked."""
        capability = (self.capability[0], self.capability[1]) if self.capability else None
        return Device(self.kind, self.name, capability=capability, architecture=self.architecture)

    def nearest(self, kind: str, format: str, shape: tuple[int, ...]) -> Timed | None:
        """Returns the timed kernel whose shape is nearest, if one is near enough."""
        alike = [t for t in self.timed if (t.kind, t.format, len(t.shape)) == (kind, format, len(shape))]
        far = {
            t: max((abs(math.log(a / b)) for a, b in zip(t.shape, shape, strict=True)), default=0.0) for t in alike
        }
        best = min(far, key=lambda t: far[t], default=None)
        return best if best is not None and far[best] <= NEAR else None


def machine_names() -> list[str]:
    """Returns the machine files that come with halfstep."""
    return packaged_names("machines")


def load_machine(name: str) -> Machine:
    """Returns a machine, given its name or a file."""
    if name.endswith(".toml"):
        return schema.build(Machine, parse_toml(read_text(name), name))
    if name not in (known := machine_names()):
        make = "on that machine `halfstep probe --save mine.toml` makes a file; then --gpu mine.toml"
        raise UnknownRecipeError(
            f"there is no machine file for `{name}`; there are {', '.join(known)}",
            hint=f"{meant} {make}" if (meant := did_you_mean(name, known)) else make,
        )
    return schema.build(Machine, read_packaged("machines", name))
