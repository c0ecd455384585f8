#!/bin/bash
# sbatch slurm.sh RECIPE [OPTIONS of whatwhere train]
#
# Slurm starts one process for each GPU, without torchrun, so that signals reach the training itself. Five minutes before
# the time limit, they get SIGUSR1, write a checkpoint and stop; the job is queued again and continues. Slurm itself queues
# it again when a node fails or the job is preempted. Output and checkpoints must be on a file system of all nodes.
#SBATCH --job-name=whatwhere
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

export STOPPED=$PWD/.stopped-$SLURM_JOB_ID

# --kill-on-bad-exit: when one process fails, the others end too. One that stops with a checkpoint (128 + the signal) does
# not fail, so that the others can end by themselves.
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    trap : USR1
    python -m whatwhere train "$@" --resume auto
    status=$?
    [ "$status" -eq $((128 + $(kill -l USR1))) ] || exit "$status"
    touch "$STOPPED"
' train "$@"
status=$?

if [ -e "$STOPPED" ]; then
    rm "$STOPPED"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
