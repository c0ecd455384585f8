"""Indirect indexing (PoPE paper, Section 4 and Appendix B.1): the letter at an offset from a given letter.

    NZTUIGWkXFrhCJDzscat, N, +4, I

A sample has a string of different letters, one of its letters, a shift to the left (-) or to the right (+), and the
letter at the shifted position, which is the answer. The delimiter, a comma and a space, is one symbol.
"""

import string
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..checks import Count, NotNegative
from .common import Sample, TaskConfig

_LETTERS = string.ascii_uppercase + string.ascii_lowercase


class IndirectIndexingConfig(TaskConfig):
    """Strings without repeated letters, of uniformly distributed length. Letter and shift are redrawn if the target is
    outside the string.

    Attributes:
        max_shift: the largest shift to either side; a shift of 0 is written `+0`.
        letters: the number of letters in the alphabet: A to Z, then a to z.
    """

    train_samples: Count = 1_000_000
    validation_samples: Count = 10_000
    test_samples: Count = 10_000
    min_length: Count = 20
    max_length: Count = 40
    max_shift: NotNegative = 15
    letters: Annotated[int, Field(ge=1, le=len(_LETTERS))] = len(_LETTERS)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.min_length > self.max_length:
            yield "min_length", f"it must be at most max_length={self.max_length!r}"
        if self.max_length > self.letters:
            yield "max_length", f"no letter is repeated, so it must be at most letters={self.letters!r}"

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
