"""The tables of the papers, read from `tables.yaml`: rows, columns and printed figures, and the recipes of our runs.

A column names a recipe and what is read from a finished run; a row names the keys of the recipe in which its system
differs. Both together, and a seed, make a run. Rows and columns of several tables may share runs: a run is known by its
recipe, the row's key, the column's variant and the seed.

Every recipe's own system is that of the paper which the table is about, `cope` or `pope`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..checks import Checked, Count, NotNegativeFloat, parse
from ..training.recipe import Recipe

_FIGURE = re.compile(r"(?P<mean>\d+(\.(?P<decimals>\d+))?)( \((?P<spread>[\d.]+)\)| ± (?P<deviation>[\d.]+))?")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure as a paper prints it: `22.55`, `6.8 (6.9)` or `94.82 ± 2.91`.

    Attributes:
        mean: the figure without its standard deviation.
        spread: the standard deviation over seeds, if it is printed.
        rounding: the largest distance between the printed mean and the one that was measured.

    Raises:
        ValueError: the text is not of that form.
    """

    text: str
    mean: float = dataclasses.field(init=False)
    spread: float | None = dataclasses.field(init=False)
    rounding: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        match = _FIGURE.fullmatch(self.text)
        if match is None:
            raise ValueError(f"text={self.text!r} is not valid: it must be like '22.55', '6.8 (6.9)' or '94.8 ± 2.9'.")
        spread = match["spread"] or match["deviation"]
        values = {"mean": float(match["mean"]), "spread": None if spread is None else float(spread)}
        for name, value in {**values, "rounding": 0.5 * 10.0 ** -len(match["decimals"] or "")}.items():
            object.__setattr__(self, name, value)


class Column(Checked):
    """A column of a table; `tables.yaml` explains the fields."""

    key: str
    label: str
    recipe: str
    measure: str
    variant: str = ""
    overrides: list[str] = []
    small: bool = True
    departs: str = ""

    def figure(self, results: Mapping[str, Any], folder: Path) -> float:
        """Reads the figure, in the table's unit, from the results of a finished run and its folder."""
        name, *arguments = self.measure.split()
        return MEASURES[name](results, folder, *arguments)


class Row(Checked):
    """A row of a table; `figures` and `parameters` by the key of the column."""

    key: str
    label: str
    system: list[str] = []
    figures: dict[str, Any]
    parameters: dict[str, float] = {}


class Table(Checked):
    """A table of a paper.

    Attributes:
        choices: what the paper leaves open in reading this table, and how it is read here.
        seeds: how many the paper has, the default here.
        solved: a run counts as having solved the task if its figure is at least this; None where that is no question.
        digits: of our figures, after the point.
    """

    name: str
    title: str
    unit: str
    columns: list[Column]
    rows: list[Row]
    margin: NotNegativeFloat
    choices: str
    seeds: Count = 3
    solved: float | None = None
    digits: Count = 2


# --- What is read from a run


def _error(results: Mapping[str, Any], folder: Path, test_set: str) -> float:
    """The share of wrong answer tokens on a test set, in percent."""
    return 100 * results["metrics"]["test_sets"][test_set]["token_error"]


def _validation_perplexity(results: Mapping[str, Any], folder: Path) -> float:
    """The perplexity per token of the validation split from `metrics.jsonl`: of the model that was kept."""
    step = results["kept"]["step"] if "kept" in results else results["steps"]
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if values["step"] == step and "validation_perplexity" in values:
            return values["validation_perplexity"]
    raise ValueError(f"{str(folder)!r} was not evaluated after its last step: its recipe needs evaluation.every.")


MEASURES: dict[str, Callable[..., float]] = {
    "error": _error,
    "accuracy": lambda results, folder, test_set: 100 - _error(results, folder, test_set),
    # Of the test split, or of the validation split if the recipe has no other.
    "perplexity": lambda results, folder: results["metrics"]["perplexity"]["value"],
    "loss": lambda results, folder: results["metrics"]["loss"]["value"],
    "validation_perplexity": _validation_perplexity,
}


# --- What rows change


def _encoding(recipe: Recipe, name: str, parameters: str = "null") -> list[str]:
    """Another encoding, with its parameters in YAML."""
    return [f"model.position_encoding={name}", f"model.position_encoding_parameters={parameters}"]


def _own(recipe: Recipe) -> dict[str, Any]:
    return recipe.model["position_encoding_parameters"]


def _half(recipe: Recipe, *fields: str) -> list[str]:
    """Half of some fields of the recipe's `model`; with `n_embd` also of `n_inner`, if it is given."""
    names = [*fields, *(["n_inner"] if "n_embd" in fields and recipe.model.get("n_inner") else [])]
    for name in names:
        if recipe.model[name] % 2:
            raise ValueError(f"model.{name}={recipe.model[name]!r} is not valid: it must be even, to be halved.")
    return [f"model.{name}={recipe.model[name] // 2}" for name in names]


