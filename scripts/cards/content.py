"""What a model card says: results files and a configuration, put into the template `templates/model.md`.

No number is typed by hand: each comes from the configuration or from a results file, and the same files give the same
bytes.
"""

import functools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ...model_card import card_head, card_tags, sign
from ...position_registry import max_length
from ..evaluation.data_description import describe_data
from ..evaluation.length_report import table as length_table

TEMPLATE = pathlib.Path(__file__).with_name("templates") / "model.md"


def plain(text: str) -> str:
    """Returns text on one line in which Markdown sees no tag, such as `<unk>`, and no mark-up of its own."""
    return re.sub(r"[\\`*\[\]<|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def model_card(
    config: Any,
    results: Mapping[str, Any],
    *,
    name: str,
    weights: str,
    has_tokenizer: bool = False,
    figure: str | None = None,
    recipe_file: str | None = None,
    place: str | None = None,
    is_published: bool = True,
    compared: Sequence[Mapping[str, Any]] = (),
    paper_tables: Sequence[Mapping[str, str]] = (),
) -> ModelCard:
    """Builds the card of a model.

    Args:
        config: the model's configuration.
        results: from `read_results`; empty for a model about which nothing was measured.
        name: the Hub id or the name of the folder.
        weights: the fingerprint of the weights that the results are about.
        has_tokenizer: whether a tokenizer is saved with the model: the snippet uses it.
        figure: the file name of the figure, if there is one.
        recipe_file: the file with the recipe beside the card.
        place: the Hub id of the weights, or the folder that training makes; None for beside the card.
        is_published: whether the weights can be loaded without training.
        compared: entries of other cards in the first of the length results, measured on the same text.
        paper_tables: `name` and `title` of the papers' tables beside the card to which the run belongs.
    """
    training = dict(results.get("results", {}))
    data = described(training["data"]) if training.get("data") else {}
    measured = [one for key, one in results.items() if key.startswith("length")]
    lengths = [_length(one, compared if one is measured[0] else ()) for one in measured]
    lm_eval = results.get("lm_eval", {})
    tasks = {name: {**task, "metrics": _with_meaning(task, config)} for name, task in lm_eval.get("tasks", {}).items()}
    found = [*_trained(training), *_lengths(results), *_tasks(tasks)]
    auto, pipeline = card_head(config)
    metadata = ModelCardData(
        license=licence_of(training),
        library_name="transformers",
        pipeline_tag=pipeline,
        base_model=training.get("base_model"),
        datasets=_datasets(data) or None,
        metrics=sorted({result.metric_type for result in found}) or None,
        tags=card_tags(config),
        model_name=name if found else None,
        eval_results=found or None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=plain(name),
        config=config,
        family="GPT-2" if "gpt2" in config.model_type else "Llama",
        parameters=dict(_parameters(config)),
        headline=headline(training),
        training=training,
        metrics={metric: one for metric, one in training.get("metrics", {}).items() if metric != "test_sets"},
        test_sets=training.get("metrics", {}).get("test_sets", {}),
        differences=_differences(training),
        curves=results.get("curves"),
        data=data,
        lengths=lengths,
        lm_eval=lm_eval,
        tasks=tasks,
        origins={file: one for file, one in results.items() if "command" in one},
        auto=auto,
        quote=functools.partial(json.dumps, ensure_ascii=False),
        path=place or name,
        has_tokenizer=has_tokenizer,
        is_here=place is None,
        is_published=is_published,
        figure=figure,
        recipe_file=recipe_file,
        paper_tables=paper_tables,
        limit=max_length(config),
        is_transfer=_is_transfer(data),
    )
    return sign(card.data, card.text, weights)


