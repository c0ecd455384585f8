"""The metadata of a model card: its licence, its data, and the results that the Hub shows."""

from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub import EvalResult

from ..evaluation.data_description import describe_data, loss_unit


def unit_text(unit: str, vocabulary: int) -> str:
    """Returns what loss and perplexity are per, for readers; `unit` is "byte" or "token"."""
    return "byte" if unit == "byte" else f"token of a {vocabulary:,}-entry tokenizer"


def licence_of(training: Mapping[str, Any]) -> Any:
    """Returns the licence of weights: the one in the results, or Apache-2.0 if trained from scratch on known text.

    None if it is not known.
    """
    if not training or training.get("licence") or training.get("base_model") or training.get("base_weights_sha256"):
        return training.get("licence")
    texts = describe_data(training["data"])["described"].values()
    return "apache-2.0" if all(text["licence"] for text in texts) else None


def eval_results(results: Mapping[str, Any], tasks: Mapping[str, Any], vocabulary: int) -> list[EvalResult]:
    """Returns the results for a card's metadata; `tasks` are those of lm-eval."""
    return [*_trained(results.get("results", {}), vocabulary), *_lengths(results, vocabulary), *_tasks(tasks)]


def _result(data: Mapping[str, Any], metric: str, value: float, where: str, *, unit: str | None = None) -> EvalResult:
    """Returns a result for a card's metadata; loss and perplexity have a unit."""
    about = describe_data(data)
    one = about["described"].get(about["split"]) or next(iter(about["described"].values()))
    return EvalResult(
        task_type="text-generation",
        dataset_type=str(
            one["corpus"] or one["dataset"] or about.get("task") or about.get("source") or about["corpus"]
        ),
        dataset_name=one["title"],
        dataset_split=about["split"],
        metric_type=metric,
        metric_name=metric.replace("_", " ") + f" per {unit}" * (unit is not None) + f", {where}",
        metric_value=_rounded(value),
    )


def _rounded(number: float) -> float:
    """Rounds to six significant digits."""
    return float(f"{number:.6g}")


def _trained(training: Mapping[str, Any], vocabulary: int) -> Iterator[EvalResult]:
    for metric, score in training.get("metrics", {}).items():
        if metric != "test_sets":
            unit = None if metric == "bits_per_byte" else unit_text(loss_unit(training), vocabulary)
            yield _result(training["data"], metric, score["value"], "final evaluation", unit=unit)
    for name, errors in training.get("metrics", {}).get("test_sets", {}).items():
        for metric in ("token_error", "sequence_error"):
            yield _result(training["data"], metric, errors[metric], f"test set {name.replace('_', ' ')}")


def _lengths(results: Mapping[str, Any], vocabulary: int) -> Iterator[EvalResult]:
    """Yields perplexities by length, except on parts of a split and on text of training: others are not comparable."""
    for length in (one for key, one in results.items() if key.startswith("length")):
        if length["data"].get("document_limit") or length["data"].get("text_tokens"):
            continue
        for entry in (one for one in length["checkpoints"] if not one.get("trained_on")):
            variant = f", {entry['variant']}" if entry["variant"] else ""
            for cell in (cell for cell in entry["cells"] if cell["reached"]):
                where = f"at {cell['length']} tokens{variant}"
                unit = unit_text(entry.get("unit") or "token", vocabulary)
                yield _result(length["data"], "perplexity", cell["perplexity"], where, unit=unit)


def _tasks(tasks: Mapping[str, Any]) -> Iterator[EvalResult]:
    """Yields scores of tasks, except those with `--limit`."""
    for name, task in tasks.items():
        for metric, score in task["metrics"].items() if task.get("limit") is None else ():
            yield EvalResult(
                task_type="text-generation",
                dataset_type=name,
                dataset_name=name,
                dataset_split=task["split"],
                dataset_args={key: task[key] for key in ("shots", "samples", "version") if task.get(key) is not None},
                metric_type="accuracy" if metric in ("acc", "acc_norm") else metric,
                metric_name=metric,
                metric_value=_rounded(score["value"]),
            )


def datasets_of(data: Mapping[str, Any]) -> list[str]:
    """Returns the Hub ids of the training data; empty if they are not from the Hub."""
    train = data.get("described", {}).get("train", {}).get("dataset")
    return [train] if train and data.get("place") != "local files" else []
