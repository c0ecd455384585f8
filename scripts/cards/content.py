"""The content of a model card: the template `templates/model.md`, filled from results files and a configuration.

All numbers are from the configuration or a results file. The same files give the same bytes.
"""

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ...model_card import card_head, card_tags, encoding_rows, encoding_text, loading_code, plain, sign
from ...position_plan import max_length
from ..evaluation.data_description import describe_data, is_transfer, loss_unit, measured_text, text_of
from ..evaluation.length_report import heading
from ..evaluation.length_report import table as length_table

TEMPLATE = pathlib.Path(__file__).with_name("templates") / "model.md"
HERE = "the id of this repository, or the path of this folder"


def model_card(
    config: Any,
    results: Mapping[str, Any],
    *,
    name: str,
    weights: str,
    place: str | None = None,
    has_tokenizer: bool = False,
    is_adapter: bool = False,
    conversion: Mapping[str, Any] | None = None,
    compared: Sequence[Mapping[str, Any]] = (),
    **files: Any,
) -> ModelCard:
    """Builds the card of a model.

    Args:
        results: from `read_results`; empty for a model without measurements.
        place: the output folder of training; None if the weights are in the card's folder.
        is_adapter: whether the weights are a LoRA adapter (peft).
        conversion: of weights that were converted and not trained since: `source`, `new` (the number of new parameters)
            and `card_metadata`.
        compared: entries of other cards for the first length results, measured on the same text.
        has_tokenizer: whether there is a tokenizer beside the weights.
        files: for the template: the names of `figure` and `recipe_file`.
    """
    training = dict(results.get("results", {}))
    data = described(training["data"]) if training.get("data") else {}
    split = data.get("split")
    measured = [one for key, one in results.items() if key.startswith("length")]
    lengths = [_length(one, compared if one is measured[0] else ()) for one in measured]
    lm_eval = results.get("lm_eval", {})
    tasks = {name: {**task, "metrics": _with_meaning(task, config)} for name, task in lm_eval.get("tasks", {}).items()}
    found = [*_trained(training), *_lengths(results), *_tasks(tasks)]
    auto, pipeline = card_head(config)
    stated = {**conversion, "licence": conversion.get("license", "unknown")} if conversion else training
    metadata = ModelCardData(
        license=licence_of(stated),
        license_name=stated.get("license_name"),
        license_link=stated.get("license_link"),
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=pipeline,
        base_model=stated.get("base_model"),
        datasets=_datasets(data) or None,
        metrics=sorted({result.metric_type for result in found}) or None,
        tags=[*card_tags(config), *(["lora"] if is_adapter else [])],
        model_name=name if found else None,
        eval_results=found or None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=plain(name),
        config=config,
        encoding=encoding_text(config.position_encoding),
        family="GPT-2" if "gpt2" in config.model_type else "Llama",
        parameters=encoding_rows(config),
        headline=headline(training),
        training=training,
        metrics={metric: one for metric, one in training.get("metrics", {}).items() if metric != "test_sets"},
        test_sets=training.get("metrics", {}).get("test_sets", {}),
        differences=_differences(training),
        curves=results.get("curves"),
        data=data,
        unit=loss_unit(training),
        held_out=plain(text_of(training["data"])) if data else "",
        lengths=lengths,
        lm_eval=lm_eval,
        tasks=tasks,
        origins={file: one for file, one in results.items() if "command" in one},
        auto=auto,
        quote=functools.partial(json.dumps, ensure_ascii=False),
        loading=loading_code(
            config,
            place or name,
            comment="the output folder of the training command" if place else HERE,
            has_tokenizer=has_tokenizer,
        ),
        is_here=place is None,
        has_tokenizer=has_tokenizer,
        is_adapter=is_adapter,
        conversion=conversion,
        **files,
        limit=max_length(config),
        is_transfer=is_transfer(*(data.get("described", {}).get(key, {}).get("corpus") for key in ("train", split))),
    )
    return sign(card.data, card.text, weights)


