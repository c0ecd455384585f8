"""The tables, read from `tables.yaml`: rows, columns, the papers' printed figures, and the recipes of our runs.

A column has a recipe and a measure, a row has the overrides of the recipe for its system. Row, column and seed define a
run. Tables can share runs, which are identified by recipe, row key, the column's variant, and seed.

Recipes use the paper's own encoding (`cope` or `pope`) unless the row changes it.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..checks import Checked, Count, NotNegativeFloat, parse
from ..training.recipe import Recipe
from . import measures

_FIGURE = re.compile(r"(?P<mean>\d+(\.(?P<decimals>\d+))?)( \((?P<spread>[\d.]+)\)| ± (?P<deviation>[\d.]+))?")


class Figure(NamedTuple):
    """A figure printed in a paper, with the standard deviation over seeds, if printed, and half its last digit."""

    text: str
    mean: float
    spread: float | None
    rounding: float


def read_figure(text: str) -> Figure:
    """Reads a figure such as `22.55`, `6.8 (6.9)` or `94.82 ± 2.91`."""
    if (match := _FIGURE.fullmatch(text)) is None:
        raise ValueError(f"text={text!r} is not valid: it must be like '22.55', '6.8 (6.9)' or '94.8 ± 2.9'.")
    spread = match["spread"] or match["deviation"]
    rounding = 0.5 * 10.0 ** -len(match["decimals"] or "")
    return Figure(text, float(match["mean"]), None if spread is None else float(spread), rounding)


class Column(Checked):
    """A column of a table; see `tables.yaml` for the fields."""

    key: str
    label: str
    recipe: str
    measure: str
    variant: str = ""
    overrides: list[str] = []
    small: bool = True
    departs: str = ""

    def figure(self, results: Mapping[str, Any], folder: Path) -> float | None:
        """Reads the figure of a finished run; None if not measured yet; NaN if the system does not support it."""
        name, *arguments = self.measure.split()
        return measures.MEASURES[name](results, folder, *arguments)


class Row(Checked):
    """A row of a table; see `tables.yaml` for the fields. `figures` and `parameters` by the key of the column."""

    key: str
    label: str
    system: list[str] = []
    figures: dict[str, Any]
    parameters: dict[str, float] = {}
    seeds: Count | None = None
    group: str = ""


class Table(Checked):
    """A table of a paper, or one of our own; see `tables.yaml` for the fields. `choices` are its notes."""

    name: str
    title: str
    unit: str
    columns: list[Column]
    rows: list[Row]
    margin: NotNegativeFloat = 0.0
    choices: str
    seeds: Count = 3
    solved: float | None = None
    lifted: float | None = None
    digits: Count = 2

    @property
    def is_own(self) -> bool:
        """Whether no figure is from a paper."""
        return all(figure is None for row in self.rows for figure in row.figures.values())

    @property
    def multiples(self) -> list[int]:
        """The lengths, in multiples of the trained length, at which the runs are measured after training."""
        parts = (column.measure.split() for column in self.columns)
        return [int(arguments[0]) for name, *arguments in parts if name == "length"]


# --- What rows change


def _encoding(recipe: Recipe, name: str, parameters: str = "null") -> list[str]:
    """Another encoding, with its parameters in YAML."""
    return [f"model.position_encoding={name}", f"model.position_encoding_parameters={parameters}"]


def _own(recipe: Recipe) -> dict[str, Any]:
    return recipe.model["position_encoding_parameters"]


def _half(recipe: Recipe, *fields: str) -> list[str]:
    """Halves some fields of the recipe's `model`; with `n_embd` also `n_inner`, if set."""
    names = [*fields, *(["n_inner"] if "n_embd" in fields and recipe.model.get("n_inner") else [])]
    for name in names:
        if recipe.model[name] % 2:
            raise ValueError(f"model.{name}={recipe.model[name]!r} is not valid: it must be even.")
    return [f"model.{name}={recipe.model[name] // 2}" for name in names]


# By the first word of an override: a function of the recipe and the following words that returns recipe overrides.
CHANGES: dict[str, Callable[..., list[str]]] = {
    "encoding": _encoding,
    "half": _half,
    # The sum of the recipe's CoPE and another encoding.
    "sum": lambda recipe, name: _encoding(recipe, f"cope+{name}", f'{{"cope": {json.dumps(_own(recipe))}}}'),
    # CoPE_MLP with as many positions as the recipe's CoPE.
    "mlp": lambda recipe, layers: _encoding(
        recipe, "cope_mlp", f"{{hidden_units: 64, num_positions: {_own(recipe)['num_positions']}, layers: {layers}}}"
    ),
    # A part of the recipe's steps, and of its warm-up.
    "steps": lambda recipe, divisor: [
        f"training.{name}={getattr(recipe.training, name) // int(divisor)}" for name in ("steps", "warmup_steps")
    ],
    # One position per token of a sequence.
    "whole_context": lambda recipe: [f"model.position_encoding_parameters.num_positions={recipe.data.sequence_length}"],
}


def resolve(override: str, recipe: Recipe) -> list[str]:
    """Expands an override of a row or column into `key.sub=value` texts."""
    name, _, rest = override.partition(" ")
    if name not in CHANGES:
        return [override]
    # The parameters of an encoding may contain spaces.
    return CHANGES[name](recipe, *rest.split(" ", 1 if name == "encoding" else -1) if rest else ())


# --- The file


def _cells(text: str, columns: list[Column]) -> dict[str, str]:
    """Splits text at bars; returns the non-empty parts by column key."""
    texts = (part.strip() for part in text.split("|"))
    return {column.key: part for column, part in zip(columns, texts, strict=True) if part}


def _row(key: str, entry: dict[str, Any], columns: list[Column]) -> Row:
    none = "|" * (len(columns) - 1)
    printed = _cells(entry.get("figures", none.replace("|", "? |") + "?"), columns)
    figures = {name: None if text == "?" else read_figure(text) for name, text in printed.items()}
    sizes = {name: float(text) for name, text in _cells(entry.get("parameters", none), columns).items()}
    return parse(Row, {**entry, "key": key, "figures": figures, "parameters": sizes})


def load_tables(file: Path) -> dict[str, Table]:
    """Reads tables from a file such as `tables.yaml`; raises ValueError if it is not valid."""
    entries = yaml.safe_load(file.read_text(encoding="utf-8"))["tables"]
    tables = {}
    for name, entry in entries.items():
        columns = [parse(Column, {"key": key, **column}) for key, column in entry["columns"].items()]
        rows = [_row(key, one, columns) for key, one in entry["rows"].items()]
        choices = " ".join(entry.pop("notes"))
        tables[name] = parse(Table, {**entry, "name": name, "columns": columns, "rows": rows, "choices": choices})
    return tables


TABLES = load_tables(Path(__file__).parent / "tables.yaml")
