"""Flip-flop language modelling (Liu et al. 2023, 2306.00946; CoPE paper, Section 5.1): recall the last written bit.

A sample is a sequence of instructions, each followed by a bit: `w` (write) and a random bit, `i` (ignore) and a random
bit, `r` (read) and the last written bit. In `w0i1r0w1i0i1r1`, the bits after `r` are the answers.
"""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..checks import Count
from .common import Sample, TaskConfig

_WRITE, _READ, _IGNORE, _BIT = range(4)


class FlipFlopConfig(TaskConfig):
    """FFL(ignore): the first instruction is a write, the last one a read, and all others are random.

    Attributes:
        ignore: the probability of `ignore`; the other instructions are writes and reads with equal probability.
    """

    train_samples: Count = 1_600_000
    validation_samples: Count = 16_000
    test_samples: Count = 16_000
    instructions: Annotated[int, Field(ge=2)] = 256
    ignore: Annotated[float, Field(ge=0, le=1)] = 0.8

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("w", "r", "i", "0", "1")

    @property
    def longest(self) -> int:
        return 2 * self.instructions

    def test_sets(self) -> dict[str, dict[str, Any]]:
        return {
            "in_distribution": {},
            "sparse": {"ignore": 0.98, "test_samples": 160_000},
            "dense": {"ignore": 0.1, "test_samples": 4_000},
        }

    def draw(self, random: np.random.Generator) -> Sample:
        choice = random.random(self.instructions)
        kinds = np.where(choice < self.ignore, _IGNORE, np.where(choice < (1 + self.ignore) / 2, _WRITE, _READ))
        kinds[0], kinds[-1] = _WRITE, _READ
        bits = random.integers(2, size=self.instructions)
        written = np.maximum.accumulate(np.where(kinds == _WRITE, np.arange(self.instructions), 0))
        reads = kinds == _READ
        symbols = np.empty(2 * self.instructions, dtype=np.int64)
        symbols[0::2] = kinds
        symbols[1::2] = _BIT + np.where(reads, bits[written], bits)
        answers = np.zeros(2 * self.instructions, dtype=bool)
        answers[1::2] = reads
        return Sample(symbols, answers)
