"""Which optimizer updates which parameter, at which rate, the same on every backend.

    Muon     the matrices inside blocks, if the recipe asks for it
    AdamW    embeddings, the output head, scalars (gains, biases, factors, mixes), and block matrices otherwise

Each of AdamW's kinds may have its own rate; only matrices decay. Parameters that are updated alike are one
group: a recipe with one rate has two groups for AdamW, matrices first.
"""

from dataclasses import dataclass

from halfstep.config.model import ModelConfig, Shape, parameter_shapes
from halfstep.config.run import OptimizerConfig


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


def _settings(name: str, shape: Shape, config: OptimizerConfig) -> tuple[bool, bool, float, float]:
    """Returns whether Muon updates it, whether it is a matrix, its rate and its decay."""
    if not (name.endswith(".weight") and len(shape) == 2):
        return False, False, config.scalar_rate or config.rate, 0.0
    if name.startswith("blocks.") and config.name == "muon":
        return True, True, config.muon_rate, config.muon_weight_decay
    own = {"embed": config.embedding_rate, "positions": config.embedding_rate, "lm_head": config.head_rate}
    return False, True, own.get(name.partition(".")[0], 0.0) or config.rate, config.weight_decay
