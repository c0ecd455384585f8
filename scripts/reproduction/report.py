"""Reports: our results and the paper's, a verdict for each cell (see `verdict.py`), and the details of the runs.

Tables of our own have no verdicts. Their rows are compared with the first row of their group, paired by seed.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from whatwhere.model_card import PAPERS, paper_link

from ..evaluation.data_description import describe_data
from ..evaluation.results import read_json
from ..writing import write_json
from .drawing import curves, draw
from .measures import lift_off
from .runs import PlannedRun, unique
from .tables import Table
from .verdict import DIFFERS, ORDER, Cell, judge


def collect(table: Table, planned: Mapping[tuple[str, str], Sequence[PlannedRun]], *, small: bool) -> dict[str, Any]:
    """Returns the content of `<table>.json` without the command: the figures of all finished runs, compared."""
    columns = {column.key: column for column in table.columns}
    rows = {row.key: row for row in table.rows}
    results = {run.folder: run.results() for run in unique(planned)}
    cells: dict[tuple[str, str], Cell] = {}
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for (row, column), runs in planned.items():
        done = [(run, found) for run in runs if (found := results[run.folder]) is not None]
        read = [(run, found, columns[column].figure(found, run.folder)) for run, found in done]
        # NaN if the system does not support it.
        known = [(run, found, value) for run, found, value in read if value is not None]
        seeds = [_seed(table, *one) for one in known if not math.isnan(one[2])]
        values = tuple(seed["value"] for seed in seeds)
        exact = bool(done) and not columns[column].departs and not any(run.changes for run, _ in done)
        cell = Cell(row=row, column=column, paper=rows[row].figures[column], values=values, exact=exact)
        mean = cell.mean if values else None
        ours = {"mean": mean, "spread": cell.spread, "exact": exact, "wanted": len(runs), "seeds": seeds}
        about = {"row": row, "label": rows[row].label, "column": column, "column_label": columns[column].label}
        cells[row, column], entries[row, column] = cell, {**about, "ours": ours}
        if table.is_own:
            group, unsupported = rows[row].group, len(known) - len(seeds)
            entries[row, column] |= {"group": group, "measure": columns[column].measure, "not_supported": unsupported}
    firsts: dict[tuple[str, str], str] = {}
    for (row, column), entry in entries.items():
        cell = cells[row, column]
        if table.is_own:
            first = firsts.setdefault((entry["group"], column), row)
            entry["difference"] = None if first == row else _paired(cell, entry, entries[first, column])
        else:
            verdict = judge(cell, [other for other in cells.values() if other.column == column], table.margin)
            entry["verdict"] = dataclasses.asdict(verdict)
            entry["paper"] = {
                **{name: cell.paper and getattr(cell.paper, name) for name in ("text", "mean", "spread")},
                "parameters": rows[row].parameters.get(column),
            }
    finished = [found for found in results.values() if found is not None]
    return {
        "table": table.name,
        "small": small,
        "own": table.is_own,
        **{name: getattr(table, name) for name in ("title", "unit", "margin", "solved", "lifted", "digits", "choices")},
        "cells": list(entries.values()),
        "scaled_down": scaled_down(planned),
        "departs": {
            column.recipe: column.departs
            for column in table.columns
            if column.departs and column.key in {column for _, column in planned}
        },
        "left_out": left_out(table) if small else {},
        "texts": texts(planned),
        "systems": systems(planned),
        "runs": [run.command() for run in unique(planned)],
        "origin": {
            **{key: distinct(run[key] for run in finished) for key in ("commit", "device", "processes", "versions")},
            # Only corpora have a place: local files or the Hub.
            "corpora from": distinct(found["data"]["place"] for found in finished if "place" in found["data"]),
        },
    }


def _seed(table: Table, run: PlannedRun, results: Mapping[str, Any], value: float) -> dict[str, Any]:
    """Returns the entry of one run of a cell."""
    others = {"kept": results["kept"]} if "kept" in results else {}
    if table.lifted is not None:
        others["lift_off"] = lift_off(run.folder, table.lifted)
    made = {key: results[key] for key in ("steps", "parameters", "seconds")}
    return {"seed": run.seed, "value": value, "folder": folder_name(run.folder), **made, **others}


def folder_name(folder: Path) -> str:
    """Returns the name of a run's folder in reports: `<recipe>/<row>-seed<k>`."""
    return "/".join(folder.parts[-2:])


