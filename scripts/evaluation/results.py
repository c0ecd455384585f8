"""The files in which measured numbers live, and what every one of them says about its origin.

A checkpoint folder may hold three of them; cards and figures are made from these files and from nothing else:

| file | written by | holds |
|---|---|---|
| `results.json` | `python -m whatwhere.scripts.train`, `...finetune` | the training run and its held-out loss |
| `length.json` | `python -m whatwhere.scripts.length` | bits per byte at multiples of the trained length |
| `lm_eval.json` | `collect_lm_eval`, from what `lm_eval --output_path` wrote | scores of lm-eval tasks |

`whatwhere.model_card.read_results` reads them, for the cards.
"""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import shlex
import sys
import tempfile
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


def provenance(module: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns what every results file says about its origin: the command, the date (UTC), the versions.

    Args:
        module: the module that was run, for example `whatwhere.scripts.length`.
        arguments: its command line arguments; None for those of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    return {
        "command": shlex.join(["python", "-m", module, *arguments]),
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
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
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
    tasks = {}
    for task, scores in report["results"].items():
        metrics = {}
        for key, value in scores.items():
            metric, comma, _ = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = scores.get(key.replace(metric, f"{metric}_stderr", 1))
                metrics[metric] = {
                    "value": value,
                    "standard_error": error if isinstance(error, int | float) else None,
                    "higher_is_better": report["higher_is_better"][task].get(metric),
                }
        tasks[task] = {
            "metrics": metrics,
            "version": report["versions"][task],
            "shots": report["n-shot"][task],
            "samples": report["n-samples"][task]["effective"],
            "split": report["configs"][task].get("test_split") or report["configs"][task].get("validation_split"),
        }
    date = datetime.datetime.fromtimestamp(report["date"], datetime.timezone.utc).isoformat(timespec="seconds")
    return {"tasks": tasks, "command": command, "date": date, "versions": versions()}
