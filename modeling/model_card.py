"""The model card (README.md) of a checkpoint, written from its configuration and from measured results.

No number is typed by hand: each comes from the configuration or from a results file beside the weights, and the same
files give the same bytes. Results belong to weights: a results file that states the fingerprint of other weights
(`weights_sha256`) is left out, so that a model that was trained further does not carry old numbers. For the same reason
a card ends in a comment with a digest of its text, the fingerprint of its weights and the number of its own tags: a
card that nobody has edited is written again when other weights are saved beside it, and one that somebody has edited is
theirs.
"""

import hashlib
import json
import pathlib
import re
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

RESULT_FILES = ("results.json", "length.json", "lm_eval.json")
LIBRARY = "whatwhere"

# How a card begins that Transformers writes when a model is pushed to a repository that has none.
_GENERIC = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."
_MARK = "\n<!-- whatwhere.model_card text={text} weights={weights} tags={tags} -->\n"
_MARK_PATTERN = re.compile(
    _MARK.format(text=r"(?P<text>\w+)", weights=r"(?P<weights>\w+)", tags=r"(?P<tags>\d+)") + r"\Z"
)


def weights_fingerprint(folder: str | pathlib.Path) -> str:
    """Returns the SHA-256 of the folder's safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_results(folder: str | pathlib.Path, *, weights: str | None = None) -> dict[str, Any] | None:
    """Returns the contents of the results files in a folder, by file name without its ending, or None if there is none.

    Args:
        folder: the folder of a checkpoint.
        weights: take only files that state this fingerprint; by default those that state the fingerprint of the
            weights in the folder, or none.

    Raises:
        ValueError: a file is not a JSON object.
    """
    folder = pathlib.Path(folder)
    found: dict[str, Any] = {}
    for name in RESULT_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{name} in {str(folder)!r} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{name} in {str(folder)!r} must hold a JSON object.")
        stated = content.get("weights_sha256")
        if (weights is None and stated is None) or (
            stated is not None and stated == (weights or weights_fingerprint(folder))
        ):
            found[path.stem] = content
    return found or None


def model_card(
    config: Any,
    *,
    results: dict[str, Any] | None = None,
    name: str | None = None,
    weights: str | None = None,
    has_tokenizer: bool = False,
    figure: str | None = None,
) -> ModelCard:
    """Builds the card of a model.

    Args:
        config: the model's configuration.
        results: from `read_results`; None for a model about which nothing was measured.
        name: the Hub id or the name of the folder.
        weights: the fingerprint of the weights that the results are about.
        has_tokenizer: whether a tokenizer is saved beside the model: the snippet uses it.
        figure: the file name of the figure of length extrapolation, if there is one.
    """
    name = name or "model"
    results = results or {}
    architecture = (getattr(config, "architectures", None) or [""])[0]
    classifies = architecture.endswith("ForSequenceClassification")
    generates = architecture.endswith("ForCausalLM") or not architecture
    training = results.get("results", {})
    data = training.get("data", {})
    evaluations = _eval_results(results)
    metadata = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-classification" if classifies else "text-generation" if generates else None,
        base_model=training.get("base_model"),
        datasets=[data["dataset"]] if data.get("dataset") else None,
        metrics=sorted({result.metric_type for result in evaluations}) or None,
        tags=[LIBRARY, str(config.model_type), "position-encoding", *str(config.position_encoding).split("+")],
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
    )
    auto = "AutoModelForSequenceClassification" if classifies else "AutoModelForCausalLM" if generates else "AutoModel"
    sections = [
        f"# {name}",
        _description(config, training),
        "## Use\n\n" + _snippet(auto, name, has_tokenizer, data.get("example")),
        _encoding_section(config),
        _training_section(training),
        _results_section(results, figure),
        _limits_section(config),
        "## Licence\n\nApache-2.0.",
    ]
    text = "\n" + "\n\n".join(filter(None, sections)) + "\n"
    mark = _MARK.format(text=_digest(text), weights=weights or "none", tags=len(metadata.tags or []))
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n{text}{mark}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def folder_card(folder: str | pathlib.Path, config: Any, *, results: dict[str, Any] | None, name: str) -> ModelCard:
    """Builds the card of the checkpoint in a folder; see `model_card`."""
    folder = pathlib.Path(folder)
    return model_card(
        config,
        results=results,
        name=name,
        weights=weights_fingerprint(folder) if results else None,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        figure="length.png" if "length" in (results or {}) and (folder / "length.png").is_file() else None,
    )


def complete_card(
    folder: str | pathlib.Path, config: Any, *, source: str | pathlib.Path | None = None, name: str | None = None
) -> None:
    """Writes README.md into a folder of freshly saved weights, unless it holds a card that somebody wrote or edited.

    A card that Transformers generated is replaced (its tags are kept), and so is one of ours that nobody has edited,
    unless it is about the weights in the folder and there are no results here to write a better one.

    Args:
        folder: where the model was saved.
        config: the model's configuration.
        source: the folder that the model was loaded from, if any. Its results files, and those in `folder`, are used if
            they state the fingerprint of the weights now in `folder`.
        name: the Hub id; None for the folder's name.
    """
    folder = pathlib.Path(folder)
    path = folder / "README.md"
    results = None
    for place in dict.fromkeys(pathlib.Path(place) for place in (folder, source) if place):
        if results is None and any((place / file).is_file() for file in RESULT_FILES):
            results = read_results(place, weights=weights_fingerprint(folder))
    tags: list[str] = []
    if path.is_file():
        old = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
        mark = _MARK_PATTERN.search(old.text)
        ours = mark is not None and mark["text"] == _digest(old.text[: mark.start()])
        if not ours and _GENERIC not in old.text:
            return
        if mark and ours and not results and mark["weights"] == weights_fingerprint(folder):
            return
        # Those that somebody added: ours come first.
        tags = old.data.get("tags", [])[int(mark["tags"]) if mark else 0 :]
    card = folder_card(folder, config, results=results, name=name or folder.resolve().name)
    card.data["tags"] = list(dict.fromkeys([*card.data["tags"], *tags]))
    card.save(path)


def _value(number: float) -> float:
    """Rounds to six significant digits."""
    return float(f"{number:.6g}")


def _eval_results(results: dict[str, Any]) -> list[EvalResult]:
    found = []
    training = results.get("results", {})
    if training.get("metrics"):
        data = training["data"]
        for metric, score in _metrics(training):
            found.append(_language_modelling(data, metric, score["value"], "final evaluation"))
        for name, scores in _test_sets(training).items():
            for metric in ("token_error", "sequence_error"):
                where = f"test set {name.replace('_', ' ')}"
                found.append(_language_modelling(data, metric, scores[metric], where))
    for cell in _cells(results.get("length")):
        if cell["reached"]:
            data = results["length"]["data"]
            where = f"at {cell['length']} tokens"
            found.append(_language_modelling(data, "bits_per_byte", cell["bits_per_byte"], where))
    for task, scores in results.get("lm_eval", {}).get("tasks", {}).items():
        for metric, score in scores["metrics"].items():
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=task,
                    dataset_name=task,
                    dataset_split=scores["split"],
                    dataset_args={"shots": scores["shots"], "samples": scores["samples"], "version": scores["version"]},
                    metric_type="accuracy" if metric in ("acc", "acc_norm") else metric,
                    metric_name=metric,
                    metric_value=_value(score["value"]),
                )
            )
    return found


def _language_modelling(data: dict[str, Any], metric: str, value: float, where: str) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=data.get("dataset") or data["source"],
        dataset_name=_data_name(data),
        dataset_split=data["split"],
        metric_type=metric,
        metric_name=f"{metric.replace('_', ' ')}, {where}",
        metric_value=_value(value),
    )


def _metrics(training: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the metrics of a `results.json` that are one number each."""
    return [(name, score) for name, score in training.get("metrics", {}).items() if name != "test_sets"]


