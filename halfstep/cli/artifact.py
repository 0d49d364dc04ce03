"""`halfstep artifact`: a trained model in int8 and zlib, loaded back and scored."""

import os
from pathlib import Path
from typing import Literal

from halfstep.cli.output import Flag, Place, print_json, print_table, print_words
from halfstep.cli.train import is_checkpoint, kept, open_checkpoint


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
    """Write a trained model in as few bytes as int8 and zlib give, read it back, and measure what that cost.

    Matrices are held in int8 with a scale a row, the rest in fp16. The same held-out tokens are predicted before
    and after. The exit code is 1 if the file is larger than its limit.

    Parameters
    ----------
    run
        A run folder (its newest checkpoint), or a checkpoint's own folder.
    out
        The file to write; model.int8z in the run folder without it. An older artifact is replaced, and nothing
        else is.
    limit
        Bytes the file may have; the recipe's limit unless named. 0 is no limit.
    policy
        The precision to evaluate in; the one it was trained with unless named.
    weights
        `model` for the weights as they were last updated, `ema` for their moving average; the average unless
        named, if the run kept one.
    data
        Where the data is now, if it moved; else data.source of the run.
    device
        Where to run.
    json
        Print the data as JSON.
    """
    from dataclasses import replace

    from halfstep.core.errors import ConfigError
    from halfstep.training import memory
    from halfstep.training.data.load import load_corpus
    from halfstep.training.evaluation import evaluate
    from halfstep.training.weights.artifact import NAME, check_place, masters, score

    if limit is not None and limit < 0:
        raise ConfigError(f"--limit {limit}: a number of bytes is not negative", hint="0 is no limit")
    home = _home(run)
    place = out or home / NAME
    check_place(place, home)
    config, session, manifest, state = open_checkpoint(run, policy, device, weights, data)
    if limit is not None:
        config = replace(config, artifact=replace(config.artifact, limit=limit))
    corpus = load_corpus(config.data.source, config.data.validation, config.model.vocabulary)
    if corpus.digest != manifest["data"]["digest"]:
        print_words(f"warning: the data changed since the checkpoint; it was {manifest['data']['description']}")
    with memory.told(session.ran_out, lambda: memory.in_scoring(config)):
        before = evaluate(session, corpus, config)
        # Of the checkpoint's own numbers: the session may hold them rounded, in the policy to evaluate in.
        found = score(session, corpus, config, place, before, masters(state, config.model, averaged=False))
    told = {
        "step": manifest["step"],
        "policy": str(session.policy),
        "weights": weights or kept(config),
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

    here = Path(os.path.abspath(run))  # of `.` too; a folder of checkpoints that is a link stays in its run
    if not is_checkpoint(run):
        return run
    return here.parent.parent if here.parent.name == paths.CHECKPOINTS else here.parent


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
