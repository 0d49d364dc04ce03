"""How far a step lies from the same step in fp32, beside what noise of its format does.

Of a layer, a is the gradient as the policy gives it and b the one in fp32; |.| are norms:

    cosine        a.b / (|a| |b|)
    norm_ratio    |a| / |b|
    sqnr          10 log10(|b|^2 / |a - b|^2), in dB; infinite if both are equal

**The noise band.** The fp32 step is run DRAWS times with every operand of every matmul moved by half an ulp of
the compute format, up or down at random: as far as rounding to nearest can move a number. So is every sum of
the residual stream. A policy that does no more than round these gives numbers like the draws. The band is the
prediction interval of one more draw (Student's t, DRAWS - 1 degrees of freedom), wide enough that all layers
and the loss together leave it by chance in one of a hundred shadows. Cosines are compared by the logarithm of
their distance from 1, norms by theirs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from halfstep.core.compare.gaps import t_quantile
from halfstep.core.rules import owner

DRAWS = 8
BY_CHANCE = 0.01  # the share of shadows in which something leaves the band although there is only noise
Range = tuple[float, float]


class Sums(NamedTuple):
    """Squared norms of a layer: |a|^2, |b|^2 and |a - b|^2, in double precision."""

    ours: float
    reference: float
    error: float

    @property
    def sqnr(self) -> float:
        """The signal to noise ratio in dB."""
        if not self.error:
            return math.inf
        return 10 * math.log10(self.reference / self.error) if self.reference else -math.inf

    @property
    def log_ratio(self) -> float:
        """The logarithm of |a| / |b|."""
        if self.ours == self.reference:
            return 0.0
        if not self.ours or not self.reference:
            return -math.inf if self.reference else math.inf
        return math.log(self.ours / self.reference) / 2

    @property
    def one_minus_cosine(self) -> float:
        """1 minus the cosine of both, without cancellation."""
        if not self.error:
            return 0.0
        a, b = math.sqrt(self.ours), math.sqrt(self.reference)
        return max(0.0, (self.error - (a - b) ** 2) / (2 * a * b)) if a and b else 1.0


class Pass(NamedTuple):
    """The loss of one pass, and the sums of each layer against the fp32 pass."""

    loss: float
    layers: dict[str, Sums]

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are."""
        return math.isfinite(self.loss) and all(math.isfinite(x) for sums in self.layers.values() for x in sums)


@dataclass(frozen=True)
class Band:
    """What noise does to the gradient of a layer."""

    cosine: float  # the lowest
    norm_ratio: Range
    sqnr: float  # the lowest, in dB

    @classmethod
    def of(cls, draws: Sequence[Sums], reach: float) -> "Band":
        """Returns the band around the mean of draws, `reach` of their standard deviations wide to each side."""
        farthest = _interval([math.log(max(d.one_minus_cosine, 1e-300)) for d in draws], reach)[1]
        low, high = _interval([d.log_ratio for d in draws], reach)
        lowest = _interval([d.sqnr for d in draws], reach)[0]
        return cls(max(-1.0, 1 - math.exp(min(farthest, 1.0))), (_exp(low), _exp(high)), lowest)

    def holds(self, sums: Sums) -> bool:
        """Whether a gradient lies inside."""
        ratio, (low, high) = _exp(sums.log_ratio), self.norm_ratio
        return 1 - sums.one_minus_cosine >= self.cosine and low <= ratio <= high and sums.sqnr >= self.sqnr


