"""The files in which measured numbers live, and what every one of them says about its origin.

A checkpoint folder may hold three of them; cards and figures are made from these files and from nothing else:

| file | written by | holds |
|---|---|---|
| `results.json` | `whatwhere train`, `whatwhere finetune` | the training run and its held-out loss |
| `length.json` | `python -m whatwhere.scripts.length` | bits per byte at multiples of the trained length |
| `lm_eval.json` | `python -m whatwhere.scripts.zero_shot`; `collect_lm_eval` | scores of lm-eval tasks |

`whatwhere.model_card.read_results` reads them, for the cards.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

PACKAGES = ("whatwhere", "torch", "transformers", "tokenizers", "datasets", "accelerate", "lm_eval")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that can change a number."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(command: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns what every results file says about its origin: the command, the date (UTC), the versions.

    Args:
        command: the sub-command of `whatwhere` that was run, for example `length`, or the name of a module.
        arguments: its command line arguments; None for those of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    return {
        "command": shlex.join([*(["python", "-m"] if "." in command else ["whatwhere"]), command, *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def check_writable(folder: str | pathlib.Path) -> None:
    """Raises OSError, which names the folder, if nothing can be written to it; it need not exist."""
    folder = pathlib.Path(folder)
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OSError(f"output={str(folder)!r} cannot be written: {error.strerror}.") from error


def write_json(path: str | pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a results file, whole or not at all; raises ValueError if a number is not finite."""
    path = pathlib.Path(path)
    try:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise ValueError(f"{path.name} would hold a number that is not finite: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file, whole or not at all, and waits until it is on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def collect_lm_eval(output_path: str | pathlib.Path, *, command: str) -> dict[str, Any]:
    """Returns the content of `lm_eval.json` from the newest file that `lm_eval --output_path` wrote.

    Args:
        output_path: the folder given to lm-eval.
        command: the command line that was run.

    Raises:
        FileNotFoundError: there is no results file in the folder.
    """
    files = sorted(pathlib.Path(output_path).rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{str(output_path)!r} holds no results_*.json: lm-eval wrote no results there.")
    report = json.loads(files[-1].read_text(encoding="utf-8"))
    date = datetime.datetime.fromtimestamp(report["date"], datetime.timezone.utc).isoformat(timespec="seconds")
    return {"tasks": lm_eval_tasks(report), "command": command, "date": date, "versions": versions()}


def lm_eval_tasks(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `tasks` of `lm_eval.json` from a report of lm-eval: of its `simple_evaluate`, or read from its file.

    A task gives `metrics` (by name: `value`, `standard_error`, `higher_is_better`), `version`, `shots`, `samples` and
    `split`. So does a group with scores of its own, such as BLiMP; its tasks are in its `subtasks`. A group without
    scores is left out, and its tasks stand for themselves.
    """
    members = report.get("group_subtasks", {})

    def leaves(name: str) -> list[str]:
        return [leaf for child in members.get(name, []) for leaf in leaves(child)] or [name]

    tasks = {name: _lm_eval_task(report, name) for name in report["results"] if not members.get(name)}
    for group in members:
        metrics = _lm_eval_metrics(report, group)
        subtasks = {name: tasks[name] for name in leaves(group) if name in tasks}
        if metrics and subtasks:
            common = {key: _common(task[key] for task in subtasks.values()) for key in ("shots", "split")}
            version = report["versions"].get(group, _common(task["version"] for task in subtasks.values()))
            samples = sum(task["samples"] for task in subtasks.values())
            entry = {"metrics": metrics, "version": version, "samples": samples, **common, "subtasks": subtasks}
            tasks = {name: task for name, task in tasks.items() if name not in subtasks} | {group: entry}
    return tasks


def _common(values: Iterable[Any]) -> Any:
    """The one value that all have, or None."""
    first, *others = values
    return first if all(value == first for value in others) else None


def _lm_eval_metrics(report: Mapping[str, Any], name: str) -> dict[str, Any]:
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


def _lm_eval_task(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    config = report["configs"][name]
    return {
        "metrics": _lm_eval_metrics(report, name),
        "version": report["versions"][name],
        "shots": report["n-shot"][name],
        "samples": report["n-samples"][name]["effective"],
        "split": config.get("test_split") or config.get("validation_split"),
    }
