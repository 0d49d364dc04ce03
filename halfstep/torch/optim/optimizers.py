"""The optimizers of a recipe."""

from typing import Any

from halfstep.config.groups import parameter_groups
from halfstep.config.run import OptimizerConfig
from halfstep.torch.model import Decoder
from halfstep.torch.optim.adamw import AdamW, Optimizer
from halfstep.torch.optim.muon import Muon


def build_optimizers(model: Decoder, config: OptimizerConfig) -> list[Optimizer]:
    """Builds Muon for the matrices in blocks if the recipe says so, and AdamW for the rest, in its groups."""
    named, built = dict(model.named_parameters()), list[Optimizer]()
    adam: list[dict[str, Any]] = []
    for group in parameter_groups(model.config, config):
        pairs = [(name, named[name]) for name in group.names]
        if group.muon:
            built.append(Muon(pairs, group.rate, config.muon_momentum, group.weight_decay))
        else:
            adam.append({"params": pairs, "lr": group.rate, "weight_decay": group.weight_decay})
    built.append(AdamW(adam, lr=config.rate, betas=config.betas, eps=config.epsilon))
    return built