def _test_sets(training: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns a toy task's scores in a `results.json`, by test set."""
    return training.get("metrics", {}).get("test_sets", {})


def _data_name(data: dict[str, Any]) -> str:
    if data.get("dataset"):
        return str(data["dataset"])
    if data.get("task"):
        return f"toy task {data['task'].replace('_', ' ')}"
    return {"stdlib": "source code of Python's standard library", "local": "local files"}.get(
        data["source"], str(data["source"])
    )


def _cells(length: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the measurements in a `length.json` that is about one checkpoint."""
    checkpoints = (length or {}).get("checkpoints", [])
    return checkpoints[0]["cells"] if len(checkpoints) == 1 else []


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _command(origin: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in origin.get("versions", {}).items())
    when = " on ".join(filter(None, [origin.get("date", ""), versions]))
    return f"```bash\n{origin['command']}\n```" + (f"\n\n{when}." if when else "")


def _description(config: Any, training: dict[str, Any]) -> str:
    sizes = {
        "parameters": training.get("parameters"),
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "configured length": config.max_position_embeddings,
    }
    rows = [["", ""], *([key, f"{value:,}"] for key, value in sizes.items() if value)]
    base = training.get("base_model")
    return (
        f"A language model of the family `{config.model_type}`, position encoding `{config.position_encoding}`. "
        + (f"Fine-tuned from `{base}`. " if base else "")
        + f"Made with `{LIBRARY}`; the code that it needs is in this repository.\n\n"
        + _table(rows)
    )


def _snippet(auto: str, name: str, has_tokenizer: bool, example: dict[str, Any] | None = None) -> str:
    lines = [f"from transformers import {auto}" + (", AutoTokenizer" if has_tokenizer else "")]
    lines += ["", f'name = "{name}"  # the id of this repository, or the path of this folder']
    lines.append(f"model = {auto}.from_pretrained(name, trust_remote_code=True)")
    if has_tokenizer:
        # It reads the model's configuration, which is code of this repository.
        lines.append("tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)")
        prompt = json.dumps(example["prompt"] if example else "def main(")
        lines.append(f'inputs = tokenizer({prompt}, return_tensors="pt")')
        if example and auto == "AutoModelForCausalLM":
            lines.append(f"output = model.generate(**inputs, max_new_tokens={example['tokens']}, do_sample=False)")
            lines.append('print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))')
            lines.append(f"# the right answer: {example['answer']}")
        elif auto == "AutoModelForCausalLM":
            lines.append("output = model.generate(**inputs, max_new_tokens=40)")
            lines.append("print(tokenizer.decode(output[0]))")
        else:
            lines.append("print(model(**inputs)[0].shape)")
        return "```python\n" + "\n".join(lines) + "\n```"
    return (
        "```python\n" + "\n".join(lines) + "\n```\n\nNo tokenizer was saved with the model when this card was written."
    )


def _encoding_section(config: Any) -> str:
    text = f"## Position encoding\n\n`position_encoding={config.position_encoding!r}`"
    rows = [["parameter", "value"]]
    for key, value in (config.position_encoding_parameters or {}).items():
        pairs = value.items() if isinstance(value, dict) else [(None, value)]
        rows += [[f"`{key}`" if inner is None else f"`{key}.{inner}`", f"`{item!r}`"] for inner, item in pairs]
    rope = getattr(config, "rope_parameters", None)
    rows += [[f"`rope_parameters.{key}`", f"`{value!r}`"] for key, value in (rope or {}).items()]
    return text + ("\n\n" + _table(rows) if len(rows) > 1 else ", which has no parameters.")


def _training_section(training: dict[str, Any]) -> str:
    recipe = training.get("recipe")
    if not recipe:
        return "## Training\n\nNo training run is recorded for these weights."
    data = training.get("data", {})
    facts = {
        "data": _data_name(data) if data.get("source") else None,
        "optimiser steps": training.get("steps"),
        "tokens seen": training.get("tokens_trained"),
        "samples seen": training.get("samples_trained"),
        "seed": training.get("seed"),
        "seconds": training.get("seconds"),
        "device": training.get("device"),
        "commit": training.get("commit"),
    }
    rows = [["", ""]]
    for key, value in facts.items():
        if value is not None:
            text = (
                f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if isinstance(value, float) else str(value)
            )
            rows.append([key, text])
    text = f"{_table(rows)}\n\n" if len(rows) > 1 else ""
    text += "The recipe, with every default filled in:"
    return f"## Training\n\n{text}\n\n```json\n{json.dumps(recipe, indent=2)}\n```"


def _results_section(results: dict[str, Any], figure: str | None) -> str:
    parts = ["## Results"]
    training = results.get("results", {})
    if _test_sets(training):
        rows = [["test set", "differs in", "error per answer token", "error per sequence", "answers", "sequences"]]
        changed = training["recipe"]["data"]["test_sets"]
        for name, scores in _test_sets(training).items():
            differs = [f"{key} {value}" for key, value in changed[name].items() if key != "test_samples"]
            errors = [f"{100 * scores[metric]:.2f} %" for metric in ("token_error", "sequence_error")]
            counts = [f"{scores[count]:,}" for count in ("tokens", "sequences")]
            rows.append([name.replace("_", " "), ", ".join(differs), *errors, *counts])
        where = f"Held-out samples of the {_data_name(training['data'])}, each answer predicted from the right tokens"
        parts += [where + " before it:", _table(rows), _command(training)]
    if _metrics(training):
        data = training["data"]
        rows = [["metric", "value"]]
        for metric, score in _metrics(training):
            error = f" ± {score['standard_error']:.4f}" if score.get("standard_error") is not None else ""
            rows.append([metric.replace("_", " "), f"{score['value']:.4f}{error}"])
        where = f"Held-out loss on {_data_name(data)}, {data['split']} split"
        where += f", sequences of {training['length']} tokens" if training.get("length") else ""
        where += f", {training['tokens']:,} tokens scored" if training.get("tokens") else ""
        parts += [where + ":", _table(rows), _command(training)]
    cells = _cells(results.get("length"))
    if cells:
        length = results["length"]
        rows = [["tokens", "times trained length", "bits per byte", "standard error", "tokens scored"]]
        for cell in cells:
            if cell["reached"]:
                numbers = [f"{cell['bits_per_byte']:.4f}", _error(cell["standard_error"]), f"{cell['tokens']:,}"]
            else:
                numbers = ["cannot reach", "", ""]
            rows.append([str(cell["length"]), f"{cell['multiple']:g}", *numbers])
        where = f"Length extrapolation on {_data_name(length['data'])}, {length['data']['split']} split"
        parts += [where + ", the same tokens at every length:", _table(rows)]
        parts += [f"![bits per byte against sequence length]({figure})"] if figure else []
        parts += [_command(length)]
    tasks = results.get("lm_eval", {}).get("tasks", {})
    if tasks:
        rows = [["task", "version", "split", "shots", "samples", "metric", "value", "standard error"]]
        for task, scores in tasks.items():
            about = [task, *(str(scores[key]) for key in ("version", "split", "shots", "samples"))]
            for metric, score in scores["metrics"].items():
                rows.append([*about, metric, f"{score['value']:.4f}", _error(score["standard_error"])])
        parts += ["lm-eval:", _table(rows), _command(results["lm_eval"])]
    if len(parts) == 1:
        parts.append("There are no measured results for these weights.")
    return "\n\n".join(parts)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _limits_section(config: Any) -> str:
    return (
        "## Limits\n\n"
        f"The configuration states a length of {config.max_position_embeddings:,} tokens. Nothing is known about the "
        "model beyond the results above, at that length or a longer one. It was not tuned to follow instructions or to "
        "be safe, and can repeat what its training text holds."
    )
