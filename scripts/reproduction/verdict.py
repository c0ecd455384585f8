"""Verdicts: how our figures compare with the paper's.

A cell of ours is the mean over its finished seeds; its spread is their sample standard deviation. The verdict of a cell
is the first of these that holds:

* `not run`: no run for it is finished.
* `not in the paper`: the paper has no such figure; ours stands beside the others, and judges none of them.
* `agrees within spread`: the runs are exact, there are at least two of them, the paper gives a standard deviation, and
  |ours - paper's| <= 2 * sqrt(our spread^2 + its spread^2), plus half a unit of the paper's last digit.
* `nothing to compare`: there is no other row with which the order could be compared.
* `agrees in order`: in every comparison, our means are in the paper's order.
* `differs`: in at least one they are not.

The order of two rows of a column is compared if both have runs, and the paper's figures differ by more than their
combined spread, sqrt(a^2 + b^2); if one of them has none, by more than the other's, and the table's margin. A
comparison that agrees is `clear` if both have two runs, and our means differ by more than our combined spread.
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
    """A cell of a table: the paper's figure, and ours.

    Attributes:
        row, column: the keys of its row and its column.
        paper: the printed figure; None if there is none.
        values: ours, of every finished seed.
        exact: whether all of them are from exact runs.
    """

    row: str
    column: str
    paper: Figure | None
    values: tuple[float, ...] = ()
    exact: bool = False

    @property
    def mean(self) -> float:
        """The mean of our figures, of which there must be one."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Their sample standard deviation; None with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of a cell.

    Attributes:
        text: one of the six of the module's docstring.
        compared: rows with which the order was compared.
        agreed: those among them with which our order is the paper's.
        clear: those among the agreed whose distance from it is more than our combined spread.
    """

    text: str
    compared: int = 0
    agreed: int = 0
    clear: int = 0


def ordered(one: Figure, other: Figure, margin: float) -> bool:
    """Returns whether two printed figures are so far apart that their order is one: see the module's docstring."""
    needed = math.hypot(one.spread or 0.0, other.spread or 0.0)
    if one.spread is None or other.spread is None:
        needed = max(needed, margin)
    # Differences of decimal fractions are off in the last bits.
    return abs(one.mean - other.mean) > needed + 1e-9


def judge(cell: Cell, column: Sequence[Cell], margin: float) -> Verdict:
    """Returns the verdict of a cell, by the rules of the module's docstring.

    Args:
        cell: which is judged.
        column: all cells of its column; the cell itself may be among them.
        margin: the table's.
    """
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
