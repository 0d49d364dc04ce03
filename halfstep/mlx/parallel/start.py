"""How processes begin: with the arrays of rank 0, and with the same settings."""

from typing import Any

from halfstep.mlx.apply import arrays
from halfstep.mlx.parallel.ranks import Ranks


def start_as_rank_0(run: Any, ranks: Ranks) -> None:
    """Takes the arrays of rank 0, and refuses processes that would not train as it does."""
    rates = [float(o.state["learning_rate"]) for o in run.optimizers if "learning_rate" in o.state]
    settings = {"policy": str(run.policy), "clip_norm": float(run.clip_norm), "seed": int(run.masters.seed)}
    trained = list(run.conversion.places)
    ranks.agree("the start", **settings, learning_rate=rates, trained_arrays=trained)
    places = arrays(run.model)
    first = ranks.from_rank_0("the first weights", {name: place.array for name, place in places.items()})
    for name, place in places.items():
        place.put(first[name])
    run.masters.remainders |= ranks.from_rank_0("the first weights", run.masters.remainders)
    run.masters.note_writes()
