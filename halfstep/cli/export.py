"""`halfstep export`: a trained model in the files of other libraries, or in one small file of our own."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from halfstep.cli.arguments import AS_TRAINED, Json, OtherBackend, OtherPolicy, Source, Trained
from halfstep.cli.output import print_error, print_words
from halfstep.cli.trained import held_out_text, home_of, open_model, print_result
from halfstep.config.run import Backend
from halfstep.core.errors import OptionError
from halfstep.core.policy import Policy

FOLDER = "export"  # in the run's folder
TOKENS = 65_536  # of held-out text to score on
BLOCK = 32


def export(
    run: Trained,
    /,
    *,
    to: Literal["hf", "safetensors", "onnx", "int8", "int4", "int2", "artifact"],
    format: Literal["fp32", "bf16", "fp16"] | None = None,
    block: Literal[32, 64, 128] | None = None,
    allow: float | None = None,
    out: Path | None = None,
    tokens: int | None = None,
    limit: int | None = None,
    policy: str | None = None,
    backend: Backend | None = None,
    source: Source = AS_TRAINED,
    json: Json = False,
) -> int:
    """Write a trained model for other libraries, load it back, and keep it only if it scores like its source.

    `hf` is the layout of transformers with the tokenizer, for models that are a GPT-2 or a Qwen3; `safetensors`
    has our own names; `onnx` is for onnxruntime, and `int8` as well, with weights in int8 that it multiplies in
    int8. `int4` and `int2` are for it too: every weight matrix in 4 or 2 bits, with a scale for each block of
    inputs; embedding, norms and activations stay fp32. The same held-out tokens are predicted before and after,
    both in fp32. The exit code is 1 if the export is not kept.

    `artifact` is one small file that `eval`, `sample` and `train --init` read: matrices in int8 with a scale per
    row, the rest in fp16, compressed with zlib. It is kept whatever it scores, in the policy of the training or
    another; the exit code is 1 if it is larger than its limit.

    Parameters
    ----------
    to
        What to write.
    format
        The format of the weights; by default what the run's policy says under `export`. `onnx` is fp32, and
        `int8`, `int4`, `int2` and `artifact` are formats themselves: write `--to int4`.
    block
        How many inputs of a matrix share a scale in `int4` and `int2`; by default 32. Larger blocks make a smaller
        file, and lose more.
    allow
        How many more bits per byte `int8`, `int4` and `int2` may need than their source: 0.2 is 20 %. By default
        0.01 for `int8` and 0.02 for the others.
    out
        The folder to write; by default export/TO-FORMAT or export/int8 in the run folder. For `artifact` a file;
        by default model.int8z in the run folder. Replaces an older export, but nothing else.
    tokens
        How many held-out tokens to score on, at most the recipe's own number; by default 65,536. An artifact is
        scored on the recipe's own number.
    limit
        The most bytes an artifact may have; by default the recipe's limit. 0 means no limit.
    policy
        The precision to score an artifact in; by default, that of the training.
    backend
        The framework to score an artifact on; by default, that of the training.
    """
    from halfstep.tools.export import run as tool
    from halfstep.tools.export.folder import check_place
    from halfstep.tools.export.targets import TARGETS, check_packages
    from halfstep.training import memory
    from halfstep.training.data.load import run_tokenizer
    from halfstep.training.weights.artifact import is_artifact

    if to == "artifact":
        _refuse(to, format=format, tokens=tokens, block=block, allow=allow)
        scored_as: dict[str, Any] = {"policy": policy, "backend": backend, "source": source}
        return artifact(run, out=out, limit=limit, **scored_as, json=json)
    target = TARGETS[to]
    unread = {"limit": limit, "policy": policy, "backend": backend} | ({} if target.bits else {"block": block})
    _refuse(to, **unread, **({"format": format} if target.rounds_to else {"allow": allow}))
    tool.check_allowed(allow)
    tokens = TOKENS if tokens is None else tokens
    if tokens < 1:
        raise OptionError("--tokens must be 1 or more", hint="65,536 are enough")
    check_packages(to)
    home = run.parent if is_artifact(run) else home_of(run)
    if out is not None:
        check_place(out, home)
    trained = open_model(run, "fp32", target.backend, source)
    manifest = trained.saved.manifest
    fmt = tool.choose_format(to, format, Policy.parse(manifest["policy"]))
    place = out or home / FOLDER / (target.rounds_to or f"{to}-{fmt}")
    check_place(place, home)
    corpus = held_out_text(trained)
    known = manifest["data"]["bytes_per_token"] is not None
    tokenizer = run_tokenizer(trained.config.data.source, manifest["data"]) if known else None
    if tokenizer is None:
        print_words("note: which tokenizer made the run's tokens is unknown, so none is exported")
    print_words(f"writing `{place}`; evaluating on {trained.config.data.held_out}, before and after")
    with memory.convert_oom(trained.session.is_out_of_memory, lambda: memory.oom_while_scoring(trained.config)):
        asked: dict[str, Any] = {"tokens": tokens, "block": block or BLOCK, "allow": allow}
        result = tool.run(trained, corpus, tokenizer, to, fmt, place, print_words, device=source.device, **asked)
    print_result(trained, result.record(), json)
    if result.problem:
        print_error(f"the export was not kept: {result.problem}", result.hint)
    return 1 if result.problem else 0


def artifact(
    run: Trained,
    /,
    *,
    out: Path | None = None,
    limit: int | None = None,
    policy: OtherPolicy = None,
    backend: OtherBackend = None,
    source: Source = AS_TRAINED,
    json: Json = False,
) -> int:
    """The same as `halfstep export --to artifact`, under its older name.

    Compresses a trained model with int8 and zlib, reads it back, and measures what that cost. Matrices are stored
    in int8 with a scale per row, the rest in fp16. The same held-out tokens are predicted before and after. The
    exit code is 1 if the file is larger than its limit.

    Parameters
    ----------
    out
        The file to write; by default model.int8z in the run folder. Replaces an older artifact, but no other
        file.
    limit
        The most bytes the file may have; by default the recipe's limit. 0 means no limit.
    """
    from halfstep.training import memory
    from halfstep.training.evaluation import evaluate as measure
    from halfstep.training.weights.artifact import NAME, check_place, describe_origin, is_artifact, masters, score

    if limit is not None and not 0 <= limit < 2**63:
        raise OptionError("--limit must be from 0 to 2^63 - 1 bytes", hint="0 means no limit")
    if is_artifact(run):
        raise OptionError(f"`{run}` is an artifact already", hint="name the run that it is from")
    home = home_of(run)
    place = out or home / NAME
    check_place(place, home)
    trained = open_model(run, policy, backend, source)
    config, session, corpus = trained.config, trained.session, held_out_text(trained)
    if limit is not None:
        config = replace(config, artifact=replace(config.artifact, limit=limit))
    print_words(f"evaluating on {config.data.held_out}, before and after")
    with memory.convert_oom(session.is_out_of_memory, lambda: memory.oom_while_scoring(config)):
        before = measure(session, corpus, config)
        print_words(f"before: {before}")
        # From the checkpoint's own numbers: the session may hold them rounded, in the policy to evaluate in.
        weights_to_write = masters(trained.state, config.model, averaged=False)
        manifest = trained.saved.manifest
        origin = describe_origin(manifest, manifest["step"], trained.weights)
        result = score(session, corpus, config, place, before, weights_to_write, origin)
    print_result(trained, result.record(), json)
    return 1 if result.over else 0


def _refuse(to: str, **options: object) -> None:
    """Refuses options that are given and mean nothing for a target."""
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"--{name} {value}: `--to {to}` takes no --{name}", hint=f"leave --{name} out")