@dataclass(frozen=True)
class LayerShadow:
    """The gradient of one layer beside fp32's."""

    sums: Sums
    band: Band

    @property
    def cosine(self) -> float:
        """The cosine between both."""
        return 1 - self.sums.one_minus_cosine

    @property
    def norm_ratio(self) -> float:
        """Its norm over that in fp32."""
        return _exp(self.sums.log_ratio)

    @property
    def outside(self) -> bool:
        """Whether noise of the format does not explain it."""
        return not self.band.holds(self.sums)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers for an event."""
        band = {"cosine": self.band.cosine, "norm_ratio": [*self.band.norm_ratio], "sqnr": self.band.sqnr}
        ours = {"cosine": self.cosine, "norm_ratio": self.norm_ratio, "sqnr": self.sums.sqnr}
        return {**ours, "band": band, "outside": self.outside}


@dataclass(frozen=True)
class Shadow:
    """A step beside the same step in fp32. `print` shows it, layers outside of the band first."""

    loss: float
    reference: float  # the loss in fp32
    band: Range  # of the difference of the loss
    layers: dict[str, LayerShadow]  # empty if a pass was not finite
    noise: str  # the formats whose half ulps the noise is
    causes: tuple[str, ...] = ()  # modules that alone, the rest in fp32, lead outside
    casts: Mapping[str, str] = field(default_factory=dict)  # what modules cast in their own code, and not in fp32
    unwidened: Mapping[str, str] = field(default_factory=dict)  # why the fp32 pass is as narrow as the step there

    @property
    def difference(self) -> float:
        """The loss above that in fp32."""
        return self.loss - self.reference

    @property
    def finite(self) -> bool:
        """Whether there was anything to compare: a step that is not finite has no gradients."""
        return bool(self.layers)

    @property
    def loss_outside(self) -> bool:
        """Whether noise does not explain the difference of the loss."""
        return self.finite and not self.band[0] <= self.difference <= self.band[1]

    @property
    def outside(self) -> list[str]:
        """The layers outside, the farthest first."""
        return [name for name in self._order() if self.layers[name].outside]

    def _order(self) -> list[str]:
        def above(name: str) -> float:
            layer = self.layers[name]
            gap = layer.sums.sqnr - layer.band.sqnr
            return -math.inf if math.isnan(gap) else gap

        return sorted(self.layers, key=lambda name: (not self.layers[name].outside, above(name)))

    def describe(self) -> str:
        """Returns what is outside, in one sentence; empty if nothing is."""
        found = self.outside
        if not found and not self.loss_outside:
            return ""
        if self.causes:
            alone = "each of them alone" if len(self.causes) > 1 else "alone, with the rest in fp32,"
            own = "".join(f"; `{name}` {self.casts[name]}" for name in self.causes if name in self.casts)
            return f"{_list_names(self.causes)} {alone} changes gradients more than noise of {self.noise} does" + (
                f" ({len(found)} of {len(self.layers)} layers are affected){own}" if found else own
            )
        what = f"the gradients of {_list_names(found)}" if found else "the loss"
        differ = "differ" if found else "differs"
        return f"{what} {differ} from those in fp32 by more than noise of {self.noise} explains"

    def to_event(self) -> dict[str, Any]:
        """Returns the fields of an event."""
        numbers = {"loss": self.loss, "reference": self.reference, "difference": self.difference}
        layers = {name: layer.to_dict() for name, layer in self.layers.items()}
        rest = {"layers": layers, "noise": self.noise, "causes": list(self.causes)}
        own = {"casts": dict(self.casts), "unwidened": dict(self.unwidened)}
        return {**numbers, "band": [*self.band], **rest, **own}

    def __str__(self) -> str:
        if not self.finite:
            return "the step, or the same in fp32, is not finite: run.blame(loss_fn, batches) names the tensor"
        low, high = self.band
        where = "OUTSIDE" if self.loss_outside else "inside"
        lines = [
            f"loss {self.loss:.6g}, in fp32 {self.reference:.6g}: {self.difference:+.3g}, {where} of what noise "
            f"of {self.noise} does ({low:+.3g} to {high:+.3g})",
            self.describe() or f"the gradients of all {len(self.layers)} layers are inside",
            *(f"not widened in the fp32 pass: {_list_names([n])}: {why}" for n, why in self.unwidened.items()),
        ]
        width = max(map(len, [*self.layers, "layer"]))
        lines.append(f"{'layer':<{width}}  {'cosine':>10} {'lowest':>10}  {'norm':>8}  {'SQNR':>9} {'lowest':>9}")
        for name in self._order():
            layer = self.layers[name]
            lines.append(
                f"{name:<{width}}  {layer.cosine:>10.7f} {layer.band.cosine:>10.7f}  {layer.norm_ratio:>8.5f}  "
                f"{_decibels(layer.sums.sqnr)} {_decibels(layer.band.sqnr)}{'  OUTSIDE' if layer.outside else ''}"
            )
        return "\n".join(lines)


def compare_passes(ours: Pass, reference: float, draws: Sequence[Pass], noise: str) -> Shadow:
    """Returns a pass beside the fp32 one, whose loss is given, and noisy ones."""
    if not (ours.finite and math.isfinite(reference) and all(draw.finite for draw in draws)):
        return Shadow(ours.loss, reference, (-math.inf, math.inf), {}, noise)
    bounds = 4 * len(ours.layers) + 2  # cosine, sqnr and both ends of the norm of each; both ends of the loss
    reach = t_quantile(1 - BY_CHANCE / bounds, len(draws) - 1) * math.sqrt(1 + 1 / len(draws))
    layers = {
        name: LayerShadow(sums, Band.of([draw.layers[name] for draw in draws], reach))
        for name, sums in ours.layers.items()
    }
    band = _interval([draw.loss - reference for draw in draws], reach)
    return Shadow(ours.loss, reference, band, layers, noise)


def _interval(values: Sequence[float], reach: float) -> Range:
    """Returns the mean of draws, less and plus `reach` of their standard deviations."""
    if not all(map(math.isfinite, values)):  # equal gradients, or none: as far as draws go
        return min(values), max(values)
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return mean - reach * spread, mean + reach * spread


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


def _decibels(value: float) -> str:
    return f"{'equal':>9}" if value == math.inf else f"{value:>6.1f} dB"


def _list_names(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(f"`{name}`" if name else "the model's own code" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def sum_by_layer(parts: Mapping[str, Sums]) -> dict[str, Sums]:
    """Returns the sums of layers from those of their parameters."""
    layers: dict[str, Sums] = {}
    for name, part in parts.items():
        known = layers.get(owner(name), Sums(0.0, 0.0, 0.0))
        layers[owner(name)] = Sums(*(a + b for a, b in zip(known, part, strict=True)))
    return layers