def _paired(cell: Cell, entry: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the difference to the first row: mean and sample standard deviation over the seeds that both have."""
    own, base = ({seed["seed"]: seed["value"] for seed in one["ours"]["seeds"]} for one in (entry, first))
    both = dataclasses.replace(cell, values=tuple(own[seed] - base[seed] for seed in own if seed in base))
    return (
        {"row": first["row"], "mean": both.mean, "spread": both.spread, "seeds": len(both.values)}
        if both.values
        else None
    )


def distinct(values: Iterable[Any]) -> list[Any]:
    """Returns the values without duplicates, in order."""
    result: list[Any] = []
    for value in values:
        if value not in result:
            result.append(value)
    return result


def scaled_down(planned: Mapping[tuple[str, str], Sequence[PlannedRun]]) -> dict[str, list[str]]:
    """Returns, for each recipe, the keys in which a run differs from the exact recipe: `key: exact → ours`."""
    result: dict[str, list[str]] = {}
    for run in unique(planned):
        lines = result.setdefault(run.recipe.name, [])
        lines += [line for line in run.changes if line not in lines]
    return result


def left_out(table: Table) -> dict[str, str]:
    """Returns the recipe of each column, by label, that has no small version."""
    return {column.label: column.recipe for column in table.columns if not column.small}


def texts(planned: Mapping[tuple[str, str], Sequence[PlannedRun]]) -> list[str]:
    """Returns a line for each data source of the runs, with its licence."""
    described = [describe_data({**run.recipe.data.model_dump(), "split": "train"}) for run in unique(planned)]
    parts = [part for data in described for part in data["described"].values()]
    return distinct(f"{part['title']}: {part['licence'] or 'licence not known'}" for part in parts)


def systems(planned: Mapping[tuple[str, str], Sequence[PlannedRun]]) -> dict[str, list[str]]:
    """Returns the overrides of the recipe for the system of each row, by row key."""
    result: dict[str, list[str]] = {}
    for (row, _), runs in planned.items():
        result[row] = distinct([*result.get(row, []), *runs[0].system])
    return result


def _mean(one: Mapping[str, Any] | None, digits: int, *, most: int = 0, sign: str = "") -> str:
    """Returns mean ± standard deviation, and the number of seeds if it is below `most`; `sign` as in a format."""
    if one is None or one["mean"] is None:
        return "-"
    count = one["seeds"] if isinstance(one["seeds"], int) else len(one["seeds"])
    spread = "" if one["spread"] is None else f" ± {one['spread']:.{digits}f}"
    return f"{one['mean']:{sign}.{digits}f}{spread}" + (f" (n = {count})" if count < most else "")


def _verdict(cell: Mapping[str, Any]) -> str:
    verdict = cell["verdict"]
    if verdict["text"] not in (ORDER, DIFFERS):
        return verdict["text"]
    return f"{verdict['text']} ({verdict['agreed']} of {verdict['compared']}, {verdict['clear']} clear)"


def _rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Returns the rows of a table with a row for each cell, by column, since rows are compared within a column."""
    own, solved, digits = report.get("own", False), report["solved"], report["digits"]
    sizes = not own and any(cell["paper"]["parameters"] is not None for cell in report["cells"])
    # Older results have no steps.
    lifted = any("lift_off" in seed for cell in report["cells"] for seed in cell["ours"]["seeds"])
    columns = distinct(cell["column"] for cell in report["cells"])
    rows = []
    for cell in sorted(report["cells"], key=lambda cell: columns.index(cell["column"])):
        seeds = cell["ours"]["seeds"]
        values = [seed["value"] for seed in seeds]
        row = {"system": cell["label"], "column": cell["column_label"]}
        if not own:
            row["ours"] = _mean(cell["ours"], digits)
        row["seeds"] = f"{len(values)} of {cell['ours']['wanted']}"
        if solved is not None:
            row["solved"] = f"{sum(value >= solved for value in values)} of {len(values)}"
            row["each seed"] = ", ".join(f"{value:.{digits}f}" for value in values) or "-"
        if lifted:
            steps = ("never" if seed["lift_off"] is None else f"{seed['lift_off']:,}" for seed in seeds)
            row["lifted off at step"] = ", ".join(steps) or "-"
        if not own:
            row |= {"paper": cell["paper"]["text"] or "-", "verdict": _verdict(cell)}
        if sizes:
            printed = cell["paper"]["parameters"]
            # A cell's models differ only in the seed.
            row["parameters, M: ours"] = f"{seeds[0]['parameters'] / 1e6:.1f}" if seeds else "-"
            row["parameters, M: paper"] = "-" if printed is None else f"{printed:g}"
        rows.append(row)
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def _own_rows(report: Mapping[str, Any]) -> list[list[list[str]]]:
    """Returns the rows of a table of our own, by system, and those of the differences, if there are any."""
    columns = {cell["column"]: cell["column_label"] for cell in report["cells"]}
    found = {(cell["row"], cell["column"]): cell for cell in report["cells"]}
    digits = report["digits"]
    means, differences = [["system", "seeds", *columns.values()]], [["system", "seeds", *columns.values()]]
    for row in distinct(row for row, _ in found):
        cells = [found.get((row, column)) for column in columns]
        mine = [cell for cell in cells if cell is not None]
        done = max(len(cell["ours"]["seeds"]) + cell["not_supported"] for cell in mine)
        texts = [
            ("not supported" if cell["not_supported"] else _mean(cell["ours"], digits, most=done)) if cell else ""
            for cell in cells
        ]
        means.append([mine[0]["label"], f"{done} of {mine[0]['ours']['wanted']}", *texts])
        if pairs := [cell["difference"]["seeds"] for cell in mine if cell["difference"]]:
            of = [cell and cell["difference"] for cell in cells]
            texts = [_mean(one, digits, most=max(pairs), sign="+") for one in of]
            differences.append([mine[0]["label"], str(max(pairs)), *texts])
    return [means, differences] if len(differences) > 1 else [means]


def _describe(value: Any) -> str:
    return ", ".join(f"{name} {text}" for name, text in value.items()) if isinstance(value, dict) else str(value)


def _render(**values: Any) -> str:
    # The texts are Markdown, not HTML.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["describe"] = _describe
    return environment.get_template("report.md.jinja").render(**values).rstrip() + "\n"


def markdown(report: Mapping[str, Any], *, card: bool = False) -> str:
    """Returns the report as Markdown, from the content of `<table>.json` only; `card`: README.md of its folder."""
    seconds = {seed["folder"]: seed["seconds"] for cell in report["cells"] for seed in cell["ours"]["seeds"]}
    # Results of older reports have fewer keys.
    own = report.get("own", False)
    labels = {cell["row"]: cell["label"] for cell in report["cells"]}
    differences = [cell.get("difference") for cell in report["cells"]]
    made = {
        "card": card,
        "own": own,
        "papers": [paper_link(source) for source in PAPERS if source in report["title"]],
        "lifted": report.get("lifted"),
        # If a run solves the task or not, means and differences say little.
        "tables": _own_rows(report) if own and report["solved"] is None else [_rows(report)],
        "figure": f"{name_of(report)}.png" if curves(report) else None,
        "labels": labels,
        "first": " or ".join(distinct(labels[one["row"]] for one in differences if one)),
        "minutes": [value / 60 for value in seconds.values()],
    }
    return _render(**{**report, **made})


def name_of(report: Mapping[str, Any]) -> str:
    """Returns the name of a report's files: `<table>[_small]`."""
    return report["table"] + ("_small" if report["small"] else "")


def check_replaces(results: Path, wanted: Iterable[PlannedRun]) -> None:
    """Raises ValueError if a report has results of other runs than `wanted`, which a new one would lose."""
    if not results.exists():
        return
    seeds = [seed for cell in read_json(results)["cells"] for seed in cell["ours"]["seeds"]]
    if lost := sorted({seed["folder"] for seed in seeds} - {folder_name(run.folder) for run in wanted}):
        raise ValueError(
            f"--cards is not valid: {str(results)!r} has results of other runs ({len(lost)}), such as {lost[0]!r}, "
            "that the new report would not have. Choose another folder, or move that file away."
        )


def write(report: Mapping[str, Any], text: str, path: Path, results: str) -> Path:
    """Writes the text of a report, and beside it the JSON file `results` and the figure; returns the path."""
    write_json(path.with_name(results), dict(report))
    path.write_text(text, encoding="utf-8")
    draw(report, path.with_name(f"{name_of(report)}.png"))
    return path
