"""`halfstep export`: a trained model in the files of other libraries."""

from pathlib import Path
from typing import Literal

from halfstep.cli.arguments import Device, HeldOut, Json, MovedData, Trained, Weights
from halfstep.cli.output import print_words
from halfstep.cli.trained import held_out_text, home_of, open_model, print_result

FOLDER = "export"  # in the run's folder


def export(
    run: Trained,
    /,
    *,
    to: Literal["hf", "safetensors", "onnx", "int8"],
    format: Literal["fp32", "bf16", "fp16"] | None = None,
    out: Path | None = None,
    tokens: int = 65_536,
    weights: Weights = None,
    data: MovedData = None,
    validation: HeldOut = None,
    device: Device = None,
    json: Json = False,
) -> int:
    """Write a trained model for other libraries, load it back, and keep it only if it scores like its source.

    `hf` is the layout of transformers with the tokenizer, for models that are a GPT-2 or a Qwen3; `safetensors`
    has our own names; `onnx` is for onnxruntime, and `int8` as well, with weights in int8 that it multiplies in
    int8. The same held-out tokens are predicted before and after, both in fp32. The exit code is 1 if the export
    is not kept.

    Parameters
    ----------
    to
        What to write.
    format
        The format of the weights; by default what the run's policy says under `export`. `onnx` is fp32, and
        `int8` is a format itself.
    out
        The folder to write; by default export/TO-FORMAT or export/int8 in the run folder. Replaces an older
        export, but nothing else.
    tokens
        How many held-out tokens to score on, at most the recipe's own number.
    """
    from halfstep.core.errors import ConfigError
    from halfstep.core.policy import Policy
    from halfstep.tools.export import run as tool
    from halfstep.tools.export.folder import check_place
    from halfstep.tools.export.targets import TARGETS, check_packages
    from halfstep.training import memory
    from halfstep.training.data.held_out import run_tokenizer
    from halfstep.training.weights.artifact import is_artifact

    if tokens < 1:
        raise ConfigError("--tokens must be 1 or more", hint="65,536 are enough")
    check_packages(to)
    target, home = TARGETS[to], run.parent if is_artifact(run) else home_of(run)
    if out is not None:
        check_place(out, home)
    trained = open_model(run, device, data, validation, policy="fp32", backend=target.backend, weights=weights)
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
    with memory.convert_oom(trained.session.ran_out, lambda: memory.in_scoring(trained.config)):
        result = tool.run(trained, corpus, tokenizer, to, fmt, place, device=device, tokens=tokens)
    print_result(trained, result.record(), json)
    if result.problem:
        print_words(f"error: the export was not kept: {result.problem}")
    return 1 if result.problem else 0
