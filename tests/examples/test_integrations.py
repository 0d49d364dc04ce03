"""The scripts of docs/integrations.md: each is the framework's own script but for the lines of its diff."""

import os
import re
import signal
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path

import pytest
from safetensors import safe_open

from halfstep.integrations import state
from halfstep.integrations.accelerate import Accelerator
from tests.accelerate_state import fresh_accelerate, reset  # noqa: F401
from tests.processes import preload_integrations, run_alone

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"```diff\n# (\S+)\n(.*?)```", PAGE, flags=re.S))
# The formats' relative precision: a few products, whose operands were rounded.
BOUNDS = {"fp32": 2.0**-18, "bf16-mixed": 2.0**-6, "fp16-mixed": 2.0**-9}
SMALL = {"examples": 64, "num_epochs": 2}
NLP, CLASSIFY, CAUSAL = (
    f"examples/{n}.py" for n in ("accelerate_nlp", "trainer_text_classification", "trainer_causal_lm")
)


def hunks(path):
    for hunk in DIFFS[path].split("@@\n"):
        lines = hunk.splitlines()
        yield tuple("\n".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))


def ported(path):
    return (ROOT / path).read_text(encoding="utf-8")


def stock(path):
    """The script before its diff was applied."""
    text = ported(path)
    for old, new in hunks(path):
        assert text.count(new) == 1, new
        text = text.replace(new, old)
    return text


def run(text, path, *arguments, policy=None, **changes):
    """Runs a script in a fresh Accelerate; of a ported one, with a policy."""
    reset()
    if policy is not None:
        assert text.count('policy="bf16-mixed"') == 1
        text = text.replace('policy="bf16-mixed"', f'policy="{policy}", ema=0.9')
    names = {"__name__": "example", "__file__": str(ROOT / path)}
    exec(compile(text, path, "exec"), names)
    return names["main"]([str(argument) for argument in arguments], **changes)


def ported_losses(path, arguments, policy, changes, calls=None):
    """Runs a ported script and returns its losses; after so many backward passes it is killed by SIGKILL."""
    kept, count = Accelerator.backward, iter(range(calls or 1000))

    def backward(self, loss):
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        kept(self, loss)

    Accelerator.backward = backward
    returned = run(ported(path), path, *arguments, policy=policy, **changes)
    return returned[0] if path == NLP else losses(returned)


def learns_and_resumes(path, policy, folder, arguments, checkpoints, calls, expected, **changes):
    """Trains in one process; and in two, of which the first is killed in the middle of an update."""
    saved, last = checkpoints
    preload_integrations()
    arguments = [*map(str, arguments), "--output_dir", str(folder / "whole")]
    whole = run_alone(ported_losses, path, arguments, policy, changes)
    assert whole[0] == pytest.approx(expected[0], rel=BOUNDS[policy])
    assert whole == pytest.approx(expected, rel=4 * BOUNDS[policy])
    arguments[-1] = str(folder / "killed")
    with pytest.raises(BrokenProcessPool):
        run_alone(ported_losses, path, arguments, policy, changes, calls)
    arguments += ["--resume_from_checkpoint", str(folder / "killed" / saved)]
    resumed = run_alone(ported_losses, path, arguments, policy, changes)
    assert resumed[-len(whole) // 2 :] == whole[-len(whole) // 2 :]
    assert digest(folder / "whole" / last) == digest(folder / "killed" / last)


def trainer_arguments(*more):
    common = "--report_to none --use_cpu --disable_tqdm True --logging_steps 1 --learning_rate 3e-3 --max_steps 6"
    common += (
        " --gradient_accumulation_steps 2 --per_device_train_batch_size 8 --eval_strategy steps --eval_steps 2"
    )
    return [*common.split(), *more]


def digest(checkpoint):
    """The digest of everything the next step depends on: masters, moments, averages, scale, random state."""
    with safe_open(checkpoint / state.NAME, "pt") as file:
        return file.metadata()["digest"]


@pytest.fixture(scope="module")
def losses_in_fp32(tmp_path_factory):
    """The losses of a stock script in fp32."""

    @cache
    def of(path):
        if path == NLP:
            text = stock(path).replace('mixed_precision="bf16"', 'mixed_precision="no"')
            return run(text, path, "--cpu", **SMALL)[0]
        return losses(run(stock(path), path, *trainer_arguments("--output_dir", tmp_path_factory.mktemp("stock"))))

    return of


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("path", [NLP, CLASSIFY, CAUSAL])
def test_the_page_counts_the_changed_lines_of_a_script(path):
    package = "accelerate" if path == NLP else "transformers"
    added = sum(line.startswith("+") for line in DIFFS[path].splitlines())
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| [") and f"integrations.{package}`" in line]
    assert int(row.split("|")[2]) == added
    assert "halfstep" not in re.sub(r'""".*?"""', "", stock(path), flags=re.S)


@pytest.mark.prove
@pytest.mark.parametrize("policy", BOUNDS)
def test_the_loop_of_accelerate_learns_as_in_fp32_and_is_killed_and_resumed_bit_for_bit(
    policy, tmp_path, losses_in_fp32
):
    checkpoints, expected = ("epoch_0", "epoch_1"), losses_in_fp32(NLP)
    learns_and_resumes(NLP, policy, tmp_path, ["--cpu"], checkpoints, 5, expected, **SMALL)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("path", "policy"),
    [(CLASSIFY, "fp32"), (CAUSAL, "bf16-mixed"), (CLASSIFY, "fp16-mixed"), (CAUSAL, "fp16-mixed")],
)
def test_trainer_learns_as_in_fp32_and_is_killed_and_resumed_bit_for_bit(path, policy, tmp_path, losses_in_fp32):
    given, checkpoints = trainer_arguments("--save_steps", 3), ("checkpoint-3", "checkpoint-6")
    learns_and_resumes(path, policy, tmp_path, given, checkpoints, 7, losses_in_fp32(path))
