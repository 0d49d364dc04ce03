"""`halfstep train` in processes that mlx.launch starts: one run, which one process may continue."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.mlx.parallel.ring import ROOT, log_of, start

pytestmark = pytest.mark.prove
SMALL = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=2"]
SMALL += ["training.micro_batches=2", "training.save_every=2", "training.validate_every=2"]
SMALL += ["training.validation_tokens=256", "training.measure_ceiling=false", "parallel.timeout=4"]
SMALL += ["training.warmup=0", "training.warmdown=0"]  # rates that do not depend on how many steps there are


def command(out, *extra):
    return [sys.executable, "-m", "halfstep", "train", "--out", str(out), *extra]


def settings(text, steps):
    given = [*SMALL, f"data.source={text}", f"training.steps={steps}"]
    words = [word for setting in given for word in ("--set", setting)]
    return ["tiny", "--backend", "mlx", "--policy", "bf16-mixed", *words]


def ended(tmp_path, ranks):
    """Returns the exit codes, and what each rank printed."""
    try:
        codes = [rank.wait(60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return codes, [log_of(tmp_path, rank).read_text() for rank in range(2)]


def weights(out, step):
    return (out / "checkpoints" / f"step-{step:06d}" / "state.safetensors").read_bytes()


def events(out, kind):
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def wait_for(out, count):
    """Waits for so many steps."""
    for _ in range(600):
        if (out / "events.jsonl").exists() and len(events(out, "step")) >= count:
            return
        time.sleep(0.05)
    raise AssertionError("no steps")


def test_two_ranks_write_the_run_of_one_process_which_continues_it(tmp_path, text):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = dict(os.environ, PYTHONPATH=str(ROOT))
    subprocess.run(command(one, *settings(text, 6)), env=alone, check=True, capture_output=True)
    codes, (printed, nothing) = ended(tmp_path, start(tmp_path, command(two, *settings(text, 4))))
    assert (codes, nothing) == ([0, 0], "")
    assert "2 processes, each with the whole state\n" in printed
    assert weights(two, 4) == weights(one, 4)
    subprocess.run(
        command(two, "--resume", "--set", "training.steps=6"), env=alone, check=True, capture_output=True
    )
    assert weights(two, 6) == weights(one, 6)
    names = ("loss", "grad_norm", "scale", "skipped", "tokens")
    steps = [[[event[name] for name in names] for event in events(out, "step")] for out in (one, two)]
    assert steps[0] == steps[1]
    losses = [[event["loss"] for event in events(out, "validation")] for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=8 * 2.0**-53)  # of 8 batches, added in another order


def test_a_signal_to_one_rank_stops_both_and_one_that_hangs_is_reported(tmp_path, text):
    out = tmp_path / "run"
    ranks = start(tmp_path, command(out, *settings(text, 100000)))
    wait_for(out, 3)
    ranks[1].send_signal(signal.SIGTERM)
    codes, (printed, _) = ended(tmp_path, ranks)
    assert codes == [0, 0]
    assert "stopped by SIGTERM" in printed
    ranks = start(tmp_path, command(out, "--resume"))
    wait_for(out, len(events(out, "step")) + 2)
    ranks[1].send_signal(signal.SIGSTOP)
    code = ranks[0].wait(30)
    ranks[1].kill()
    printed = ended(tmp_path, ranks)[1][0]
    assert code == 1
    assert "error: rank 0 has waited for 4 s at `" in printed
    assert "rank 1 did not arrive" in printed
