"""The Triton kernels under data parallelism, on two CPU processes."""

import pathlib
import re

import pytest

from processes import TORCHRUN, python

pytest.importorskip("triton", reason="the kernels need Triton")

pytestmark = pytest.mark.slow


def test_two_ranks_equal_one():
    worker = pathlib.Path(__file__).parent / "kernel_parallel_worker.py"
    agreed = re.findall(r"agrees: (.+)", python(*TORCHRUN, 2, worker, env={"TRITON_INTERPRET": "1"}))
    assert agreed == ["cope DDP", "cope FSDP", "pope DDP", "pope FSDP"]
