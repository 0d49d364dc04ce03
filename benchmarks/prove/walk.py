"""Walks through README.md and docs/start as a newcomer does: every command, its time and its longest silence.

    python benchmarks/prove/walk.py [--cold] [--save FILE]

Each command runs on a terminal, in a folder of its own, with sizes that a CPU trains in seconds. `silent` is the
longest time without a word, and what was said before it. Exit code 1 if a command fails or is silent for more than
`--most` seconds, or if README names a command of halfstep that is not walked.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for tests

from tests.silence import silences  # noqa: E402

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    model(torch.randn(8, 16).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COMMANDS = (
    "formats bf16 fp16",
    "train --set training.steps=40 --out runs/first",
    "sample runs/first --length 40",
    "train --resume --out runs/first --set training.steps=60",
    "runs runs",
    "report runs/first",
    "eval runs/first --policy fp32",
    "export runs/first --to safetensors --out weights",
    "export runs/first --to int4 --out int4",
    "export runs/first --to artifact --out artifact",
    "audit runs/first",
    "audit -- python train.py",
    "probe tiny",
    "plan gpt2 --gpus 8 --gpu h200",
    "compare bf16-mixed fp32 --steps 10 --seeds 2 --out compared",
    "tune tiny --steps 10 --seeds 2 --out tuned",
    "data pack text.txt --tokenizer bytes --validation 0 --out packed",
    "policy 'fp8-mixed; lm_head: compute=fp32' --model gpt2",
)
BY_DESIGN = {"watch"}  # serves a page until it is stopped


def main() -> int:
    """Runs every command and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=float, default=3.0, help="seconds without a word")
    parser.add_argument("--save", type=Path, help="write the table to this file")
    parser.add_argument("--cold", action="store_true", help="read files from disk (Linux, as root)")
    given = parser.parse_args()
    rows, wrong = [], []
    walked = {command.split()[0] for command in COMMANDS} | BY_DESIGN
    named = set(re.findall(r"^    halfstep (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    wrong += [f"README names `halfstep {name}`, which is not walked" for name in sorted(named - walked)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        Path(folder, "text.txt").write_text("the quick brown fox\n" * 2000)
        for command in COMMANDS:
            words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", command)]
            words = [sys.executable if word == "python" else word for word in words]
            if given.cold:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("3")
            begun = time.monotonic()
            code, said, gaps = silences(words, Path(folder), {}, terminal=True, cwd=folder)
            silent, before = max(gaps)
            after = (before.strip().splitlines() or ["the start"])[-1][-40:]
            rows.append(f"| `{command}` | {code} | {time.monotonic() - begun:.1f} | {silent:.1f} | {after!r} |")
            print(rows[-1], flush=True)
            if code not in (0, 1 if command.startswith(("audit", "compare")) else 0):
                wrong.append(f"`{command}` ended with {code}:\n{said[-1500:]}")
            if silent > given.most:
                wrong.append(f"`{command}` was silent for {silent:.1f} s after {after!r}")
    if given.save:
        given.save.write_text(
            "\n".join(["| command | exit code | s | silent | after |", "|" + "---|" * 5, *rows]) + "\n"
        )
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
