"""`halfstep audit -- COMMAND`: a user's script is watched, ended cleanly, and left as it is."""

import runpy
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from halfstep.core.audit.engine import check
from halfstep.core.audit.record import Record
from halfstep.core.errors import HalfstepError
from halfstep.tools.audit.script import run
from tests.processes import free_port, preload_integrations, run_alone

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = str(SCRIPTS / "plain.py")


def printed(output, word):
    """Returns what a script printed after a word."""
    return next(line.split()[1:] for line in output.splitlines() if line.startswith(word))


@pytest.mark.prove
def test_a_script_behind_a_launcher_ends_after_its_updates(capfd):
    command = f"export OMP_NUM_THREADS=1; {shlex.join([sys.executable, PLAIN])} 50"
    outcome = run(["bash", "-c", command], steps=3)
    (record,) = outcome.records
    assert outcome.exit_code == 0
    end = "was ended after 3 updates; what it has written until then is real"
    assert outcome.notes == (f"`{shlex.join(['bash', '-c', command])}` {end}",)
    assert (record.source, record.updates, record.rank) == ("script", 3, 0)
    assert len(printed(capfd.readouterr().out, "losses")) == 3  # its `finally` block ran
    assert check(record) == []


@pytest.mark.prove
def test_a_script_that_asks_whether_torch_is_there_before_it_imports_it_is_watched():
    """As packages do that are imported first, such as transformers and datasets."""
    asks = "import sys, importlib.util, runpy; importlib.util.find_spec('torch'); "
    asks += "runpy.run_path(sys.argv.pop(1), {}, '__main__')"
    (record,) = run([sys.executable, "-c", asks, PLAIN, "3"]).records
    assert record.updates == 3


def test_a_command_without_torch_and_one_without_python():
    assert run([sys.executable, "-c", "print(1)"]).notes == (
        "no process imported torch: only training on torch can be watched by a command",
    )
    outcome = run(["bash", "-c", "exit 3"])
    assert outcome.exit_code == 3
    assert outcome.records == ()
    assert outcome.notes[0] == "`bash -c 'exit 3'` failed with exit code 3, after 0 updates"
    assert "no Python was reached" in outcome.notes[1]
    assert "was killed by SIGKILL" in run(["bash", "-c", "kill -9 $$"]).notes[0]


@pytest.mark.parametrize(
    ("command", "steps", "message"),
    [
        ([], 20, "there is no command"),
        (["python", PLAIN], 0, "at least one update"),
        (["no-such-program"], 20, "cannot be run: No such file"),
        ([PLAIN], 20, "cannot be run: Permission denied"),
    ],
)
def test_what_cannot_run_is_refused(command, steps, message):
    with pytest.raises(HalfstepError, match=message) as error:
        run(command, steps)
    assert error.value.hint


