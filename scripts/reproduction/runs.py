"""Runs: which ones a table needs, where they are, which are done, and the training of those that are not.

A run's folder is `OUTPUT/<recipe>/<row>[-<variant>]-seed<k>`. `whatwhere train` makes the same run from the same
recipe, overrides and folder.
"""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whatwhere.position_base import suggest

from ..training.recipe import Recipe, differences, load_recipe
from ..training.run_folder import RunFolder
from .tables import Column, Row, Table, resolve

# Keys in which a run may differ from an exact one: what they change is how it is made and recorded, not what it gives.
IMMATERIAL = {
    "name",
    "seed",
    "training.micro_batch_size",
    "training.activation_checkpointing",
    "training.compile",
    "training.log_every",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.trackers",
    "training.ddp_timeout",
    # If the last model is kept.
    "evaluation.every",
}


class ReproduceError(ValueError):
    """A table that cannot be made, with the reason."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        row, column: what it is for; other rows and columns may use it, too.
        seed: of the recipe.
        folder: where it is, or will be.
        recipe: what it trains.
        changes: `differences` from the exact run to this one, without what is immaterial; none if it is the exact one.
        system: the overrides of the row, which make its system of the recipe.
        overrides: all: the user's, the row's, the column's and the seed's, as for `train --set`.
    """

    row: Row
    column: Column
    seed: int
    folder: Path
    recipe: Recipe
    changes: tuple[str, ...]
    system: tuple[str, ...]
    overrides: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Returns the arguments of `whatwhere train` that make this run."""
        sets = [argument for override in self.overrides for argument in ("--set", override)]
        return [self.recipe.name, *sets, "--output", str(self.folder)]

    def command(self) -> str:
        """Returns the command that makes this run."""
        return shlex.join(["whatwhere", "train", *self.arguments()])

    def results(self) -> dict[str, Any] | None:
        """Returns the results of the finished run, or None; raises TrainingError if they are those of another run."""
        return RunFolder(self.folder).results(self.recipe.resolved())

    def state(self) -> str:
        """Returns `done`, `missing`, or how far an interrupted run has come."""
        return RunFolder(self.folder).state(self.recipe.resolved())


def resolve_overrides(
    base: Recipe, row: Row, column: Column, seed: int, sets: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the overrides of a row, and all those that make a run of the shipped recipe.

    `base` is the shipped recipe, changed by `sets`, the user's overrides.

    Raises:
        ReproduceError: an override of the user is one that the row, the column or the seed decides.
    """

    def texts(overrides: Sequence[str]) -> tuple[str, ...]:
        return tuple(text for one in overrides for text in resolve(one, base))

    # What is made of the recipe, such as half of a width, may be changed there; an encoding may not.
    own = [one for one in (*row.system, *column.overrides) if resolve(one, base) == [one]]
    own += [text for one in row.system if one.startswith("encoding ") for text in resolve(one, base)]
    fixed = {"seed", "model.position_encoding", *(text.partition("=")[0] for text in own)}
    for key in (override.partition("=")[0] for override in sets):
        for other in sorted(fixed):
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise ReproduceError(
                    f"--set {key} is not valid: {other} is what row {row.key!r}, its column or the seed decides."
                )
    system = texts(row.system)
    return system, (*sets, *system, *texts(column.overrides), f"seed={seed}")


def build_run(
    row: Row, column: Column, seed: int, *, output: Path, small: bool = False, sets: Sequence[str] = ()
) -> Run:
    """Builds a run; see `plan` for the arguments.

    Raises:
        ReproduceError: see `resolve_overrides`.
        RecipeError: the recipe is not valid.
    """
    name = f"{column.recipe}_small" if small else column.recipe
    system, overrides = resolve_overrides(load_recipe(name, sets), row, column, seed, sets)
    recipe = load_recipe(name, overrides)
    exact = load_recipe(column.recipe, resolve_overrides(load_recipe(column.recipe), row, column, seed)[1])
    changes = differences(exact.resolved(), recipe.resolved())
    immaterial = set(IMMATERIAL)
    if recipe.evaluation.keep == "best":
        # Which models the best is chosen from.
        immaterial.remove("evaluation.every")
    elif recipe.data.source == "task":
        # Of a toy task nothing is reported that validation samples decide.
        immaterial.add("evaluation.blocks")
    return Run(
        row=row,
        column=column,
        seed=seed,
        folder=output / name / "-".join(part for part in (row.key, column.variant, f"seed{seed}") if part),
        recipe=recipe,
        changes=tuple(line for line in changes if line.partition(": ")[0] not in immaterial),
        system=system,
        overrides=overrides,
    )


def plan(
    table: Table,
    *,
    output: Path,
    small: bool = False,
    seeds: int | None = None,
    rows: Sequence[str] | None = None,
    sets: Sequence[str] = (),
) -> dict[tuple[str, str], list[Run]]:
    """Lists the runs of a table.

    Args:
        table: what is to be made.
        output: the folder of all runs.
        small: the small version.
        seeds: runs of each system, with the seeds 0 to `seeds` - 1; by default as many as in the paper.
        rows: keys of the rows wanted; by default all.
        sets: `key.sub=value` for every run.

    Returns:
        by the keys of row and column, in the order of the table, a run for each seed. A small version lacks the columns
        that have none.

    Raises:
        ReproduceError: `seeds` or a row is not valid, nothing is left to make, or see `build_run`.
    """
    seeds = table.seeds if seeds is None else seeds
    if seeds < 1:
        raise ReproduceError(f"--seeds {seeds!r} is not valid: it must be at least 1.")
    known = {row.key: row for row in table.rows}
    for key in rows or ():
        if key not in known:
            raise ReproduceError(f"--rows {key!r} is not valid. {suggest(key, known)}")
    made: dict[tuple[str, str, str, int], Run] = {}
    result: dict[tuple[str, str], list[Run]] = {}
    for row in table.rows:
        for column in table.columns:
            if column.key not in row.figures or (rows and row.key not in rows) or (small and not column.small):
                continue
            for seed in range(seeds):
                # Columns that differ in what is measured share the run.
                run = (row.key, column.recipe, column.variant, seed)
                if run not in made:
                    made[run] = build_run(row, column, seed, output=output, small=small, sets=sets)
                result.setdefault((row.key, column.key), []).append(made[run])
    if not result:
        asked = f"rows {', '.join(rows)} of {table.name}" if rows else table.name
        raise ReproduceError(f"--small is not valid for {asked}: no column of it has a small version.")
    return result


def unique(planned: Mapping[tuple[str, str], Sequence[Run]]) -> list[Run]:
    """Returns every run once, all with the first seed before any with the second: a table fills evenly."""
    runs = {run.folder: run for cell in planned.values() for run in cell}
    return sorted(runs.values(), key=lambda run: run.seed)


def train(run: Run, data_dir: str | os.PathLike[str] | None = None, *, end: bool = True) -> None:
    """Makes a run that is not done, or continues it; `end` says whether it is the last run of these processes."""
    from ..training import loop

    resume = RunFolder(run.folder).is_begun
    data = ["--data-dir", str(data_dir)] if data_dir else []
    arguments = [*run.arguments(), *data, *(["--resume"] if resume else [])]
    loop.train(run.recipe, run.folder, resume=resume, data_dir=data_dir, arguments=arguments, end=end)
