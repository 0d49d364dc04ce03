"""`halfstep audit` as people see it: output, exit codes, accepted findings, and the policy that cures."""

import pytest

from halfstep.cli.main import run
from halfstep.config.load import load, read_policy
from halfstep.core.audit.engine import registry
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import Buffer, Record, UpdateCounts, Weight
from halfstep.core.policy import Policy
from halfstep.tools.audit import script, targets
from halfstep.tools.audit.targets import Collected

LOST = UpdateCounts(steps=20, intended=1000, lost=988, arrived_sum=0.02, intended_sum=1.0, moved=True)


@pytest.fixture
def bad(monkeypatch, tmp_path):
    """A target with eleven weights in pure bf16, and something that was not seen."""
    monkeypatch.chdir(tmp_path)
    weights = [Weight(f"blocks.{i}.up.weight", "bf16", optimizer="AdamW", updates=LOST) for i in range(11)]
    record = Record("script", updates=20, weights=weights, unseen=["compiled code"])
    monkeypatch.setattr(targets, "collect", lambda *_: Collected([record]))
    return record


def test_findings_for_people(bad, capsys):
    assert run(["audit", "x:y"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == [
        "HS101 error: weights without a master",
        "  `blocks.0.up.weight` is stepped in bf16 by AdamW, without an fp32 master: 98.8% of its intended updates "
        "were lost, and 2.0% of what was intended arrived; one of 11 tensors in bf16: `blocks.0.up.weight` "
        "98.8%, `blocks.1.up.weight` 98.8%, `blocks.2.up.weight` 98.8%, `blocks.3.up.weight` 98.8% and 7 more",
    ]
    assert out.splitlines()[2].startswith("  fix: ")
    assert out.splitlines()[3] == "  see docs/audit.md#hs101"
    assert err.splitlines() == ["not seen: compiled code", "x:y: 1 error (20 updates watched)"]


def test_findings_for_programs(bad, data_of):
    data = data_of("audit", "x:y", code=1)
    (finding,) = data["findings"]
    assert (len(finding["where"]), data["unseen"], data["updates"]) == (11, ["compiled code"], 20)
    assert finding["evidence"]["lost_share"] == finding["each"]["blocks.7.up.weight"]["lost_share"] == 0.988


def test_findings_of_some_ranks_say_which(bad, monkeypatch, capsys):
    other = Record("script", rank=1, updates=20, buffers=[Buffer("rope.inv_freq", "bf16", "rope")])
    other.weights = bad.weights
    monkeypatch.setattr(targets, "collect", lambda *_: Collected([bad, other]))
    assert run(["audit", "x:y"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(" and 7 more [ranks 0, 1]")
    assert lines[6].endswith("frequencies of rotary positions, is in bf16 [rank 1]")


def test_what_a_run_counted_stands_in_place_of_what_formats_make_likely(bad, monkeypatch, data_of):
    for weight in bad.weights:
        weight.updates = None
    counted = Finding("HS101", "m", "error", "certain", "f", "p", where=["blocks.3.up"])
    monkeypatch.setattr(targets, "collect", lambda *_: Collected([bad], [counted]))
    assert [each["where"] for each in data_of("audit", "x:y", code=1)["findings"]] == [["blocks.3.up"]]


def test_a_recipe_of_ours_is_clean(capsys):
    assert run(["audit", "tiny"]) == 0
    assert capsys.readouterr().err == "tiny: nothing is wrong\n"


@pytest.mark.parametrize(
    ("given", "code"), [(["--select", "HS6,HS101"], 1), (["--select", "HS6"], 0), (["--ignore", "HS1"], 0)]
)
def test_rules_are_chosen(bad, given, code):
    assert run(["audit", "x:y", *given]) == code


def test_accepted_findings_are_left_out(bad, tmp_path, capsys):
    file = tmp_path / "halfstep-audit.toml"
    file.write_text('[[accept]]\nrule = "HS101"\nnames = ["blocks.?.up.*"]\nreason = "a study"\n')
    assert run(["audit", "x:y"]) == 1
    assert "x:y: 1 error, 1 accepted (20 updates watched)" in (seen := capsys.readouterr()).err
    assert "blocks.10.up" in seen.out
    assert "blocks.9.up" not in seen.out
    file.write_text('[[accept]]\nrule = "HS101"\nreason = "a study"\n')
    assert run(["audit", "x:y"]) == 0
    file.rename(tmp_path / "other.toml")
    assert run(["audit", "x:y"]) == 1
    assert run(["audit", "x:y", "--accept", "other.toml"]) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[accept]]\nrule = "HS101"\n', "halfstep-audit.toml: `accept[0].reason` is missing"),
        ('[[accept]]\nrule = "HS101"\nreason = " "\n', "gives no reason"),
        ('[[accept]]\nrule = "HS777"\nreason = "x"\n', "there is no rule `HS777`"),
        ("[accept\n", "this is not TOML"),
        ("acept = 1\n", "acept"),
    ],
)
def test_a_file_of_accepted_findings_is_checked(bad, tmp_path, refused, text, problem):
    (tmp_path / "halfstep-audit.toml").write_text(text)
    assert problem in refused("audit", "x:y")


def test_the_policy_that_cures_is_read_by_train_and_policy(bad, tmp_path, capsys):
    assert run(["audit", "x:y", "--fix-policy", "fix.toml"]) == 1
    assert "wrote `fix.toml`: bf16-mixed" in capsys.readouterr().err
    assert read_policy("fix.toml") == "bf16-mixed"
    bad.policy = "bf16-true"
    bad.weights = bad.weights[:1]
    assert run(["audit", "x:y", "--fix-policy", "fix.toml"]) == 1
    assert str(Policy.parse(read_policy("fix.toml"))) == "bf16-true; blocks.0.up: param=fp32"
    assert load("fix.toml").policy == "bf16-true; blocks.0.up: param=fp32"
    capsys.readouterr()
    assert run(["policy", "fix.toml"]) == 0
    assert "blocks.0.up" in capsys.readouterr().out
    bad.weights[0].name = "odd name.weight"
    (tmp_path / "fix.toml").unlink()
    assert run(["audit", "x:y", "--fix-policy", "fix.toml"]) == 1
    assert "no rule of a policy can name `odd name`" in capsys.readouterr().err
    bad.weights = []
    assert run(["audit", "x:y", "--fix-policy", "fix.toml"]) == 0
    assert not (tmp_path / "fix.toml").exists()


@pytest.mark.parametrize(
    ("given", "problem", "hint"),
    [
        (["tiny", "--select", "HS150"], "there is no rule `HS150`", "did you mean"),
        (["tiny", "--steps", "0"], "--steps 0", "20"),
        (["tiny", "--steps", "5"], "--steps 5 changes nothing", "leave it out"),
        (["tiny", "--accept", "no.toml"], "`no.toml` cannot be read", "--accept"),
        (["tinny"], "neither a folder", "tiny"),
    ],
)
def test_wrong_usage(given, problem, hint, refused):
    err = refused("audit", *given)
    assert problem in err
    assert hint in err


def test_all_rules_are_listed(capsys, data_of):
    assert run(["audit", "--rules"]) == 0
    out = capsys.readouterr().out
    assert all(id in out for id in registry())
    assert [rule["id"] for rule in data_of("audit", "--rules", "--select", "HS101")] == ["HS101"]


def test_a_command_is_run_and_watched(monkeypatch, capsys):
    calls = []

    def played(command, steps, stdout, **_):
        calls.append((list(command), steps, stdout))
        return script.Outcome((Record("script", updates=3),), 0, ("watched 3 updates",))

    monkeypatch.setattr(script, "run", played)
    assert run(["audit", "--steps", "3", "--", "python", "train.py", "--lr", "1"]) == 0
    assert capsys.readouterr().err.splitlines()[:2] == [
        "watching 3 updates of `python train.py --lr 1`",
        "watched 3 updates",
    ]
    assert run(["audit", "--json", "--", "python", "train.py"]) == 0
    assert calls == [(["python", "train.py", "--lr", "1"], 3, None), (["python", "train.py"], 20, 2)]


def test_a_script_of_which_nothing_was_seen_is_not_called_clean(monkeypatch, capsys):
    nothing = script.Outcome((), 0, ("it failed\n    Traceback", "no update"))
    monkeypatch.setattr(script, "run", lambda *_, **__: nothing)
    assert run(["audit", "--", "python", "train.py"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "watching 20 updates of `python train.py`",
        "it failed",
        "    Traceback",
        "no update",
        "python train.py: nothing was seen, so nothing can be said",
    ]
