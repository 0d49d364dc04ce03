"""Which optimizer updates which parameter, at which rate, the same on every backend.

**AdamW** (Loshchilov and Hutter), with g the gradient, t the updates applied so far and decay decoupled:

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    w <- w - rate ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w)

**Muon** (Jordan et al.), for the matrices inside blocks if the recipe asks for it: the update is the momentum with
its singular values pushed to one by five Newton-Schulz steps X <- a X + (b A + c A^2) X, A = X X^T, times
sqrt(max(1, rows / columns)). The steps are the one part that is not fp32: they run in the policy's compute format,
emulated if the policy is.

Each of AdamW's kinds (embeddings, head, scalars, other matrices) may have its own rate; only matrices decay.
Parameters that are updated alike are one group: a recipe with one rate has two for AdamW, matrices first.
"""

from dataclasses import dataclass

from halfstep.config.model import ModelConfig, Shape, parameter_shapes
from halfstep.config.run import OptimizerConfig

ADAMW, MUON = ("exp_avg", "exp_avg_sq"), ("momentum",)  # m and v, and the momentum, in a checkpoint
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c of Jordan et al., 2024
_KINDS = {"embed": "embeddings", "positions": "embeddings", "lm_head": "head"}


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike."""

    names: tuple[str, ...]
    muon: bool
    rate: float
    weight_decay: float


def parameter_groups(model: ModelConfig, config: OptimizerConfig) -> list[Group]:
    """Returns the groups: Muon's first, then matrices, then the rest."""
    groups: dict[tuple[bool, bool, float, float], list[str]] = {}
    for name, shape in parameter_shapes(model).items():
        groups.setdefault(_settings(name, shape, config), []).append(name)
    # Sorting is stable: among the groups of one kind the order is that of the forward pass.
    ordered = sorted(groups.items(), key=lambda item: item[0][:2], reverse=True)
    return [Group(tuple(names), muon, rate, decay) for (muon, _, rate, decay), names in ordered]


def moments(model: ModelConfig, config: OptimizerConfig) -> dict[str, tuple[int, str, str]]:
    """Returns the group, parameter and kind of each moment, by its name in a checkpoint.

    `optimizer.0` is Muon if the recipe asks for it, and AdamW is the last. The groups are in no name, and neither
    is a count: all are the number of updates applied, which a checkpoint holds once.
    """
    named = {}
    for index, group in enumerate(parameter_groups(model, config)):
        place = int(config.name == "muon" and not group.muon)
        for parameter in group.names:
            for kind in MUON if group.muon else ADAMW:
                named[f"optimizer.{place}.{parameter}.{kind}"] = (index, parameter, kind)
    return named


def _settings(name: str, shape: Shape, config: OptimizerConfig) -> tuple[bool, bool, float, float]:
    """Returns whether Muon updates a parameter, whether it is a matrix, its rate and its decay."""
    if not (name.endswith(".weight") and len(shape) == 2):
        return False, False, config.scalar_rate or config.rate, 0.0
    if name.startswith("blocks.") and config.name == "muon":
        return True, True, config.muon_rate, config.muon_weight_decay
    own = {"embed": config.embedding_rate, "positions": config.embedding_rate, "lm_head": config.head_rate}
    return False, True, own.get(name.partition(".")[0], 0.0) or config.rate, config.weight_decay


def rates_by_kind(model: ModelConfig, config: OptimizerConfig) -> dict[str, tuple[str, float]]:
    """Returns the optimizer and the learning rate of each kind of parameter that the model has."""
    kinds: dict[str, tuple[str, float]] = {}
    for name, shape in parameter_shapes(model).items():
        muon, is_matrix, rate, _ = _settings(name, shape, config)
        kind = _KINDS.get(name.partition(".")[0], "matrices in blocks") if is_matrix else "gains and biases"
        kinds[kind] = ("Muon" if muon else "AdamW", rate)
    return kinds