# By the first word of an override: the overrides that it makes of the recipe, and of the words that follow.
CHANGES: dict[str, Callable[..., list[str]]] = {
    "encoding": _encoding,
    "half": _half,
    # A sum of the recipe's own CoPE and another encoding.
    "sum": lambda recipe, name: _encoding(recipe, f"cope+{name}", f'{{"cope": {json.dumps(_own(recipe))}}}'),
    # The recipe's CoPE with position logits times 1/sqrt(d).
    "scaled": lambda recipe: _encoding(recipe, "cope", json.dumps({**_own(recipe), "scale_positions": True})),
    # CoPE_MLP with as many positions as the recipe's CoPE.
    "mlp": lambda recipe, layers: _encoding(
        recipe, "cope_mlp", f"{{hidden_units: 64, num_positions: {_own(recipe)['num_positions']}, layers: {layers}}}"
    ),
    # As many positions as a sequence has tokens.
    "whole_context": lambda recipe: [f"model.position_encoding_parameters.num_positions={recipe.data.sequence_length}"],
}


def resolve(override: str, recipe: Recipe) -> list[str]:
    """Returns the `key.sub=value` texts that an override of a row or column stands for."""
    name, _, rest = override.partition(" ")
    if name not in CHANGES:
        return [override]
    # The parameters of an encoding are one word.
    return CHANGES[name](recipe, *rest.split(" ", 1 if name == "encoding" else -1) if rest else ())


# --- The file


def _cells(text: str, columns: list[Column]) -> dict[str, str]:
    """Returns the texts between bars by the key of the column, without those that are empty."""
    texts = (part.strip() for part in text.split("|"))
    return {column.key: part for column, part in zip(columns, texts, strict=True) if part}


def _rows(key: str, entry: dict[str, Any], columns: list[Column]) -> list[Row]:
    """Returns the row of an entry; with `architectures`, the eight rows of CoPE's Table 7 for one encoding.

    In these the number of layers changes fastest, the dimension slowest.
    """
    entry = dict(entry)
    rows = []
    for number, line in enumerate(entry.pop("architectures", ())):
        halves = [("n_embd", "dimension", 4), ("n_layer", "layers", 1), ("n_head", "heads", 2)]
        fields = [(field, word) for field, word, bit in halves if number & bit]
        width, layers, heads = 128 if number & 4 else 256, 2 if number & 1 else 4, 2 if number & 2 else 4
        values = {
            **entry,
            "label": f"{entry['label']}, {width}, {layers} layers, {heads} heads",
            "system": [
                *entry.get("system", []),
                *([" ".join(["half", *(field for field, _ in fields)])] if fields else []),
            ],
            "figures": line,
        }
        rows += _rows("-half-".join([key, *(word for _, word in fields)]), values, columns)
    if rows:
        return rows
    printed = _cells(entry.pop("figures"), columns).items()
    entry["figures"] = {column: None if text == "?" else Figure(text) for column, text in printed}
    entry["parameters"] = {
        column: float(text)
        for column, text in _cells(entry.pop("parameters", "|" * (len(columns) - 1)), columns).items()
    }
    return [parse(Row, {"key": key, **entry})]


def _joined(parts: list[dict[str, Any]], tables: Mapping[str, Table]) -> dict[str, Any]:
    """Returns the fields of a table with the columns of several; their rows of the same key become one."""
    columns: list[Column] = []
    rows: dict[str, Row] = {}
    for part in parts:
        table, labels = tables[part["table"]], part.get("rows")
        columns += [
            column.model_copy(update={"label": part.get("prefix", "") + column.label}) for column in table.columns
        ]
        for row in table.rows:
            if labels is not None and row.key not in labels:
                continue
            label = labels[row.key] if labels else row.label
            known = rows.get(row.key, row.model_copy(update={"label": label}))
            merged = {"figures": {**known.figures, **row.figures}, "parameters": {**known.parameters, **row.parameters}}
            rows[row.key] = known.model_copy(update=merged)
    first = tables[parts[0]["table"]]
    return {"unit": first.unit, "margin": first.margin, "columns": columns, "rows": list(rows.values())}


def load_tables(file: Path) -> dict[str, Table]:
    """Reads tables from a file such as `tables.yaml`; raises ValueError if it is not valid."""
    entries = yaml.safe_load(file.read_text(encoding="utf-8"))["tables"]
    tables: dict[str, Table] = {}
    # Tables that are made of others come after them.
    for name in sorted(entries, key=lambda name: "join" in entries[name]):
        entry = dict(entries[name])
        parts = entry.pop("join", None)
        if parts:
            entry = {**_joined(parts, tables), **entry}
        else:
            entry["columns"] = [parse(Column, {"key": key, **column}) for key, column in entry["columns"].items()]
            entry["rows"] = [row for key, one in entry["rows"].items() for row in _rows(key, one, entry["columns"])]
        entry["choices"] = " ".join(entry.pop("notes"))
        tables[name] = parse(Table, {"name": name, **entry})
    return {name: tables[name] for name in entries}


TABLES = load_tables(Path(__file__).parent / "tables.yaml")
