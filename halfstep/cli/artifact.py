"""`halfstep artifact`: writes a trained model in int8 and zlib, reads it back, and evaluates it."""

import os
from pathlib import Path
from typing import Literal

from halfstep.cli.output import Flag, Place, print_json, print_table
from halfstep.cli.train import warn_of_other_data


def artifact(
    run: Place,
    /,
    *,
    out: Place | None = None,
    limit: int | None = None,
    policy: str | None = None,
    weights: Literal["model", "ema"] | None = None,
    data: str | None = None,
    device: str | None = None,
    json: Flag = False,
) -> int:
    """Compress a trained model with int8 and zlib, read it back, and measure what that cost.

    Matrices are stored in int8 with a scale per row, the rest in fp16. The same held-out tokens are predicted
    before and after. The exit code is 1 if the file is larger than its limit.

    Parameters
    ----------
    run
        A run folder, for its newest checkpoint, or the folder of a checkpoint.
    out
        The file to write; by default model.int8z in the run folder. Replaces an older artifact, but no other
        file.
    limit
        The most bytes the file may have; by default the recipe's limit. 0 means no limit.
    policy
        The precision to evaluate in; by default, that of the training.
    weights
        `model` for the latest weights, `ema` for their moving average; by default the average, if the run kept
        one.
    data
        Where the data is now, if it moved since the run.
    device
        The device to run on.
    json
        Print the data as JSON.
    """
    from dataclasses import replace

    from halfstep.core.errors import ConfigError
    from halfstep.training import memory
    from halfstep.training.data.load import load_corpus
    from halfstep.training.evaluation import evaluate
    from halfstep.training.run.resume import open_trained
    from halfstep.training.weights.artifact import NAME, check_place, masters, score

    if limit is not None and limit < 0:
        raise ConfigError(f"--limit {limit}: it must be 0 or more bytes", hint="0 means no limit")
    home = _home(run)
    place = out or home / NAME
    check_place(place, home)
    trained = open_trained(run, policy=policy, device=device, weights=weights, data=data)
    config, session, manifest = trained.config, trained.session, trained.saved.manifest
    if limit is not None:
        config = replace(config, artifact=replace(config.artifact, limit=limit))
    corpus = load_corpus(config.data.source, config.data.validation, config.model.vocabulary)
    warn_of_other_data(corpus, manifest)
    with memory.convert_oom(session.ran_out, lambda: memory.in_scoring(config)):
        before = evaluate(session, corpus, config)
        # Of the checkpoint's own numbers: the session may hold them rounded, in the policy to evaluate in.
        found = score(session, corpus, config, place, before, masters(trained.state, config.model, averaged=False))
    told = {
        "step": manifest["step"],
        "policy": str(session.policy),
        "weights": trained.weights,
        **found.record(),
    }
    if json:
        print_json(told)
    else:
        rows = [(name.replace("_", " "), _shown(value)) for name, value in told.items()]
        print_table(("", "value"), rows)
    return 1 if found.over else 0


def _home(run: Path) -> Path:
    """The run folder, also of a checkpoint in it; of one that lies elsewhere, the folder beside it."""
    from halfstep.training import paths
    from halfstep.training.checkpoints import checkpoint

    here = Path(os.path.abspath(run))  # of `.` too; a folder of checkpoints that is a link stays in its run
    if not checkpoint.is_checkpoint(run):
        return run
    return here.parent.parent if here.parent.name == paths.CHECKPOINTS else here.parent


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
