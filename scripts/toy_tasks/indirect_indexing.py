"""Indirect indexing (PoPE paper, Section 4 and Appendix B.1): the letter at an offset from a given letter.

    NZTUIGWkXFrhCJDzscat, N, +4, I

A string of different letters, one of them, a shift to the left (-) or to the right (+), and the letter there, which is
the answer. The delimiter, a comma and a space, is one symbol.
"""

import dataclasses
import re
import string
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..checks import Count, NotNegative
from .common import Sample, TaskBuilder, TaskConfig

_LETTERS = string.ascii_uppercase + string.ascii_lowercase


@dataclasses.dataclass(kw_only=True, eq=False)
class IndirectIndexingConfig(TaskConfig):
    """Strings without a repeated letter, of uniform length; letter and shift are drawn until the target is inside.

    Args:
        min_length: letters of the shortest string.
        max_length: letters of the longest string.
        max_shift: the largest shift to either side; a shift of 0 is written `+0`.
        letters: the number of different letters in all strings, from the first of the alphabet on, capitals first.
    """

    train_samples: Count = 1_000_000
    validation_samples: Count = 10_000
    test_samples: Count = 10_000
    min_length: Count = 20
    max_length: Count = 40
    max_shift: NotNegative = 15
    letters: Annotated[int, Field(ge=1, le=len(_LETTERS))] = len(_LETTERS)

    def validate(self) -> None:
        if self.min_length > self.max_length:
            raise ValueError(
                f"min_length={self.min_length!r} is not valid: it must be at most max_length={self.max_length!r}."
            )
        if self.max_length > self.letters:
            raise ValueError(
                f"max_length={self.max_length!r} is not valid: no letter is repeated, so it must be at most "
                f"letters={self.letters!r}."
            )

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*_LETTERS[: self.letters], ", ", "+", "-", *string.digits)

    @property
    def longest(self) -> int:
        return self.max_length + 6 + len(str(self.max_shift))

    def test_sets(self) -> dict[str, dict[str, Any]]:
        return {"in_distribution": {}}

    def draw(self, random: np.random.Generator) -> Sample:
        length = int(random.integers(self.min_length, self.max_length, endpoint=True))
        letters = random.permutation(self.letters)[:length].tolist()
        target = -1
        while not 0 <= target < length:
            source, shift = random.integers((0, -self.max_shift), (length, self.max_shift + 1)).tolist()
            target = source + shift
        delimiter, plus, minus, zero = range(self.letters, self.letters + 4)
        digits = [zero + int(digit) for digit in str(abs(shift))]
        sign = minus if shift < 0 else plus
        end = [delimiter, letters[source], delimiter, sign, *digits, delimiter, letters[target]]
        symbols = np.array(letters + end, dtype=np.int64)
        return Sample(symbols, np.arange(symbols.size) == symbols.size - 1)


class IndirectIndexing(TaskBuilder):
    """The set of the PoPE paper."""

    BUILDER_CONFIG_CLASS = IndirectIndexingConfig


def solve(text: str, config: IndirectIndexingConfig) -> str:
    """Returns the symbol that follows `text`, which ends in the delimiter after the shift."""
    match = re.fullmatch(r"(\w+), (\w), ([+-]\d+), ", text)
    if match is None:
        raise ValueError(f"text={text!r} is not valid: it must be a string, a letter and a shift, each before ', '.")
    return match[1][match[1].index(match[2]) + int(match[3])]
