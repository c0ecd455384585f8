"""Reports: our results and the paper's, a verdict for each cell (see `verdict.py`), and the details of the runs.

A run is exact if its recipe equals the table's recipe, with any command line; the report lists the `differences` of the
others. A column with `departs` has no exact runs. The report also names recipes that train on one corpus and are
measured on another.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ..evaluation.data_description import describe_data, is_transfer
from ..evaluation.results import write_json
from .runs import Run, unique
from .tables import Table
from .verdict import DIFFERS, ORDER, Cell, judge


def collect(table: Table, planned: Mapping[tuple[str, str], Sequence[Run]], *, small: bool) -> dict[str, Any]:
    """Reads the figures of all finished runs, and compares them with the paper's.

    Returns:
        the content of `<table>.json`, without the command.

    Raises:
        ReproduceError: a folder contains a run of another recipe.
        ValueError: a run has no such figure.
    """
    columns = {column.key: column for column in table.columns}
    rows = {row.key: row for row in table.rows}
    results = {run.folder: run.results() for run in unique(planned)}
    seeds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    cells = []
    for (row, column), runs in planned.items():
        done = [(run, found) for run in runs if (found := results[run.folder]) is not None]
        seeds[row, column] = [_seed(run, found, columns[column].figure(found, run.folder)) for run, found in done]
        values = tuple(seed["value"] for seed in seeds[row, column])
        exact = bool(done) and not columns[column].departs and not any(run.changes for run, _ in done)
        cells.append(Cell(row=row, column=column, paper=rows[row].figures[column], values=values, exact=exact))
    entries = []
    for cell in cells:
        verdict = judge(cell, [other for other in cells if other.column == cell.column], table.margin)
        entry: dict[str, Any] = {
            "row": cell.row,
            "label": rows[cell.row].label,
            "column": cell.column,
            "column_label": columns[cell.column].label,
            "paper": {
                **{name: cell.paper and getattr(cell.paper, name) for name in ("text", "mean", "spread")},
                "parameters": rows[cell.row].parameters.get(cell.column),
            },
            "ours": {
                "mean": cell.mean if cell.values else None,
                "spread": cell.spread,
                "exact": cell.exact,
                "wanted": len(planned[cell.row, cell.column]),
                "seeds": seeds[cell.row, cell.column],
            },
        }
        if table.solved is not None:
            solved = [value >= table.solved for value in cell.values]
            entry["solve_rate"] = sum(solved) / len(solved) if solved else None
        entries.append({**entry, "verdict": dataclasses.asdict(verdict)})
    finished = [found for found in results.values() if found is not None]
    return {
        "table": table.name,
        "small": small,
        **{name: getattr(table, name) for name in ("title", "unit", "margin", "solved", "digits", "choices")},
        "cells": entries,
        "scaled_down": scaled_down(planned),
        "departs": {
            column.recipe: column.departs
            for column in table.columns
            if column.departs and column.key in {column for _, column in planned}
        },
        "left_out": left_out(table) if small else {},
        "transfer": transfer(planned),
        "texts": texts(planned),
        "systems": systems(planned),
        "runs": [run.command() for run in unique(planned)],
        "origin": {
            **{key: distinct(run[key] for run in finished) for key in ("commit", "device", "processes", "versions")},
            # Only corpora have a place: local files or the Hub.
            "corpora from": distinct(found["data"]["place"] for found in finished if "place" in found["data"]),
        },
    }


def _seed(run: Run, results: Mapping[str, Any], value: float) -> dict[str, Any]:
    """Returns the entry of one run of a cell."""
    kept = {"kept": results["kept"]} if "kept" in results else {}
    made = {key: results[key] for key in ("steps", "parameters", "seconds")}
    return {"seed": run.seed, "value": value, "folder": "/".join(run.folder.parts[-2:]), **made, **kept}


def distinct(values: Iterable[Any]) -> list[Any]:
    """Returns the values without duplicates, in order."""
    result: list[Any] = []
    for value in values:
        if value not in result:
            result.append(value)
    return result


def scaled_down(planned: Mapping[tuple[str, str], Sequence[Run]]) -> dict[str, list[str]]:
    """Returns, for each recipe, the keys in which a run differs from the exact recipe: `key: exact → ours`."""
    result: dict[str, list[str]] = {}
    for run in unique(planned):
        lines = result.setdefault(run.recipe.name, [])
        lines += [line for line in run.changes if line not in lines]
    return result


def left_out(table: Table) -> dict[str, str]:
    """Returns the recipe of each column, by label, that has no small version."""
    return {column.label: column.recipe for column in table.columns if not column.small}


def transfer(planned: Mapping[tuple[str, str], Sequence[Run]]) -> dict[str, dict[str, str]]:
    """Returns the splits of each recipe that trains on one corpus and is measured on another."""
    result = {}
    for run in unique(planned):
        data = run.recipe.data
        splits = dict(data.splits or {}) if data.source == "corpus" else {}
        names = {split: choice.partition(":")[0] for split, choice in splits.items()}
        if any(is_transfer(names["train"], name) for name in names.values()):
            result[run.recipe.name] = splits
    return result


def texts(planned: Mapping[tuple[str, str], Sequence[Run]]) -> list[str]:
    """Returns a line for each data source of the runs, with its licence."""
    described = [describe_data({**run.recipe.data.model_dump(), "split": "train"}) for run in unique(planned)]
    parts = [part for data in described for part in data["described"].values()]
    return distinct(f"{part['title']}: {part['licence'] or 'licence not known'}" for part in parts)


def systems(planned: Mapping[tuple[str, str], Sequence[Run]]) -> dict[str, list[str]]:
    """Returns the overrides of the recipe for the system of each row, by row key."""
    result: dict[str, list[str]] = {}
    for (row, _), runs in planned.items():
        result[row] = distinct([*result.get(row, []), *runs[0].system])
    return result


def _ours(cell: Mapping[str, Any], digits: int) -> str:
    ours = cell["ours"]
    if ours["mean"] is None:
        return "-"
    spread = "" if ours["spread"] is None else f" ± {ours['spread']:.{digits}f}"
    return f"{ours['mean']:.{digits}f}{spread}"


def _millions(cell: Mapping[str, Any]) -> str:
    """The number of parameters, in millions, of a cell's models, which differ only in the seed."""
    seeds = cell["ours"]["seeds"]
    return f"{seeds[0]['parameters'] / 1e6:.1f}" if seeds else "-"


