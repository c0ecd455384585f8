"""The Triton kernels under data parallelism, on two CPU processes."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

pytestmark = pytest.mark.slow


def test_two_ranks_equal_one():
    worker = pathlib.Path(__file__).parent / "kernel_parallel_worker.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", worker],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    agreed = [line.removeprefix("agrees: ") for line in done.stdout.splitlines() if line.startswith("agrees: ")]
    assert agreed == ["cope DDP", "cope FSDP", "pope DDP", "pope FSDP"]
