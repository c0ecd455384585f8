"""Results files: measured numbers with their origin, in the folder of a checkpoint.

Cards and figures are made from these files only:

| file | written by | contents |
|---|---|---|
| `results.json` | `whatwhere train`, `whatwhere finetune` | the training run and its held-out loss |
| `sample.json` | `whatwhere card` | how the model continues a prompt |
| `length.json`, `length_*.json` | `whatwhere length` | loss in windows of several lengths |
| `lm_eval.json` | `whatwhere zero-shot` | scores of lm-eval tasks |
| `ruler.json` (not in cards) | `whatwhere length --tasks ruler` | scores of RULER's tasks |

Their fields are in `schema.py`, which `read_json` checks.
`weights_sha256` is the fingerprint of the measured weights. Readers ignore files with another fingerprint.
"""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from whatwhere.model_card import weights_fingerprint

from ..checks import parse
from ..errors import program
from . import schema
from .data_description import describe_data

PACKAGES = (
    "whatwhere",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "peft",
    "lm_eval",
    "triton",
    "fla-core",
)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(command: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns the origin that every results file records; the arguments are by default those of this process."""
    return {
        "command": shlex.join([*program(), command, *(sys.argv[1:] if arguments is None else arguments)]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError if there is none, or not one as in `schema`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid JSON: {error}") from error
    parse(schema.schema_of(path.name, content), content, path=f"{path}: ")
    return content


def read_results(folder: str | pathlib.Path, *, weights: str | None = None) -> dict[str, Any]:
    """Returns the contents of a folder's results files on given weights, by file name without its ending.

    `weights` is their fingerprint; None for the weights in the folder, which also accepts files without a fingerprint.
    """
    folder = pathlib.Path(folder)
    own = weights or weights_fingerprint(folder)
    found = {}
    for path in result_files(folder):
        content = read_json(path)
        stated = content.get("weights_sha256")
        if stated == own or (stated is None and weights is None and "checkpoints" not in content):
            found[path.stem] = content
    return found


def results_of(folder: pathlib.Path) -> tuple[dict[str, Any], str]:
    """Returns the results of the weights in a folder, or of those that a card in it describes, and their fingerprint.

    Results are by file name without its ending. A card's training results have the recipe in `recipe.yaml`.
    """
    is_card = (folder / "card.json").is_file()
    weights = read_json(folder / "results.json")["weights_sha256"] if is_card else weights_fingerprint(folder)
    results = own_lengths(read_results(folder, weights=weights if is_card else None), weights)
    if is_card and "results" in results and (folder / "recipe.yaml").is_file():
        results["results"]["recipe"] = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    return results, weights


def own_entries(content: Mapping[str, Any], weights: str) -> dict[str, Any] | None:
    """Returns the entries of length results with the given weights; None if there are none.

    Commands that name none of these checkpoints are removed, unless no command names one.
    """
    entries = [entry for entry in content.get("checkpoints", []) if entry.get("weights") == weights]
    if not entries:
        return None
    keys = ("command", "date", "versions")
    runs = [*content.get("earlier", []), {key: content[key] for key in keys}]
    names = {entry.get("checkpoint", entry["name"]) for entry in entries}
    runs = [run for run in runs if any(name in run["command"] for name in names)] or runs
    data = describe_data(content["data"])
    return {"weights_sha256": weights, "data": data, "checkpoints": entries, "earlier": runs[:-1], **runs[-1]}


def own_lengths(results: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """Returns results whose length results are filtered with `own_entries`; empty ones are left out."""
    found = {name: own_entries(one, weights) if name.startswith("length") else one for name, one in results.items()}
    return {name: one for name, one in found.items() if one is not None}


def result_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths of the results files in a folder, in the order of a card."""
    return [path for pattern in schema.RESULT_FILES for path in sorted(pathlib.Path(folder).glob(pattern))]


def markdown_table(rows: Sequence[Sequence[str]], *, aligned: bool = False) -> str:
    """Returns a Markdown table with the first row as header; `aligned` pads the columns."""
    widths = [max(len(row[column]) for row in rows) if aligned else 0 for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * max(3, width + 2) for width in widths) + "|", *lines[1:]])


def lm_eval_tasks(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `tasks` of `lm_eval.json` from a report of lm-eval (`simple_evaluate`, or its results file).

    Each task has `metrics` (by name: `value`, `standard_error`, `higher_is_better`), `version`, `shots`, `samples` and
    `split`. A group with scores of its own, such as BLiMP, has the same, and its tasks in `subtasks`. A group without
    scores is left out, and its tasks are listed separately.
    """
    groups = {group: members for group, members in report.get("group_subtasks", {}).items() if members}
    tasks = {}
    for name in report["results"]:
        if name not in groups:
            config, version = report["configs"][name], report["versions"][name]
            about = {"shots": report["n-shot"][name], "samples": report["n-samples"][name]["effective"]}
            split = config.get("test_split") or config.get("validation_split")
            tasks[name] = {"metrics": _metrics(report, name), "version": version, **about, "split": split}
    for group, members in groups.items():
        if metrics := _metrics(report, group):
            subtasks = {name: tasks.pop(name) for name in members}
            first = subtasks[members[0]]
            version = report["versions"].get(group, first["version"])
            samples = sum(task["samples"] for task in subtasks.values())
            own = {"metrics": metrics, "version": version, "samples": samples, "subtasks": subtasks}
            tasks[group] = {**first, **own}
    return tasks


def _metrics(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    scores, metrics = report["results"].get(name, {}), {}
    for key, value in scores.items():
        metric, comma, _ = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            error = scores.get(key.replace(metric, f"{metric}_stderr", 1))
            metrics[metric] = {
                "value": value,
                "standard_error": error if isinstance(error, int | float) else None,
                "higher_is_better": report["higher_is_better"].get(name, {}).get(metric),
            }
    return metrics
