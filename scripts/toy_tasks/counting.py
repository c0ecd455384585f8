"""Counting (CoPE paper, Section 5.3, and its released code): the value of a variable after assignments and increments.

A sample is a program and a question about one of its variables:

    pass; a = 0 ; pass; a ++; pass; a ++; print a 2 ;

The number after `print a` is the answer.
"""

import string
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from ..checks import Count, NotNegativeFloat, Positive
from .common import Sample, TaskConfig

_SET, _PASS, _INCREMENT = range(3)
# Symbols of an operation.
_LENGTHS = np.array([4, 1, 2])


class CountingConfig(TaskConfig):
    """Operations that set variables to 0, increment them, or do nothing.

    The number of operations is uniformly distributed. Operations are drawn by their weights. An assignment takes a
    random variable, an increment a random variable that has been set. An increment is redrawn if no variable is set or
    the variable has its maximum value, and a program if it sets no variable. The question is about a random variable
    that has been set.
    """

    separator: ClassVar[str] = " "
    may_be_cut: ClassVar[bool] = True

    variables: Annotated[int, Field(ge=1, le=26)] = 1
    min_steps: Count = 3
    max_steps: Count = 512
    max_value: Count = 10
    set_weight: Positive = 1.0
    pass_weight: NotNegativeFloat = 50.0
    increment_weight: NotNegativeFloat = 7.0

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.min_steps > self.max_steps:
            yield "min_steps", f"it must be at most max_steps={self.max_steps!r}"

    @property
    def symbols(self) -> tuple[str, ...]:
        numbers = (str(value) for value in range(self.max_value + 1))
        return ("=", ";", "++;", "pass;", "print", *numbers, *string.ascii_lowercase[: self.variables])

    @property
    def longest(self) -> int:
        return 4 * self.max_steps + 4

    def test_sets(self) -> dict[str, dict[str, Any]]:
        # 100 and 10 in the paper, with 50 in training.
        return {
            "in_distribution": {},
            "longer": {"pass_weight": 2 * self.pass_weight},
            "shorter": {"pass_weight": self.pass_weight / 5},
        }

    def _operations(self, random: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
        """Returns `steps` operations, int64 (steps), the variable of each, and the values at the end."""
        weights = np.array([self.set_weight, self.pass_weight, self.increment_weight])
        bounds = np.cumsum(weights)[:2] / weights.sum()
        values: dict[int, int] = {}
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        missing = steps
        while missing:
            choices = random.random((2, missing))
            kinds = np.searchsorted(bounds, choices[0], side="right")
            variables, kept = np.zeros(missing, dtype=np.int64), np.ones(missing, dtype=bool)
            places = np.flatnonzero(kinds != _PASS)
            for place, kind, choice in zip(places.tolist(), kinds[places].tolist(), choices[1, places].tolist()):
                if kind == _SET:
                    variable = int(choice * self.variables)
                    values[variable] = 0
                else:
                    variable = list(values)[int(choice * len(values))] if values else -1
                    if values.get(variable, self.max_value) == self.max_value:
                        kept[place] = False
                        continue
                    values[variable] += 1
                variables[place] = variable
            parts.append((kinds[kept], variables[kept]))
            missing -= int(kept.sum())
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), values

    def draw(self, random: np.random.Generator) -> Sample:
        values: dict[int, int] = {}
        while not values:
            steps = int(random.integers(self.min_steps, self.max_steps, endpoint=True))
            kinds, variables, values = self._operations(random, steps)
        asked = list(values)[int(random.integers(len(values)))]
        equals, semicolon, increment, nothing, question, zero = range(6)
        first_variable = zero + self.max_value + 1
        ends = np.cumsum(_LENGTHS[kinds])
        symbols = np.full(ends[-1] + 4, nothing, dtype=np.int64)
        places = (ends - _LENGTHS[kinds])[kinds != _PASS]
        symbols[places] = first_variable + variables[kinds != _PASS]
        symbols[ends[kinds == _INCREMENT] - 1] = increment
        for place, symbol in ((-3, equals), (-2, zero), (-1, semicolon)):
            symbols[ends[kinds == _SET] + place] = symbol
        symbols[-4:] = question, first_variable + asked, zero + values[asked], semicolon
        return Sample(symbols, np.arange(symbols.size) == symbols.size - 2)
