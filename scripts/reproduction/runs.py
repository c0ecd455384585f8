"""The training runs of a table: plans them, finds finished ones, and trains the others.

A run's folder is `OUTPUT/<recipe>/<row>[-<variant>]-seed<k>`. `whatwhere train` with the same recipe, overrides and
folder gives the same run.
"""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whatwhere.position_base import suggest

from ..checks import differences
from ..training.recipe import IMMATERIAL, Recipe, load_recipe
from ..training.run_folder import RunFolder
from .tables import Column, Row, Table, resolve


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One training run."""

    seed: int
    folder: Path
    recipe: Recipe
    # Differences from the exact run that change the result.
    changes: tuple[str, ...]
    # The overrides of the row, and all of them (user, row, column and seed), as for `train --set`.
    system: tuple[str, ...]
    overrides: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Returns the arguments of `whatwhere train` for this run."""
        sets = [argument for override in self.overrides for argument in ("--set", override)]
        return [self.recipe.name, *sets, "--output", str(self.folder)]

    def command(self) -> str:
        """Returns the command for this run."""
        return shlex.join(["whatwhere", "train", *self.arguments()])

    def results(self) -> dict[str, Any] | None:
        """Returns the results of the finished run, or None; raises TrainingError if they are of another run."""
        return RunFolder(self.folder).results(self.recipe.resolved())

    def state(self) -> str:
        """Returns `done`, `missing`, or the progress of an interrupted run."""
        return RunFolder(self.folder).state(self.recipe.resolved())


def check_sets(row: Row, column: Column, base: Recipe, sets: Sequence[str]) -> None:
    """Raises ValueError if one of the user's overrides is of a key that the table sets."""
    given = ["seed=", "model.position_encoding="]
    for one in (*row.system, *column.overrides):
        # A value that a row derives from the recipe, such as half a width, may be replaced there.
        if (texts := resolve(one, base)) == [one] or one.split()[0] in ("encoding", "whole_context"):
            given += texts
    for key in (override.partition("=")[0] for override in sets):
        for other in sorted({text.partition("=")[0] for text in given}):
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise ValueError(
                    f"--set {key} is not valid: row {row.key!r}, its column or --seeds sets {other}. --rows chooses "
                    "other rows."
                )


def build_run(row: Row, column: Column, seed: int, *, output: Path, small: bool, sets: Sequence[str]) -> PlannedRun:
    """Builds a run; see `plan` for the arguments."""
    name = f"{column.recipe}_small" if small else column.recipe

    def build(name: str, sets: Sequence[str]) -> tuple[list[str], list[str], Recipe]:
        base = load_recipe(name, sets)
        check_sets(row, column, base, sets)
        system, own = (
            [text for one in given for text in resolve(one, base)] for given in (row.system, column.overrides)
        )
        overrides = [*sets, *system, *own, f"seed={seed}"]
        return system, overrides, load_recipe(name, overrides)

    system, overrides, recipe = build(name, sets)
    changes = differences(build(column.recipe, ())[2].resolved(), recipe.resolved())
    immaterial = IMMATERIAL | {"name", "seed", "evaluation.every"}
    if recipe.evaluation.keep == "best":
        # It determines the models from which the best is chosen.
        immaterial.remove("evaluation.every")
    elif recipe.data.source == "task":
        # Results of toy tasks do not depend on validation samples.
        immaterial.add("evaluation.blocks")
    return PlannedRun(
        seed=seed,
        folder=output / name / "-".join(part for part in (row.key, column.variant, f"seed{seed}") if part),
        recipe=recipe,
        changes=tuple(line for line in changes if line.partition(": ")[0] not in immaterial),
        system=tuple(system),
        overrides=tuple(overrides),
    )


def plan(
    table: Table,
    *,
    output: Path,
    small: bool = False,
    seeds: int | None = None,
    rows: Sequence[str] | None = None,
    sets: Sequence[str] = (),
) -> dict[tuple[str, str], list[PlannedRun]]:
    """Returns for each (row key, column key), in the order of the table, a run for each seed.

    Args:
        seeds: number of runs of each system, with seeds 0 to `seeds` - 1; by default as in the table.
        sets: `key.sub=value` for every run.
    """
    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds {seeds!r} is not valid: it must be at least 1.")
    known = {row.key: row for row in table.rows}
    for key in rows or ():
        if key not in known:
            raise ValueError(f"--rows {key!r} is not valid. {suggest(key, known)}")
    made: dict[tuple[str, str, str, int], PlannedRun] = {}
    result: dict[tuple[str, str], list[PlannedRun]] = {}
    for row in table.rows:
        for column in table.columns:
            if column.key not in row.figures or (rows and row.key not in rows) or (small and not column.small):
                continue
            for seed in range(seeds or row.seeds or table.seeds):
                # Columns that differ only in the measure share the run.
                run = (row.key, column.recipe, column.variant, seed)
                if run not in made:
                    made[run] = build_run(row, column, seed, output=output, small=small, sets=sets)
                result.setdefault((row.key, column.key), []).append(made[run])
    if not result:
        asked = f"rows {', '.join(rows)} of {table.name}" if rows else table.name
        raise ValueError(f"--small is not valid for {asked}: none of its columns has a small version.")
    return result


def unique(planned: Mapping[tuple[str, str], Sequence[PlannedRun]]) -> list[PlannedRun]:
    """Returns every run once, ordered by seed, so that all cells get a result early."""
    runs = {run.folder: run for cell in planned.values() for run in cell}
    return sorted(runs.values(), key=lambda run: run.seed)


def train(run: PlannedRun, data_dir: str | os.PathLike[str] | None = None) -> None:
    """Starts or continues a run."""
    from ..cards.folder import card_of_run
    from ..training import loop

    resume = RunFolder(run.folder).is_begun
    data = ["--data-dir", str(data_dir)] if data_dir else []
    arguments = [*run.arguments(), *data, *(["--resume"] if resume else [])]
    with card_of_run(run.folder):
        loop.train(run.recipe, run.folder, resume=resume, data_dir=data_dir, arguments=arguments)
