"""What it takes to audit a large folder of weights: the most memory of the process, and MB/s.

    python benchmarks/measure/audit_files.py [--gigabytes 10] [--before] [--folder DIR]

Writes shards of bf16 weights with an index, as Hugging Face's are; audits the folder in a process of its own, in
which torch is not loaded; and deletes what it wrote. `--before` writes a second folder, as of an earlier step, and
reads both. What was just written is in the system's cache if there is room for it; a disk may be slower.

Exit code 1 if the process held more than 1 GB, or read fewer than 300 MB/s.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MEMORY, SPEED = 1e9, 300.0  # bytes, MB/s of all files that are read
SHARD, ROWS, COLUMNS = 500_000_000, 4096, 4096

AUDIT = """
import json, resource, sys, time
from halfstep.core.audit.engine import check
from halfstep.tools.audit.targets import collect
began = time.perf_counter()
found = check(collect(sys.argv[1], before=sys.argv[2] or None).records)
taken = time.perf_counter() - began
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([taken, most, sorted({each.rule for each in found}), "torch" in sys.modules]))
"""


def write_shard(path: Path, names: list[str], numbers: NDArray[np.uint16], seed: int) -> None:
    """Writes matrices in bf16, each of the same numbers in another order."""
    size = numbers.nbytes
    header = {
        name: {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in range(len(names)):
            file.write(np.roll(numbers, seed + i).tobytes())


def write_folder(folder: Path, size: int, seed: int) -> int:
    """Writes shards of that size together, and an index; returns their bytes."""
    draw = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32) * np.float32(0.02)
    numbers = (draw.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    each = SHARD // numbers.nbytes
    shards = -(-size // (each * numbers.nbytes))
    index = {}
    folder.mkdir()
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = [f"layers.{shard * each + i}.mlp.weight" for i in range(each)]
        write_shard(folder / file, names, numbers, seed + shard * each)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--before", action="store_true", help="write an older folder too, and read both")
    parser.add_argument("--folder", help="where to write; by default where temporary files are")
    arguments = parser.parse_args()
    needed = int(arguments.gigabytes * 1e9) * (2 if arguments.before else 1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as parent:
        if (free := shutil.disk_usage(parent).free) < needed * 1.1:
            print(f"{parent} has {free / 1e9:.1f} GB free; {needed / 1e9:.1f} GB are written", file=sys.stderr)
            return 2
        new, old = Path(parent, "new"), Path(parent, "old")
        size = write_folder(new, int(arguments.gigabytes * 1e9), 0)
        size += write_folder(old, int(arguments.gigabytes * 1e9), 1) if arguments.before else 0
        time.sleep(1)
        command = [sys.executable, "-c", AUDIT, str(new), str(old) if arguments.before else ""]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        taken, most, rules, has_torch = json.loads(answer)
    speed = size / 1e6 / taken
    print(f"{size / 1e9:.1f} GB in {taken:.1f} s: {speed:.0f} MB/s, at least {SPEED:.0f}")
    loaded = "loaded" if has_torch else "not loaded"
    print(f"{most / 1e6:.0f} MB of memory at most, at most {MEMORY / 1e6:.0f}; torch is {loaded}")
    print(f"found: {', '.join(rules) or 'nothing'}")
    return 0 if most <= MEMORY and speed >= SPEED else 1


if __name__ == "__main__":
    sys.exit(main())
