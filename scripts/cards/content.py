"""The content of a model card, from results files and a configuration, in the form of `card_text`.

All numbers are from the configuration or a results file. The same files give the same bytes.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCard

from ...model_card import (
    NO_RESULTS,
    base_links,
    card_data,
    card_head,
    card_tags,
    card_text,
    known_origin,
    licence_text,
    loading_code,
    plain,
    sign,
)
from ...position_plan import max_length
from ..evaluation.data_description import HELD_OUT, describe_data, is_transfer, loss_unit, measured_text, text_of
from ..evaluation.length_report import heading, unit_of
from ..evaluation.length_report import table as length_table
from ..evaluation.results import markdown_table
from .metadata import datasets_of, eval_results, licence_of, unit_text
from .sample import generation

CHAT = """messages = [{"role": "user", "content": "What is a position encoding?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=100)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
HERE = "the id of this repository, or the path of this folder"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a card is made from.

    Attributes:
        results: from `read_results`; empty for a model without measurements.
        place: the output folder of training; None if the weights are in the card's folder.
        has_tokenizer: whether there is a tokenizer beside the weights.
        has_chat_template: whether the tokenizer has one.
        is_adapter: whether the weights are a LoRA adapter (peft).
        conversion: of weights that were converted and not trained since: what `conversion.json` says, the numbers of
            `parameters` and of `new` ones.
        compared: entries of other cards for the first length results, measured on the same text.
        figure, recipe_file: names of files beside the card.
    """

    config: Any
    results: Mapping[str, Any]
    place: str | None = None
    has_tokenizer: bool = False
    has_chat_template: bool = False
    is_adapter: bool = False
    conversion: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compared: Sequence[Mapping[str, Any]] = ()
    figure: str | None = None
    recipe_file: str | None = None

    @functools.cached_property
    def run(self) -> Mapping[str, Any]:
        """The results of training."""
        return self.results.get("results", {})

    @functools.cached_property
    def data(self) -> Mapping[str, Any]:
        """The data of training, with titles escaped for Markdown."""
        return described(self.run["data"]) if self.run.get("data") else {}

    @functools.cached_property
    def lengths(self) -> list[Mapping[str, Any]]:
        """Length results."""
        return [one for key, one in self.results.items() if key.startswith("length")]

    @functools.cached_property
    def tasks(self) -> Mapping[str, Any]:
        """Scores of lm-eval's tasks."""
        tasks = self.results.get("lm_eval", {}).get("tasks", {})
        return {name: {**task, "metrics": _with_meaning(task, self.config)} for name, task in tasks.items()}

    @functools.cached_property
    def base(self) -> str:
        """The names of the models that the weights were made from, linked to the Hub; empty without one."""
        names = self.run.get("base_model")
        if self.conversion and not self.conversion.get("source_weights_sha256"):
            names = self.conversion["source"]
        folder = None if names else self.run.get("base_folder") or self.conversion.get("source")
        if folder:
            return _code_span(folder)
        names = names or (not self.run and known_origin(self.config).get("base_model"))
        return base_links(names) if names else ""


def model_card(facts: Facts, *, name: str, weights: str, given: Mapping[str, Any] | None = None) -> ModelCard:
    """Builds the card of a model.

    Args:
        weights: their fingerprint.
        given: metadata that a user has given, see `given_metadata`.
    """
    config = facts.config
    blocks = [*_lengths(facts), *_metrics(facts), *_tasks(facts)]
    known = _known(facts)
    found = eval_results(facts.results, facts.tasks, config.vocab_size)
    metadata = card_data(
        config,
        **known,
        library_name="peft" if facts.is_adapter else "transformers",
        datasets=datasets_of(facts.data) or None,
        metrics=sorted({result.metric_type for result in found}) or None,
        tags=[*card_tags(config), *(["lora"] if facts.is_adapter else [])],
        model_name=name if found else None,
        eval_results=found or None,
    )
    about = "perplexity against length" if facts.lengths else "loss against training steps"
    figure = [f"![{about}]({facts.figure})"] if facts.figure else []
    text = card_text(
        config,
        name,
        kind=_kind(facts),
        summary=_summary(facts, has_results=bool(blocks)),
        results=[*figure, *blocks[:1]],
        code=_code(facts, name),
        notes=[*_notes(facts)],
        sections={
            "Training": [*_training(facts)],
            "Evaluation": [*blocks[1:], *_commands(facts.results)],
            "Limitations": ["\n".join(f"- {line}" for line in _limitations(facts))],
            "Licence": [*_licences(facts, metadata.license)],
        },
        has_code=facts.place is None and not facts.is_adapter,
    )
    return sign(metadata, text, weights, given or {})


def described(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `describe_data` with titles escaped for Markdown, and `split` without its slice."""
    about = describe_data(data)
    splits = {split: {**one, "title": plain(one["title"])} for split, one in about["described"].items()}
    return {**about, "described": splits, "split": about["split"].partition("[")[0]}


def headline(run: Mapping[str, Any], vocabulary: int) -> str:
    """Returns the main result of a training run with its metric and data; empty without one."""
    metrics, data = run.get("metrics", {}), run.get("data", {})
    if sets := metrics.get("test_sets"):
        name, scores = next(iter(sets.items()))
        return f"{100 * scores['token_error']:.2f} % wrong answer tokens, {data['task'].replace('_', ' ')}, {name}"
    unit, found = unit_text(loss_unit(run), vocabulary), []
    # Perplexity for text; the papers report nats for music and genomes.
    if "bits_per_byte" in metrics:
        found.append(f"{metrics['bits_per_byte']['value']:.4g} bits per byte")
        found += [f"perplexity {metrics['perplexity']['value']:.4g} per {unit}"] if "perplexity" in metrics else []
    elif "loss" in metrics:
        found.append(f"loss {metrics['loss']['value']:.4g} nats per {unit}")
    if not found:
        return ""
    corpus = f"`{data['splits'][data['split']]}`" if data["source"] == "corpus" else plain(text_of(data))
    return f"{', '.join(found)}, {corpus}"


def _code_span(name: str) -> str:
    """Returns the name of a file or folder as code, or as escaped text if it would end the code."""
    return f"`{name}`" if name.isprintable() and "`" not in name else plain(name)


def _fenced(text: str, language: str) -> str:
    """Returns text in a fence longer than those in the text."""
    fence = max(["```", *(f"{found}`" for found in re.findall("`{3,}", text))], key=len)
    return f"{fence}{language}\n{text}\n{fence}"


def _kind(facts: Facts) -> str:
    family = "GPT-2" if "gpt2" in facts.config.model_type else "Llama"
    count = facts.run.get("parameters") or facts.conversion.get("parameters")
    size = f" {count:,} parameters and" if count else ""
    return f"A {'LoRA adapter of a ' if facts.is_adapter else ''}{family}-style model with{size}"


def _summary(facts: Facts, *, has_results: bool) -> str:
    data, conversion = facts.data, facts.conversion
    made = "converted" if conversion else "fine-tuned" if facts.run else "made"
    text = f", {made} from {facts.base}" if facts.base else ""
    origin = facts.run.get("base_conversion") or {}
    # A base model on the Hub is the source itself.
    before = [] if facts.run.get("base_model") or not origin else [f"converted from {_code_span(origin['source'])}"]
    before += [f"dequantised from {_code_span(origin['gguf_file'])}"] if origin.get("gguf_file") else []
    text += f" ({', '.join(before)})" if before else ""
    if data:
        text += " on " if facts.base else ", trained on "
        text += _linked(data["described"].get("train") or data["described"][data["split"]])
    text += "."
    if result := headline(facts.run, facts.config.vocab_size):
        text += f" Held-out result: {result}."
    if conversion:
        new = f"Its {conversion['new']:,} new parameters are untrained. " if conversion["new"] else ""
        if file := conversion.get("gguf_file"):
            text += f" The weights of the source were dequantised from {_code_span(file)} (GGUF)."
        text += (
            f" It was not trained after the conversion. {new}An encoding that the source does not have needs "
            "fine-tuning (`whatwhere finetune`)."
        )
    return text if has_results else f"{text} {NO_RESULTS}"


def _linked(one: Mapping[str, Any]) -> str:
    """Returns the title of data, linked to their data set on the Hub if there is one."""
    return f"[{one['title']}](https://huggingface.co/datasets/{one['dataset']})" if one["dataset"] else one["title"]


def _note(unit: str, vocabulary: int, *, has_bytes: bool = True) -> str:
    """Returns the sentence on what a perplexity can be compared with; empty if it is per byte."""
    if unit == "byte":
        return ""
    text = f" Perplexity is per token of a tokenizer with {vocabulary:,} entries: not comparable between tokenizers"
    return text + ("; bits per byte are." if has_bytes else ".")


def _lengths(facts: Facts) -> Iterator[str]:
    for content in facts.lengths:
        own = [{**entry, "name": "**this model**"} for entry in content["checkpoints"]]
        others = facts.compared if content is facts.lengths[0] else ()
        linked = [{**entry, "name": f"[{entry['name']}](../{entry['name']}/README.md)"} for entry in others]
        title = plain(heading(own, measured_text(content["data"], own)))
        note = _note(unit_of(own), facts.config.vocab_size)
        if names := ", ".join(dict.fromkeys(one["name"] for one in (*own, *linked) if one.get("trained_on"))):
            note += f" {names}: measured on text that the model was trained on."
        yield f"{title}.{note}\n\n{length_table([*own, *linked], aligned=False)}"


def _metrics(facts: Facts) -> Iterator[str]:
    run, unit = facts.run, loss_unit(facts.run)
    metrics = dict(run.get("metrics", {}))
    if sets := metrics.pop("test_sets", {}):
        rows = [["test set", "differs in", "error per answer token", "error per sequence", "answers", "sequences"]]
        differences = _differences(run)
        for name, one in sets.items():
            errors = [f"{100 * one[key]:.2f} %" for key in ("token_error", "sequence_error")]
            rows.append([name.replace("_", " "), differences[name], *errors, f"{one['tokens']:,}"])
            rows[-1].append(f"{one['sequences']:,}")
        title = facts.data["described"][facts.data["split"]]["title"]
        text = f"Held-out samples of the {title}; answers are predicted from the correct tokens before them."
        yield f"{text}\n\n{markdown_table(rows)}"
    if metrics:
        text = f"Held-out loss on {plain(text_of(run['data']))}"
        text += f", sequences of {run['length']:,} tokens" if run.get("length") else ""
        text += f", {run['tokens']:,} tokens scored." if run.get("tokens") else "."
        if "perplexity" in metrics:
            text += _note(unit, facts.config.vocab_size, has_bytes="bits_per_byte" in metrics)
        if run.get("changed_documents"):
            text += f" The tokenizer changes the text of {run['changed_documents']:,} documents: bits per byte are not "
            text += "comparable with those of other tokenizers."
        names = {"loss": f"loss, nats per {unit}", "perplexity": f"perplexity per {unit}"}
        before, rows = run.get("metrics_before", {}), [["metric", "value"]]
        if before:
            rows = [["metric", "before fine-tuning", "after"]]
        for metric, one in metrics.items():
            first = [_score(before[metric]) if metric in before else "-"] if before else []
            rows.append([names.get(metric, metric.replace("_", " ")), *first, _score(one)])
        yield f"{text}\n\n{markdown_table(rows)}"


def _tasks(facts: Facts) -> Iterator[str]:
    if not facts.tasks:
        return
    text, lm_eval = "Zero-shot tasks (lm-eval).", facts.results["lm_eval"]
    if any(task.get("limit") is not None for task in facts.tasks.values()):
        text += " Scores on the first questions only are not comparable with scores on all questions."
    if lm_eval.get("truncated_requests"):
        text += f" {lm_eval['truncated_requests']:,} requests were longer than {lm_eval['max_length']:,} tokens and "
        text += "were truncated at the beginning."
    rows = [["task", "version", "split", "shots", "questions", "metric", "value"]]
    for name, task in facts.tasks.items():
        questions = f"{'first ' if task.get('limit') is not None else ''}{task['samples']:,}"
        about = [name, str(task["version"]), str(task["split"]), str(task["shots"]), questions]
        rows += [[*about, metric, _score(one)] for metric, one in task["metrics"].items()]
    yield f"{text}\n\n{markdown_table(rows)}"


def _score(one: Mapping[str, Any]) -> str:
    error = one.get("standard_error")
    return f"{one['value']:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def _with_meaning(task: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Leaves out perplexities above the vocabulary size, which are worse than chance and dominated by outliers."""
    metrics = task["metrics"].items()
    return {name: one for name, one in metrics if name != "perplexity" or one["value"] <= config.vocab_size}


def _differences(run: Mapping[str, Any]) -> dict[str, str]:
    """Returns, for each test set of a toy task, the parameters that differ from training."""
    sets = run["recipe"]["data"]["test_sets"] or {}
    return {
        name: ", ".join(f"{key} {value}" for key, value in changed.items() if key != "test_samples")
        for name, changed in sets.items()
    }


def _code(facts: Facts, name: str) -> str:
    """Returns the code that loads the model and, if it has a tokenizer, uses it."""
    comment = "the output folder of the training command" if facts.place else HERE
    code = loading_code(facts.config, facts.place or name, comment=comment, has_tokenizer=facts.has_tokenizer)
    if not facts.has_tokenizer:
        return code
    prompt, tokens = generation(facts.data, facts.conversion)
    if sample := facts.results.get("sample"):
        prompt, tokens = sample["prompt"], sample["tokens"]
    code += f'\ninputs = tokenizer({json.dumps(prompt, ensure_ascii=False)}, return_tensors="pt")\n'
    if card_head(facts.config)[0] != "AutoModelForCausalLM":
        return f"{code}print(model(**inputs)[0].shape)"
    code += f"output = model.generate(**inputs, max_new_tokens={tokens}, do_sample=False)\n"
    if not facts.data.get("example"):
        return f"{code}print(tokenizer.decode(output[0], skip_special_tokens=True))"
    code += 'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))\n'
    return f"{code}# correct answer: {facts.data['example']['answer']}"


def _notes(facts: Facts) -> Iterator[str]:
    """Yields what follows the code: a sample of the model's text, and how to make the weights if they are not here."""
    run = facts.run
    if sample := facts.results.get("sample"):
        # Bytes that are no text, as small models write them, would not survive in a file.
        text = "".join(one if one.isprintable() or one in "\t\n" else "\ufffd" for one in sample["text"])
        yield f"It prints:\n\n{_fenced(text, 'text')}"
        if facts.data.get("kind") == "text" and facts.data.get("prompt"):
            yield "The prompt is from the held-out text."
    if facts.has_chat_template:
        yield f"The tokenizer has a chat template:\n\n{_fenced(CHAT, 'python')}"
    if facts.place:
        time = f" ({run['seconds'] / 60:,.1f} minutes, device `{run['device']}`)" if run.get("seconds") else ""
        yield (
            f"The weights are not published. This command trains them{time}; other machines and versions give slightly "
            f"different weights:\n\n{_fenced(run['command'], 'bash')}"
        )
    if not facts.has_tokenizer:
        yield "No tokenizer is saved with the model."


def _training(facts: Facts) -> Iterator[str]:
    """Yields the blocks of the section on training; none without a training run."""
    run, data = facts.run, facts.data
    if not run:
        return
    if settings := [*map(list, _settings(facts))]:
        yield markdown_table([["setting", "value"], *settings])
    if data:
        rows = [["split", "documents", "corpus"]]
        for split, one in data["described"].items():
            rows.append(
                [split, _documents(facts, split), _linked({**one, "title": one["title"].replace(HELD_OUT, "")})]
            )
        yield markdown_table(rows)
        if data.get("place") == "local files":
            yield (
                "The data were local files in the folder `WHATWHERE_DATA_DIR`. Without this variable the data are "
                "downloaded, and versions can differ."
            )
    if facts.recipe_file:
        yield f"The recipe, with all defaults: [{facts.recipe_file}]({facts.recipe_file})."
    if not facts.place:
        yield _fenced(run["command"], "bash")
    yield _origin("results", run)


def _documents(facts: Facts, split: str) -> str:
    """Returns which documents are in a split."""
    data = facts.data
    if choice := data["described"][split]["choice"]:
        return f"`{choice}`"
    texts = data.get("mixture") or [data]
    if not any(text.get("train_file") and not text.get("validation_file") for text in texts):
        return "all" if all(text.get("source") == "local" for text in texts) else f"the {split} split"
    if split == "train":
        return "all but the held-out part"
    count = sum(text["documents"] for text in (facts.run.get("held_out") or {}).get("texts", ()))
    return "the held-out part" + (f", of {count:,} document{'s' * (count > 1)}" if count else "")


def _settings(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yields the rows of the table of a training run."""
    run, curves = facts.run, facts.results.get("curves", {})
    recipe = run.get("recipe") or {}
    # Fine-tuning records its own options as the recipe.
    training = run.get("training") or recipe.get("training") or {}
    numbers = {"steps": "optimiser steps", "tokens_trained": "tokens seen", "samples_trained": "samples seen"}
    numbers |= {"length": "sequence length", "seed": "seed", "seconds": "seconds"}
    for key, label in numbers.items():
        if run.get(key) is not None:
            yield label, f"{run[key]:,.0f}"
        if key == "samples_trained" and "batch_size" in training:
            tokens = run.get("tokens_trained")
            each = f", {tokens // run['steps']:,} tokens" if tokens and run.get("steps") else ""
            yield "batch size per step", f"{training['batch_size']:,} sequences{each}"
    if "learning_rate" in training:
        yield from _optimisation(training, recipe)
    if kept := run.get("kept"):
        yield "step of the lowest validation loss, whose weights were kept", f"{kept['step']:,}"
    if curves.get("training"):
        yield f"training loss at the end, nats per {loss_unit(run)}", f"{curves['training'][-1]['loss']:.4f}"
    if curves.get("validation"):
        last = curves["validation"][-1]
        yield f"validation loss after step {last['step']:,}, nats per {loss_unit(run)}", f"{last['loss']:.4f}"
    if run.get("commit"):
        yield "commit", run["commit"]


def _optimisation(training: Mapping[str, Any], recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "optimiser", f"AdamW, betas {training['beta1']:g} and {training['beta2']:g}, epsilon {training['epsilon']:g}"
    yield "learning rate", f"{training['learning_rate']:g}"
    if recipe.get("new_learning_rate") is not None:
        yield "learning rate of new parameters", f"{recipe['new_learning_rate']:g}"
    least = training["minimum_learning_rate"]
    schedule = {"cosine": f"cosine, down to {least:g}", "linear": "linear, down to 0"}
    yield "schedule", schedule.get(training["schedule"], training["schedule"])
    yield "warm-up", f"{training['warmup_steps']:,} steps"
    yield "weight decay", f"{training['weight_decay']:g}"
    if training["clip_norm"] is not None:
        yield "largest gradient norm", f"{training['clip_norm']:g}"
    yield "precision", "bfloat16, mixed" if training["mixed_precision"] == "bf16" else "float32"
    if recipe.get("lora"):
        dropout = f", dropout {recipe['lora_dropout']:g}" if recipe["lora_dropout"] else ""
        yield "LoRA", f"rank {recipe['lora_rank']}, alpha {recipe['lora_alpha']:g}{dropout}"


def _commands(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the commands of all measurements after training."""
    for file, one in results.items():
        if file != "results" and "command" in one:
            commands = dict.fromkeys(run["command"] for run in (*one.get("earlier", []), one))
            yield _fenced("\n".join(commands), "bash")
            yield _origin(file, one)


def _origin(file: str, one: Mapping[str, Any]) -> str:
    versions = [f"{package} {version}" for package, version in (one.get("versions") or {}).items()]
    return ", ".join([f"`{file}.json`", one["date"], *versions]) + "."


def _limitations(facts: Facts) -> Iterator[str]:
    run, data, limit = facts.run, facts.data, max_length(facts.config)
    if facts.is_adapter:
        yield "It is loaded onto the model in `adapter_config.json` (`base_model_name_or_path`), by path or Hub id."
    if run.get("tokens_trained") and run.get("parameters"):
        text = f"{'Fine-tuned' if facts.base else 'Trained'} on {run['tokens_trained']:,} tokens, "
        text += f"{run['tokens_trained'] / run['parameters']:.2f} per parameter. The results apply to this size and "
        yield f"{text}budget only."
    if run.get("seed") is not None:
        yield f"One training run, seed {run['seed']}; this card has no other seeds."
    corpora = [data.get("described", {}).get(split, {}).get("corpus") for split in ("train", data.get("split"))]
    if is_transfer(*corpora):
        text = f"Trained on `{corpora[0]}` and measured on `{corpora[1]}`: "
        yield f"{text}the difference between the two is part of the result."
    text = f"The configured length is {facts.config.max_position_embeddings:,} tokens; the encoding "
    text += "has no limit." if limit is None else f"supports at most {limit:,}."
    yield f"{text} Quality beyond the trained length is known only at the measured lengths."
    entries = [entry for content in facts.lengths for entry in content["checkpoints"]]
    is_longer = any(cell["length"] > entry["trained_length"] for entry in entries for cell in entry["cells"])
    if data.get("kind") == "text" and not is_longer:
        yield "Length extrapolation was not measured."
    if data.get("kind") == "text" and not facts.tasks:
        yield "Zero-shot tasks were not measured."
    if data.get("kind") == "task":
        yield "It only models the symbols of one generated task. It is not a language model."
    elif data.get("kind") == "symbols":
        yield "It generates symbols of its own tokenizer, and can reproduce its training data."
    elif facts.base:
        only = "" if facts.conversion or not facts.run else "This card describes the fine-tuning only. "
        yield f"{only}For the data and the limits of {facts.base}, see its card."
    else:
        yield "It was not trained to follow instructions or for safety, and can reproduce its training text."


def _known(facts: Facts) -> dict[str, Any]:
    """Returns the metadata of the base model and the licence: of a run, or of what the weights were made from."""
    if not facts.run:
        return known_origin(facts.config)
    known = {key: facts.run.get(key) for key in ("base_model", "license_name", "license_link")}
    return {**known, "license": licence_of(facts.run)}


def _licences(facts: Facts, licence: Any) -> Iterator[str]:
    """Yields the licence of the weights, and those of the data."""
    if not licence:
        yield "The licence of the weights is not stated" + (f"; that of {facts.base} applies." if facts.base else ".")
    elif facts.base:
        yield f"Weights: {licence_text(licence)}, as in the card of {facts.base}."
    else:
        yield f"Code, weights and this card: {licence_text(licence)}."
    titles: dict[str, str] = {}
    for one in facts.data.get("described", {}).values():
        titles.setdefault(one["title"].replace(HELD_OUT, ""), one["licence"] or "not known")
    if titles:
        yield "Licences of the data:"
        yield "\n".join(f"- {title}: {licence}" for title, licence in titles.items())
