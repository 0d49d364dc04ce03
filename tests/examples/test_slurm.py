"""The script for SLURM starts what torchrun and halfstep understand."""

import os
import subprocess
from pathlib import Path

from torch.distributed.run import get_args_parser

from halfstep.config.load import load

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"


def test_torchrun_and_halfstep_understand_the_command(tmp_path):
    shows = 'printf "%s\\n" "$@"'
    commands = {"scontrol": "echo first; echo second", "srun": 'shift; exec "$@"', "torchrun": shows}
    for name, does in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    given = {"SLURM_JOB_NODELIST": "x", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7"}
    environment = os.environ | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [SCRIPT, "gpt2", "/shared/run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = get_args_parser().parse_args(done.stdout.splitlines())
    assert (words.nnodes, words.nproc_per_node, words.rdzv_endpoint) == ("2", "8", "first:29500")
    assert words.module
    assert words.training_script == "halfstep"
    command, recipe, *options = words.training_script_args
    assert (command, recipe, options[:3]) == ("train", "gpt2", ["--out", "/shared/run", "--resume"])
    assert load(recipe, options[options.index("--set") + 1 :]).parallel.shard == "hybrid"
