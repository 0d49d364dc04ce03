"""`halfstep plan` as people see it."""

import pytest

from halfstep.cli.main import run

SIZES = ("layers=1", "width=32", "heads=2", "context=16")
SMALL = [word for size in SIZES for word in ("--set", f"model.{size}")]


@pytest.mark.prove
def test_policies_stand_side_by_side(capsys):
    policies = ["--policy", "bf16-mixed", "--policy", "fp32"]
    assert run(["plan", "tiny", "--gpu", "h200", *policies, "--price", "2", *SMALL]) == 0
    printed = capsys.readouterr()
    assert "bf16-mixed" in printed.out
    assert "fp32" in printed.out
    assert "price" in printed.out
    assert "probe --save" in printed.err


def test_json_and_what_does_not_fit(tmp_path, data_of):
    path = tmp_path / "small.toml"
    path.write_text(
        'name = "S"\nkind = "nvidia"\ncapability = [9, 0]\nmemory = 30_000_000\ncontext = 0\nbandwidth = 1e12\n'
        "[rates]\nfp32 = 1e13\nbf16 = 1e14\n"
    )
    (plan,) = data_of("plan", "tiny", "--gpu", str(path), *SMALL, code=1)["plans"]
    assert plan["fits"] is False
    assert plan["reserved_bytes"] > plan["capacity_bytes"]


def test_bad_input_is_refused_with_the_way_out(refused):
    for arguments, words in {
        ("tiny", "--gpu", "h2000"): "did you mean `h200`? on that machine `halfstep probe --save mine.toml`",
        ("tiny", "--gpu", "gtx"): "hint: on that machine `halfstep probe --save mine.toml` makes a file",
        ("tinny", "--gpu", "h200"): "unknown recipe `tinny`",
        ("tiny", "--gpu", "h200", "--gpus", "0"): "--gpus is at least 1",
        ("a:b", "--gpu", "h200", "--set", "model.width=4"): "changes nothing of a factory",
        ("no_such_module:b", "--gpu", "h200"): "there is no module `no_such_module`",
    }.items():
        assert words in refused("plan", *arguments)
