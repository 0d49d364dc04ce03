#!/bin/bash
# Trains on every GPU of several machines. `sbatch examples/slurm.sh gpt2 runs/gpt2` starts it; the same command
# continues it after a time limit or a lost machine. Needs a folder that all machines see.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
recipe=${1:?name a recipe} out=${2:?name the run folder}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
# SLURM sends SIGTERM two minutes before the end, and torchrun gives its processes 30 seconds to save and stop.
srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:29500" \
  -m halfstep train "$recipe" --out "$out" --resume --deadline 25 --set parallel.shard=hybrid