def described(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `describe_data` with titles in which Markdown sees no mark-up, and `split` without the documents."""
    about = describe_data(data)
    splits = {split: {**one, "title": plain(one["title"])} for split, one in about["described"].items()}
    return {**about, "described": splits, "split": about["split"].partition("[")[0]}


def licence_of(training: Mapping[str, Any]) -> str:
    """Returns the licence of weights: what the run says, ours of those trained here from random weights, or unknown."""
    trained_here = bool(training) and not training.get("base_model")
    return str(training.get("licence") or ("apache-2.0" if trained_here else "unknown"))


def headline(training: Mapping[str, Any]) -> str:
    """Returns the first figure of a training run, with what it is; empty without one."""
    metrics, data = training.get("metrics", {}), training.get("data", {})
    if sets := metrics.get("test_sets"):
        name, scores = next(iter(sets.items()))
        return f"{100 * scores['token_error']:.2f} % wrong answer tokens, {data['task'].replace('_', ' ')}, {name}"
    # Perplexity where there is text; the papers give nats for music and genomes.
    name = "perplexity" if "bits_per_byte" in metrics else "loss"
    if name not in metrics:
        return ""
    corpus = (data.get("splits") or {}).get(data["split"]) or data.get("dataset") or data["source"]
    return f"{name} {metrics[name]['value']:.4g}, `{corpus}`"


def _with_meaning(task: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Leaves out perplexities above the vocabulary size: worse than guessing, and decided by a few questions."""
    metrics = task["metrics"].items()
    return {name: one for name, one in metrics if name != "perplexity" or one["value"] <= config.vocab_size}


def _result(data: Mapping[str, Any], metric: str, value: float, where: str) -> EvalResult:
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
        metric_name=f"{metric.replace('_', ' ')}, {where}",
        metric_value=_rounded(value),
    )


def _rounded(number: float) -> float:
    """Rounds to six significant digits."""
    return float(f"{number:.6g}")


def _trained(training: Mapping[str, Any]) -> Iterator[EvalResult]:
    for metric, score in training.get("metrics", {}).items():
        if metric != "test_sets":
            yield _result(training["data"], metric, score["value"], "final evaluation")
    for name, errors in training.get("metrics", {}).get("test_sets", {}).items():
        for metric in ("token_error", "sequence_error"):
            yield _result(training["data"], metric, errors[metric], f"test set {name.replace('_', ' ')}")


def _lengths(results: Mapping[str, Any]) -> Iterator[EvalResult]:
    """Measurements on parts of a split are left out: they are comparable with the same parts only."""
    for length in (one for key, one in results.items() if key.startswith("length")):
        if length["data"].get("document_limit") or length["data"].get("text_tokens"):
            continue
        for entry in length["checkpoints"]:
            variant = f", {entry['variant']}" if entry["variant"] else ""
            for cell in (cell for cell in entry["cells"] if cell["reached"]):
                where = f"at {cell['length']} tokens{variant}"
                yield _result(length["data"], "perplexity", cell["perplexity"], where)


def _tasks(tasks: Mapping[str, Any]) -> Iterator[EvalResult]:
    """Tasks of which some questions were asked (`--limit`) are left out."""
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
    """Returns the ids of the training data on the Hub; none if they came from elsewhere."""
    train = data.get("described", {}).get("train", {}).get("dataset")
    return [train] if train and data.get("place") != "local files" else []


def _parameters(config: Any) -> Iterator[tuple[str, Any]]:
    for key, value in (config.position_encoding_parameters or {}).items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        else:
            yield key, value
    for key, value in (getattr(config, "rope_parameters", None) or {}).items():
        yield f"rope_parameters.{key}", value


def _differences(training: Mapping[str, Any]) -> dict[str, str]:
    """Returns the parameters in which the test sets of a toy task differ from training, by their names."""
    if training.get("data", {}).get("source") != "task":
        return {}
    sets = training["recipe"]["data"]["test_sets"] or {}
    return {
        name: ", ".join(f"{key} {value}" for key, value in changed.items() if key != "test_samples")
        for name, changed in sets.items()
    }


def _is_transfer(data: Mapping[str, Any]) -> bool:
    names = [data.get("described", {}).get(split, {}).get("corpus") for split in ("train", data.get("split"))]
    # Forms of one corpus, such as `maestro_transposed` and `maestro`, are named alike.
    return all(names) and not names[0].startswith(names[1]) and not names[1].startswith(names[0])


def _length(length: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns `data` and `table` of length results for the template."""
    own = [{**entry, "name": "**this model**"} for entry in length["checkpoints"]]
    others = [{**entry, "name": f"[{entry['name']}](../{entry['name']}/README.md)"} for entry in compared]
    return {"data": described(length["data"]), "table": length_table([*own, *others], aligned=False)}
