"""Selective copy (Gu and Dao 2023, 2312.00752; CoPE paper, Section 5.2): repeat a sequence without its blanks.

A sample is a shuffled sequence of blanks (`_`) and other symbols, followed by the other symbols in the same order:
`c_ab__a` and then the answer `caba`. There is no separator: all samples have the same numbers of blanks and symbols.
"""

import string
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..checks import Count, NotNegative
from .common import Sample, TaskConfig

_CHARACTERS = ("_", *string.ascii_letters, *string.digits)


class SelectiveCopyConfig(TaskConfig):
    """Symbols to copy between blanks.

    Attributes:
        vocabulary: the number of different symbols, including the blank.
    """

    train_samples: Count = 1_000_000
    vocabulary: Annotated[int, Field(ge=2, le=len(_CHARACTERS))] = 16
    non_blanks: Count = 256
    blanks: NotNegative = 256

    @property
    def symbols(self) -> tuple[str, ...]:
        return _CHARACTERS[: self.vocabulary]

    @property
    def longest(self) -> int:
        return 2 * self.non_blanks + self.blanks

    def test_sets(self) -> dict[str, dict[str, Any]]:
        # 128 and 512 in the paper, with 256 in training.
        return {
            "in_distribution": {},
            "dense": {"blanks": self.blanks // 2},
            "sparse": {"blanks": 2 * self.blanks},
        }

    def draw(self, random: np.random.Generator) -> Sample:
        content = random.integers(1, self.vocabulary, size=self.non_blanks)
        length = self.non_blanks + self.blanks
        symbols = np.zeros(length + self.non_blanks, dtype=np.int64)
        symbols[np.sort(random.permutation(length)[: self.non_blanks])] = content
        symbols[length:] = content
        return Sample(symbols, np.arange(symbols.size) >= length)
