"""What is read from a finished run, and the measurement of its length extrapolation after training."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whatwhere.model_card import weights_fingerprint

from ..analysis import deltas
from ..checks import differences
from ..evaluation import length
from ..evaluation.checkpoints import Loading
from ..evaluation.results import read_json

# A text of length measurements, as in their results: the first tokens of books, which are cut into windows one by one.
BOOKS: Mapping[str, Any] = {
    "corpus": "pg19",
    "split": "test",
    "document_limit": 4,
    "text_tokens": 20480,
    "joined": False,
}


def _error(results: Mapping[str, Any], folder: Path, test_set: str) -> float:
    """The share of wrong answer tokens on a test set, in percent."""
    return 100 * results["metrics"]["test_sets"][test_set]["token_error"]


def _validations(folder: Path, score: str) -> dict[int, float]:
    """Returns a score on the validation split by step, from `metrics.jsonl`."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line[f"validation_{score}"] for line in lines if f"validation_{score}" in line}


def _validation_perplexity(results: Mapping[str, Any], folder: Path) -> float:
    """The perplexity per token of the kept model on the validation split."""
    step = results["kept"]["step"] if "kept" in results else results["steps"]
    if (perplexity := _validations(folder, "perplexity").get(step)) is None:
        raise ValueError(f"{str(folder)!r} was not evaluated after its last step: its recipe needs evaluation.every.")
    return perplexity


def lift_off(folder: Path, lifted: float) -> int | None:
    """Returns the first step with `lifted` percent accuracy on the validation split; None if it never was."""
    if not (errors := _validations(folder, "token_error")):
        raise ValueError(f"{str(folder)!r} was not evaluated during training: its recipe needs evaluation.every.")
    return next((step for step, error in errors.items() if 100 - 100 * error >= lifted), None)


def measured(
    folder: Path, weights: str, text: Mapping[str, Any] = BOOKS, dtype: str = "float32"
) -> dict[float, dict[str, Any]]:
    """Returns the cells of a checkpoint's length measurement on a text, by multiples of the trained length.

    Measurements in another dtype than `dtype` are left out: `whatwhere length` repeats them.
    """
    path = folder / f"length_{text['corpus']}.json"
    if not path.is_file():
        return {}
    content = read_json(path)
    if changed := differences({key: content["data"].get(key) for key in text}, text):
        raise ValueError(f"{str(path)!r} is of another text (there → needed): {'; '.join(changed)}. Move it away.")
    wanted = (None, weights, dtype)
    entries = [
        one for one in content["checkpoints"] if (one["variant"], one["weights"], one.get("dtype", "float32")) == wanted
    ]
    return {cell["multiple"]: cell for entry in entries for cell in entry["cells"]}


def _length(results: Mapping[str, Any], folder: Path, multiple: str) -> float | None:
    """The perplexity per token in windows of a multiple of the trained length."""
    cell = measured(folder, results["weights_sha256"]).get(float(multiple))
    return None if cell is None else cell["perplexity"] if cell["reached"] else math.nan


def measure_lengths(
    folder: Path,
    multiples: Sequence[int],
    data_dir: str | os.PathLike[str] | None = None,
    text: Mapping[str, Any] = BOOKS,
) -> None:
    """Measures a checkpoint as `whatwhere length` does, in all windows that it has no results of."""
    known = measured(folder, weights_fingerprint(folder), text)
    if missing := [f"{multiple}x" for multiple in multiples if multiple not in known]:
        options = {"--documents": text["document_limit"], "--tokens": text["text_tokens"], "--data-dir": data_dir}
        given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        length.main([str(folder), "--data", text["corpus"], "--windows", ",".join(missing), *given])


def _deltas(results: Mapping[str, Any], folder: Path, name: str) -> float:
    """A share of PoPE's phase shifts, in percent; see `analysis.deltas.read`."""
    loading = Loading()
    return 100 * deltas.read(loading.model(str(folder), loading.config(str(folder))))[name]


MEASURES: dict[str, Callable[..., float | None]] = {
    "error": _error,
    "accuracy": lambda results, folder, test_set: 100 - _error(results, folder, test_set),
    # On the test split, or on the validation split if the recipe has no other.
    "perplexity": lambda results, folder: results["metrics"]["perplexity"]["value"],
    "loss": lambda results, folder: results["metrics"]["loss"]["value"],
    "validation_perplexity": _validation_perplexity,
    "length": _length,
    "deltas": _deltas,
}