def described(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `describe_data` with titles escaped for Markdown, and `split` without its slice."""
    about = describe_data(data)
    splits = {split: {**one, "title": plain(one["title"])} for split, one in about["described"].items()}
    return {**about, "described": splits, "split": about["split"].partition("[")[0]}


def licence_of(training: Mapping[str, Any]) -> Any:
    """Returns the licence of weights: the one in the results, or Apache-2.0 if trained from scratch on known text."""
    if not training or training.get("licence") or training.get("base_model") or training.get("base_weights_sha256"):
        return training.get("licence") or "unknown"
    texts = describe_data(training["data"])["described"].values()
    return "apache-2.0" if all(text["licence"] for text in texts) else "unknown"


def headline(training: Mapping[str, Any]) -> str:
    """Returns the main result of a training run with its metric and data; empty without one."""
    metrics, data = training.get("metrics", {}), training.get("data", {})
    if sets := metrics.get("test_sets"):
        name, scores = next(iter(sets.items()))
        return f"{100 * scores['token_error']:.2f} % wrong answer tokens, {data['task'].replace('_', ' ')}, {name}"
    # Perplexity for text; the papers report nats for music and genomes.
    name = "perplexity" if "bits_per_byte" in metrics else "loss"
    if name not in metrics:
        return ""
    unit = loss_unit(training)
    corpus = data["splits"][data["split"]] if data["source"] == "corpus" else text_of(data)
    return f"{name} per {unit} {metrics[name]['value']:.4g}, `{corpus}`"


def _with_meaning(task: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Leaves out perplexities above the vocabulary size, which are worse than chance and dominated by outliers."""
    metrics = task["metrics"].items()
    return {name: one for name, one in metrics if name != "perplexity" or one["value"] <= config.vocab_size}


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


def _trained(training: Mapping[str, Any]) -> Iterator[EvalResult]:
    for metric, score in training.get("metrics", {}).items():
        if metric != "test_sets":
            unit = None if metric == "bits_per_byte" else loss_unit(training)
            yield _result(training["data"], metric, score["value"], "final evaluation", unit=unit)
    for name, errors in training.get("metrics", {}).get("test_sets", {}).items():
        for metric in ("token_error", "sequence_error"):
            yield _result(training["data"], metric, errors[metric], f"test set {name.replace('_', ' ')}")


def _lengths(results: Mapping[str, Any]) -> Iterator[EvalResult]:
    """Yields perplexities by length, except on parts of a split, which are not comparable with others."""
    for length in (one for key, one in results.items() if key.startswith("length")):
        if length["data"].get("document_limit") or length["data"].get("text_tokens"):
            continue
        for entry in length["checkpoints"]:
            variant = f", {entry['variant']}" if entry["variant"] else ""
            for cell in (cell for cell in entry["cells"] if cell["reached"]):
                where = f"at {cell['length']} tokens{variant}"
                unit = entry.get("unit") or "token"
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


def _datasets(data: Mapping[str, Any]) -> list[str]:
    """Returns the Hub ids of the training data; empty if they are not from the Hub."""
    train = data.get("described", {}).get("train", {}).get("dataset")
    return [train] if train and data.get("place") != "local files" else []


def _differences(training: Mapping[str, Any]) -> dict[str, str]:
    """Returns, for each test set of a toy task, the parameters that differ from training."""
    if training.get("data", {}).get("source") != "task":
        return {}
    sets = training["recipe"]["data"]["test_sets"] or {}
    return {
        name: ", ".join(f"{key} {value}" for key, value in changed.items() if key != "test_samples")
        for name, changed in sets.items()
    }


def _length(length: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns `heading` and `table` of length results for the template."""
    own = [{**entry, "name": "**this model**"} for entry in length["checkpoints"]]
    others = [{**entry, "name": f"[{entry['name']}](../{entry['name']}/README.md)"} for entry in compared]
    table = length_table([*own, *others], aligned=False)
    return {"heading": plain(heading(own, measured_text(length["data"], own))), "table": table}
