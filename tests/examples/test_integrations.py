"""The scripts of docs/integrations.md: each is the framework's own script but for the lines of its diff."""

import re
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.accelerate_state import fresh_accelerate, reset  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"```diff\n# (\S+)\n(.*?)```", PAGE, flags=re.S))
# The formats' relative precision: a few products, whose operands were rounded.
BOUNDS = {"fp32": 2.0**-18, "bf16-mixed": 2.0**-6, "fp16-mixed": 2.0**-9}
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
        text = text.replace('policy="bf16-mixed"', f'policy="{policy}"')
    names = {"__name__": "example", "__file__": str(ROOT / path)}
    exec(compile(text, path, "exec"), names)
    return names["main"]([str(argument) for argument in arguments], **changes)


def trainer_arguments(folder, *more):
    common = "--report_to none --use_cpu --disable_tqdm True --logging_steps 1 --learning_rate 3e-3"
    return ["--output_dir", folder, *common.split(), "--per_device_train_batch_size", 8, *more]


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
def test_the_loop_of_accelerate_is_killed_and_resumed_bit_for_bit(tmp_path, capsys):
    small = {"examples": 64, "num_epochs": 2}
    whole, _ = run(ported(NLP), NLP, "--cpu", policy="fp16-mixed", **small)
    saved, _ = run(ported(NLP), NLP, "--cpu", "--output_dir", tmp_path, policy="fp16-mixed", **small)
    torch.manual_seed(9)
    resumed, _ = run(
        ported(NLP), NLP, "--cpu", "--resume_from_checkpoint", tmp_path / "epoch_0", policy="fp16-mixed", **small
    )
    assert saved == whole
    assert resumed == whole[len(whole) // 2 :]
    assert "epoch 1" in capsys.readouterr().out


@pytest.mark.prove
@pytest.mark.parametrize("policy", BOUNDS)
def test_the_loop_of_accelerate_learns_as_in_fp32(policy):
    text = stock(NLP).replace('mixed_precision="bf16"', 'mixed_precision="no"')
    expected, _ = run(text, NLP, "--cpu", examples=64, num_epochs=1)
    given, _ = run(ported(NLP), NLP, "--cpu", policy=policy, examples=64, num_epochs=1)
    assert given == pytest.approx(expected, rel=BOUNDS[policy])


@pytest.mark.prove
@pytest.mark.parametrize("policy", BOUNDS)
@pytest.mark.parametrize("path", [CLASSIFY, CAUSAL])
def test_trainer_learns_as_in_fp32_and_resumes_bit_for_bit(path, policy, tmp_path):
    given = trainer_arguments(tmp_path / "stock", "--max_steps", 8, "--gradient_accumulation_steps", 2)
    expected = run(stock(path), path, *given)
    given[1] = tmp_path / "ours"
    ours = run(ported(path), path, *given, "--save_steps", 5, policy=policy)
    assert losses(ours)[0] == pytest.approx(losses(expected)[0], rel=BOUNDS[policy])
    assert losses(ours) == pytest.approx(losses(expected), rel=4 * BOUNDS[policy])
    torch.manual_seed(9)
    resumed = run(
        ported(path), path, *given, "--resume_from_checkpoint", tmp_path / "ours" / "checkpoint-5", policy=policy
    )
    assert losses(resumed)[-3:] == losses(ours)[-3:]
    weights, others = ours.run.weights(), resumed.run.weights()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.prove
@pytest.mark.parametrize("path", [CLASSIFY, CAUSAL])
def test_stock_scripts_run_with_the_setting_that_the_diff_drops(path, tmp_path):
    trainer = run(stock(path), path, *trainer_arguments(tmp_path, "--max_steps", 1, "--bf16"))
    assert trainer.accelerator.mixed_precision == "bf16"
    assert "halfstep" not in type(trainer).__module__


@pytest.mark.prove
def test_the_stock_loop_runs_with_the_setting_that_the_diff_drops():
    run(stock(NLP), NLP, "--cpu", examples=32, num_epochs=1)
    assert AcceleratorState().mixed_precision == "bf16"