def test_another_sitecustomize_runs_and_the_path_is_the_scripts_own(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text("print('own sitecustomize')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import sys; print('injected', any('inject' in entry for entry in sys.path))"
    run([sys.executable, "-c", code])
    assert capfd.readouterr().out.split("\n") == ["own sitecustomize", "injected False", ""]


@pytest.mark.prove
def test_a_python_that_has_torch_and_nothing_of_ours_is_watched(tmp_path, monkeypatch):
    ours = ("halfstep", "__editable__", "lazy_loader", "cyclopts", "safetensors", "rich", "docstring_parser")
    for each in Path(torch.__file__).parents[1].iterdir():
        if not each.name.startswith(ours):
            (tmp_path / each.name).symlink_to(each)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bare = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    assert subprocess.run([bare, "-c", "import lazy_loader"], capture_output=True).returncode
    outcome = run([bare, PLAIN, "3"])
    assert (outcome.exit_code, outcome.failures) == (0, ())
    assert [record.updates for record in outcome.records] == [3]


def test_a_process_that_outlives_the_audit_prints(tmp_path, capfd):
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    code = (
        "import pathlib, sys, time; begun, ended = map(pathlib.Path, sys.argv[1:]); begun.touch()\n"
        "while not ended.exists(): time.sleep(0.1)\n"
        "print('late')"
    )
    command = shlex.join([sys.executable, "-c", code, str(begun), str(ended)])
    run(["bash", "-c", f"{command} 2>&1 & until [ -e {shlex.quote(str(begun))} ]; do sleep 0.1; done"])
    ended.touch()
    give_up, printed = time.monotonic() + 60, ""
    while not printed and time.monotonic() < give_up:
        printed = capfd.readouterr().out
        time.sleep(0.1)
    assert printed == "late\n"


@pytest.mark.prove
def test_losses_keep_their_bits_at_no_more_than_half_as_much_time_again(monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, PLAIN, "40"]
    seconds: dict[str, list[float]] = {"plain": [], "watched": []}
    for _ in range(3):  # by turns: whatever else runs slows both
        plain = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout
        outcome = run(command, steps=200)
        watched = capfd.readouterr().out
        assert printed(watched, "losses") == printed(plain, "losses")
        assert "ended by itself, after 40 of 200 updates" in outcome.notes[0]
        seconds["plain"] += map(float, printed(plain, "seconds"))
        seconds["watched"] += map(float, printed(watched, "seconds"))
    assert min(seconds["watched"]) < 1.5 * min(seconds["plain"])


@pytest.mark.prove
def test_a_script_that_crashes_and_one_that_never_steps():
    crashed = run([sys.executable, PLAIN, "9", "crash"])
    assert crashed.exit_code == 1
    assert "failed with exit code 1, after 3 updates" in crashed.notes[0]
    assert "RuntimeError: out of cheese" in crashed.notes[0]
    assert crashed.records[0].updates == 3
    idle = run([sys.executable, PLAIN, "2", "never"])
    assert idle.notes == ("no update was seen: backward passes ran, and no torch.optim.Optimizer was stepped",)


@pytest.mark.prove
def test_a_fork_has_a_record_of_its_own():
    outcome = run([sys.executable, PLAIN, "2", "fork"])
    assert outcome.exit_code == 0
    assert [record.updates for record in outcome.records] == [2, 2]
    assert all(len(record.losses) == 2 for record in outcome.records)


@pytest.mark.prove
def test_ranks_end_together_and_agree(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    outcome = run([*torchrun, str(SCRIPTS / "ranks.py"), "bfloat16"], steps=4)
    assert outcome.exit_code == 0
    assert [(record.rank, record.updates) for record in outcome.records] == [(0, 4), (1, 4)]
    (finding,) = check(outcome.records, select=["HS302"])
    assert finding.ranks == [0, 1]
    assert finding.message == "DistributedDataParallel sums gradients in bf16 over 2 ranks"


def in_a_process(script, *arguments, steps=6):
    """Runs a script under a watch; returns its record as plain data. The packages are imported already."""
    from halfstep.torch.instruments.collect.watch import Watch

    def end():
        raise SystemExit(0)

    sys.argv = [script, *arguments]
    with warnings.catch_warnings(), Watch(steps=steps, end=end) as watch:
        warnings.simplefilter("ignore")
        with pytest.raises(SystemExit):
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    return watch.record().to_dict()


@pytest.mark.prove
@pytest.mark.parametrize(
    ("script", "precisions"),
    [
        ("accelerate_loop.py", ["no", "bf16"]),
        ("hf_trainer.py", ["no", "bf16"]),
        ("lightning_fit.py", ["32-true", "bf16-mixed"]),
    ],
)
def test_official_examples_break_no_rule(script, precisions):
    preload_integrations()
    for precision in precisions:
        record = Record.from_dict(run_alone(in_a_process, script, precision))
        assert record.updates == 6
        assert record.switches.get("nan_filter", False) == (script == "hf_trainer.py")
        assert [finding.message for finding in check(record)] == []
        assert all(weight.optimizer for weight in record.weights)
        formats = {call.format for call in record.calls_of("autocast")}
        assert formats == (set() if precision in ("no", "32-true") else {"bf16"})
