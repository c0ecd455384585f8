"""Tensor and pipeline parallelism on two CPU processes."""

import pathlib
import re

import pytest

from model_parallel_worker import CASES
from processes import TORCHRUN, python

pytestmark = pytest.mark.slow


def test_two_ranks_equal_one(tmp_path):
    worker = pathlib.Path(__file__).parent / "model_parallel_worker.py"
    assert re.findall(r"agrees: (.+)", python(*TORCHRUN, 2, worker, tmp_path)) == list(CASES)
