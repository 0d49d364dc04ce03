"""`halfstep train`, `halfstep eval` and `halfstep sample`: from a recipe to a run, and back from a run."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from halfstep.cli.output import Flag, print_json, print_table, print_words

RUNS = Path("runs")
Overrides = Annotated[tuple[str, ...], Parameter(name="--set", negative="", show_default=False)]


def train(
    recipe: str | None = None,
    /,
    *,
    policy: str | None = None,
    backend: Literal["torch", "jax", "mlx"] | None = None,
    device: str | None = None,
    overrides: Overrides = (),
    init: str | None = None,
    out: Path | None = None,
    resume: Flag = False,
    json: Flag = False,
) -> int:
    """Train a recipe, in a precision that is chosen by measurement unless you name one.

    A recipe is a name or a TOML file of your own; every setting of it can be changed by --set. The run
    folder holds its configuration, its events, its checkpoints and, at the end, a page to look at.

    Parameters
    ----------
    recipe
        tiny (the default: a byte-level model, two minutes on two CPU cores), gpt2, qwen3, or a file that ends in
        .toml.
    policy
        The precision: auto, a preset such as bf16-mixed, or more (`halfstep policy --help`).
    backend
        The framework.
    device
        Where to run, as the framework names it: cpu, cuda, cuda:1, mps.
    overrides
        A setting, as training.steps=100. May be repeated.
    init
        Start from these weights: a safetensors file, a folder in Hugging Face layout (for gpt2 and qwen3), or a
        run folder.
    out
        The run folder; runs/RECIPE-DATE-TIME without it.
    resume
        Go on with the run in --out, or with the newest one in runs/.
    json
        Print the outcome as JSON.
    """
    from halfstep.config.load import DEFAULT_RECIPE, load
    from halfstep.training import folder
    from halfstep.training.loop import Loop

    _check_init(init, resume)
    where = _run_folder(recipe, out, resume)
    named = [
        *([f"init={init}", "init_digest="] if init is not None else []),
        *overrides,
        *([f"policy={policy}"] if policy else []),
        *([f"backend={backend}"] if backend else []),
    ]
    # Where no recipe is named, a run that goes on knows its own.
    config = load(recipe or (str(where / folder.CONFIG) if resume else DEFAULT_RECIPE), named)
    resolved, choice, warnings = _resolve_policy(config, device, where if resume else None)
    print_words(f"{config.title or where.name}\nprecision {resolved}" + (f": {choice.reason}" if choice else ""))
    loop = Loop(config, resolved, where, choice=choice, resume=resume, device=device, warnings=warnings)
    if loop.pretrained is not None:
        print_words(f"weights {loop.pretrained.description}")
    print_words(f"data {loop.corpus.description}\nrun folder {where}")
    outcome = loop.run()
    page = _write_report(where / folder.EVENTS, where / folder.REPORT)
    _tell(outcome, page, json)
    return 0


def settings() -> str:
    """Every setting that --set takes, out of the schema."""
    from halfstep.config.run import RunConfig
    from halfstep.config.schema import rows

    lines = [f"{row.key} = {row.default!r}: {row.help}" for row in rows(RunConfig)]
    return "Settings, with their defaults where a recipe does not say otherwise:\n\n" + "\n\n".join(lines)


def evaluate(run: Path, /, *, policy: str | None = None, device: str | None = None, json: Flag = False) -> None:
    """Measure a checkpoint on held-out text, in the policy it was trained with or another.

    Parameters
    ----------
    run
        A run folder (its newest checkpoint), or a checkpoint's own folder.
    policy
        The precision to evaluate in; the one it was trained with unless named.
    device
        Where to run.
    json
        Print the data as JSON.
    """
    from halfstep.training.data import load_corpus
    from halfstep.training.evaluation import evaluate as measure

    config, session, manifest = _open_checkpoint(run, policy, device)
    corpus = load_corpus(config.data.source, config.data.validation, config.model.vocabulary)
    if corpus.digest != manifest["data"]["digest"]:
        print_words(f"warning: the data changed since the checkpoint; it was {manifest['data']['description']}")
    found = measure(session, corpus, config)
    result = {"step": manifest["step"], "policy": str(session.policy), **dataclasses.asdict(found)}
    if json:
        print_json(result)
    else:
        print_table(("", "value"), [(name.replace("_", " "), _shown(value)) for name, value in result.items()])


def sample(
    run: Path,
    /,
    *,
    prompt: str = "def ",
    length: int = 300,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    device: str | None = None,
) -> None:
    """Write text with a trained model.

    Parameters
    ----------
    run
        A run folder (its newest checkpoint), or a checkpoint's own folder.
    prompt
        What the text begins with.
    length
        How many tokens to add.
    temperature
        0 takes the likeliest token each time; 1 samples as the model believes.
    top_k
        Sample among this many tokens at most; 0 is all.
    seed
        The same seed writes the same text.
    device
        Where to run.
    """
    from halfstep.core.errors import ConfigError
    from halfstep.training.sampling import generate

    if not (length >= 1 and (temperature == 0 or 0.01 <= temperature <= 100) and top_k >= 0 and 0 <= seed < 2**63):
        raise ConfigError(
            f"--length {length}, --temperature {temperature}, --top-k {top_k} and --seed {seed}: length must be "
            "1 or more, temperature 0 or from 0.01 to 100, top-k 0 or more, and the seed a whole number from 0"
        )
    _, session, manifest = _open_checkpoint(run, None, device)
    if manifest["data"]["bytes_per_token"] != 1:
        raise ConfigError(
            "the model's tokens are not bytes, and only bytes can be written as text yet",
            hint="train on text, as the recipes do unless told otherwise",
        )
    start = list(prompt.encode(errors="surrogateescape")) or [10]
    sys.stdout.buffer.write(bytes(start))
    for token in generate(session, start, length, temperature, top_k, seed, alphabet=256):
        sys.stdout.buffer.write(bytes([token]))
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def _check_init(init: str | None, resume: bool) -> None:
    from halfstep.core.errors import ConfigError

    if init is not None and resume:
        raise ConfigError(
            "--init and --resume: a run that goes on has weights of its own, those of its newest checkpoint",
            hint=f"leave out --init to go on, or leave out --resume to start anew from `{init}`",
        )
    if init == "":
        raise ConfigError("--init is empty", hint="name a safetensors file, a folder that holds one, or a run")


def _run_folder(recipe: str | None, out: Path | None, resume: bool) -> Path:
    from halfstep.config.load import DEFAULT_RECIPE
    from halfstep.core.errors import ConfigError
    from halfstep.training import folder

    if out is not None:
        return out
    if not resume:
        return RUNS / f"{Path(recipe or DEFAULT_RECIPE).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    found = folder.newest(RUNS, Path(recipe).stem if recipe else "*")
    if found is None:
        raise ConfigError(f"there is no such run in {RUNS}/ to resume", hint="name its folder by --out")
    return found


def _resolve_policy(config: Any, device: str | None, resumed: Path | None) -> tuple[Any, Any, list[str]]:
    """The policy that runs, the measurement behind it if it was `auto`, and what to warn of."""
    from halfstep.core.policy import Policy, read
    from halfstep.tools.probe import resolve

    if resumed is not None and read(config.policy).base == "auto":
        # Measured when the run began; measuring again could choose another precision midway.
        return Policy.parse(_saved_policy(resumed)), None, []
    return resolve(config, device)


def _saved_policy(run: Path) -> str:
    from halfstep.core.errors import ConfigError
    from halfstep.training import checkpoint, folder

    found = checkpoint.latest(run / folder.CHECKPOINTS)
    if found is None:
        raise ConfigError(f"`{run}` holds no checkpoint to resume from", hint="start anew with --out")
    return str(checkpoint.read_manifest(found)["policy"])


def _open_checkpoint(run: Path, policy: str | None, device: str | None) -> tuple[Any, Any, dict[str, Any]]:
    from halfstep.config.run import RunConfig
    from halfstep.config.schema import build
    from halfstep.core.errors import ConfigError
    from halfstep.core.policy import Policy
    from halfstep.training import checkpoint, folder
    from halfstep.training.session import open_session

    found = run if run.name.startswith("step-") else checkpoint.latest(run / folder.CHECKPOINTS)
    if found is None or not found.exists():
        raise ConfigError(f"`{run}` holds no checkpoint", hint="name a run folder, as runs/tiny-...")
    arrays, manifest = checkpoint.load(found)
    config = build(RunConfig, manifest["config"])
    session = open_session(config, Policy.parse(policy or manifest["policy"]), device, train=False)
    session.load_weights({name: (a.dtype, a.shape, bytes(a.data)) for name, a in arrays.items()})
    return config, session, manifest


def _write_report(events: Path, page: Path) -> Path:
    from halfstep.report.page import write

    write(events, page)
    return page


def _tell(outcome: Any, page: Path, json: bool) -> None:
    held_out = outcome.held_out
    data = {
        "folder": str(outcome.folder),
        "step": outcome.step,
        "finished": outcome.finished,
        "seconds": outcome.seconds,
        "tokens_per_second": outcome.tokens_per_second,
        "validation_loss": held_out and held_out.loss,
        "bits_per_byte": held_out and held_out.bits_per_byte,
        "bigram_bits": held_out and held_out.bigram_bits,
        "ratio": held_out and held_out.ratio,
        "report": str(page),
    }
    if json:
        print_json(data)
        return
    rows = [
        (
            "trained",
            f"{outcome.step} steps in {outcome.seconds:.1f} s, {outcome.tokens_per_second:,.0f} tokens/s",
        ),
    ]
    if held_out is not None:
        rows.append(("held-out loss", f"{held_out.loss:.4f}"))
    if held_out is not None and held_out.ratio is not None:
        rows += [
            ("held-out bits per byte", f"{held_out.bits_per_byte:.4f}"),
            ("bigram entropy of the same text", f"{held_out.bigram_bits:.4f}"),
            ("ratio", f"{held_out.ratio:.3f}"),
        ]
    rows += [("page", str(page)), ("see what it learned", f"halfstep sample {outcome.folder}")]
    print_table(("", ""), rows)


def _shown(value: Any) -> str:
    return "unknown" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
