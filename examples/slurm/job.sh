#!/bin/bash
#SBATCH --job-name=booster
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# One task per rank. A failed rank ends the job step, which is better than ranks that wait for it.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 python examples/slurm/train.py "$@"
