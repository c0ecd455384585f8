"""Verdicts: how our results compare with the paper's. `report.md.jinja` defines them; the first that applies is given.

Our value of a cell is the mean over finished seeds; its spread is their sample standard deviation. The combined spread
of two is sqrt(a^2 + b^2).
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from .tables import Figure

NOT_RUN, UNPRINTED, WITHIN, ALONE, ORDER, DIFFERS = (
    "not run",
    "not in the paper",
    "agrees within spread",
    "nothing to compare",
    "agrees in order",
    "differs",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table: the paper's figure, our values, and whether they are all from runs of the exact recipe."""

    row: str
    column: str
    paper: Figure | None
    values: tuple[float, ...] = ()
    exact: bool = False

    @property
    def mean(self) -> float:
        """The mean of `values`, which must not be empty."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of `values`; None for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of a cell, and the numbers of rows that were compared, agree in order, and are clear."""

    text: str
    compared: int = 0
    agreed: int = 0
    clear: int = 0


def ordered(one: Figure, other: Figure, margin: float) -> bool:
    """Returns whether two printed figures differ by more than their combined spread, or the margin if one has none."""
    needed = math.hypot(one.spread or 0.0, other.spread or 0.0)
    if one.spread is None or other.spread is None:
        needed = max(needed, margin)
    # 1e-9 allows for rounding errors.
    return abs(one.mean - other.mean) > needed + 1e-9


def judge(cell: Cell, column: Sequence[Cell], margin: float) -> Verdict:
    """Returns the verdict of a cell, given all cells of its column."""
    if not cell.values:
        return Verdict(text=NOT_RUN)
    if cell.paper is None:
        return Verdict(text=UNPRINTED)
    printed = [
        (other, other.paper) for other in column if other.row != cell.row and other.values and other.paper is not None
    ]
    others = [(other, paper) for other, paper in printed if ordered(cell.paper, paper, margin)]
    agreed = [other for other, paper in others if (cell.mean - other.mean) * (cell.paper.mean - paper.mean) > 0]
    clear = [
        other
        for other in agreed
        if cell.spread is not None
        and other.spread is not None
        and abs(cell.mean - other.mean) > math.hypot(cell.spread, other.spread)
    ]
    counts = {"compared": len(others), "agreed": len(agreed), "clear": len(clear)}
    if cell.exact and cell.spread is not None and cell.paper.spread is not None:
        allowed = 2 * math.hypot(cell.spread, cell.paper.spread) + cell.paper.rounding
        if abs(cell.mean - cell.paper.mean) <= allowed + 1e-9:
            return Verdict(text=WITHIN, **counts)
    return Verdict(text=ALONE if not others else ORDER if len(agreed) == len(others) else DIFFERS, **counts)
