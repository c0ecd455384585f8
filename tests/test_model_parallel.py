"""Tensor and pipeline parallelism on two CPU processes."""

import os
import pathlib
import subprocess
import sys

import pytest

from model_parallel_worker import CASES

pytestmark = pytest.mark.slow


def test_two_ranks_equal_one(tmp_path):
    worker = pathlib.Path(__file__).parent / "model_parallel_worker.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", worker, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    agreed = [line.removeprefix("agrees: ") for line in done.stdout.splitlines() if line.startswith("agrees: ")]
    assert agreed == list(CASES)