def _verdict(cell: Mapping[str, Any]) -> str:
    verdict = cell["verdict"]
    if verdict["text"] not in (ORDER, DIFFERS):
        return verdict["text"]
    return f"{verdict['text']} ({verdict['agreed']} of {verdict['compared']}, {verdict['clear']} clear)"


def _rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Returns the rows of the table, grouped by column, since rows are compared within a column."""
    solved = report["solved"] is not None
    sizes = any(cell["paper"]["parameters"] is not None for cell in report["cells"])
    names = ["", "column", "ours", "seeds", *(["solved"] if solved else []), "paper", "verdict"]
    rows = [[*names, *(["parameters, M: ours", "paper"] if sizes else [])]]
    for column in distinct(cell["column"] for cell in report["cells"]):
        for cell in (cell for cell in report["cells"] if cell["column"] == column):
            seeds = f"{len(cell['ours']['seeds'])} of {cell['ours']['wanted']}"
            rate, printed = cell.get("solve_rate"), cell["paper"]["parameters"]
            row = [cell["label"], cell["column_label"], _ours(cell, report["digits"]), seeds]
            row += ["-" if rate is None else f"{rate:.0%}"] if solved else []
            row += [cell["paper"]["text"] or "-", _verdict(cell)]
            rows.append([*row, *([_millions(cell), "-" if printed is None else f"{printed:g}"] if sizes else [])])
    return rows


def _describe(value: Any) -> str:
    return ", ".join(f"{name} {text}" for name, text in value.items()) if isinstance(value, dict) else str(value)


def _render(template: str, **values: Any) -> str:
    # The texts are Markdown, not HTML.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["describe"] = _describe
    return environment.get_template(template).render(**values).rstrip() + "\n"


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the report as Markdown, from the content of `<table>.json` only."""
    seconds = {seed["folder"]: seed["seconds"] for cell in report["cells"] for seed in cell["ours"]["seeds"]}
    made = {
        "table": _rows(report),
        "labels": {cell["row"]: cell["label"] for cell in report["cells"]},
        "minutes": [value / 60 for value in seconds.values()],
    }
    return _render("report.md.jinja", **{**report, **made})


def write(report: Mapping[str, Any], output: Path) -> Path:
    """Writes `<table>[_small].md` and `.json` into a folder; returns the path of the Markdown file."""
    name = report["table"] + ("_small" if report["small"] else "")
    write_json(output / f"{name}.json", dict(report))
    path = output / f"{name}.md"
    path.write_text(markdown(report), encoding="utf-8")
    return path


def write_card(report: Mapping[str, Any], folder: Path) -> Path:
    """Writes the folder `<table>[_small]` with the report as README.md and results.json; returns its path."""
    target = folder / (report["table"] + ("_small" if report["small"] else ""))
    write_json(target / "results.json", dict(report))
    (target / "README.md").write_text(card(report), encoding="utf-8")
    return target


def card(report: Mapping[str, Any]) -> str:
    """Returns the card of a report (README.md of its folder), from the content of `<table>.json` only."""
    return _render("card.md.jinja", report=markdown(report), texts=report["texts"])
