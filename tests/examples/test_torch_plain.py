"""examples/torch_plain.py learns, and its resumed run equals the uninterrupted one."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_plain.py"


def test_it_is_short_learns_and_resumes_exactly(capsys):
    example = runpy.run_path(str(EXAMPLE))
    resumed = example["main"]("fp16-mixed", steps=20)
    printed = capsys.readouterr().out
    assert "5 Linear" in printed
    before, after = (float(line.split()[3].strip(",")) for line in printed.splitlines() if "  step " in line)
    assert after < before - 0.1
    assert example["train"](example["build"]("fp16-mixed"), 0, 20) == resumed
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 80
