"""The usual training recipes and halfstep's, raced on one GPU in one run: `halfstep bench` as a script.

    python benchmarks/race.py [--arms autocast halfstep] [--micro-batches 8] [--rounds 6] [--steps 10]
        [--width 768] [--layers 12] [--batch 32] [--context 1024] [--seconds 480]
        [--json FILE] [--picture FILE.svg] [--bars]

Every option is that of `halfstep bench`, but for `--json`, which names a file here: `--save` of the command.
`halfstep/tools/bench/run.py` runs the race, `halfstep/tools/bench/arms` holds the model and the recipes.
"""

import sys

from halfstep.cli.main import run


def arguments(given: list[str]) -> list[str]:
    """The command line of `halfstep bench`."""
    return ["bench", *("--save" + word[6:] if word.split("=")[0] == "--json" else word for word in given)]


if __name__ == "__main__":
    sys.exit(run(arguments(sys.argv[1:])))
