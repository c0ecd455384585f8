"""`whatwhere compare`: its help is in `cli/compare.py`."""

import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from whatwhere_cli.compare import parser

from ...model_card import encoding_text
from ..checks import differences, material
from ..evaluation.checkpoints import check_finished, names_of
from ..evaluation.curves import curves_figure, read_curves
from ..evaluation.data_description import curves_title, describe_data, loss_unit, measured_text, text_of
from ..evaluation.figures import save_figure
from ..evaluation.length_report import draw, heading, remove_numbered_figures
from ..evaluation.length_report import table as length_table
from ..evaluation.results import markdown_table, own_entries, read_json, result_files, results_of
from ..writing import check_writable

FACTS = ("parameters", "steps", "tokens_trained", "samples_trained", "length", "seed", "device", "base_model")
# Parts of a description of data that do not say which text is scored.
_NOTES = ("described", "example", "kind", "prompt", "splits")
# Names of the user's own files; the tokens say whether two texts are the same.
_NAMES = ("files", "held_out_part")
# Keys of a toy task's recipe that say which samples are scored, and how.
_TASK = ("loss", "task_parameters", "test_samples", "test_sets", "validation_samples")
# Differences of digests, in words.
_WORDS = {"train_sha256": "other training text", "tokens_sha256": "other evaluated text"}


class ModelResults(NamedTuple):
    """A folder: `results_of` it, those of training, its recipe, and what identifies its tokenizer."""

    name: str
    weights: str
    results: dict[str, Any]
    training: dict[str, Any]
    recipe: dict[str, Any]
    encoding: str
    tokenizer: dict[str, Any]


def read_run(folder: pathlib.Path, name: str, shared: Mapping[str, Mapping[str, Any]]) -> ModelResults:
    """Reads a folder and, from the length results `shared`, the entries with its weights.

    Prints which files are left out because they are of other weights.
    """
    if not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r} is not a folder.")
    results, weights = results_of(folder)
    for file in result_files(folder):
        if file.stem not in results:
            print(f"(!) {file.name} of {name} is left out: its results are of other weights.\n")
    results |= {stem: own for stem, content in shared.items() if (own := own_entries(content, weights))}
    if not results:
        check_finished(str(folder), "folder")
        raise ValueError(
            f"folder={str(folder)!r} is not valid: it has no results of weights in it. `whatwhere train` and "
            "`finetune` write results.json at the end, `length` and `zero-shot` length.json and lm_eval.json."
        )
    if "table" in results.get("results", {}):
        raise ValueError(f"folder={str(folder)!r} is not valid: its results are a table of the papers, not a model's.")
    training = results.get("results", {})
    if training and (folder / "metrics.jsonl").is_file():
        results["curves"] = read_curves(folder / "metrics.jsonl")
    found = {file: read_json(folder / file) for file in ("config.json", "tokenizer.json") if (folder / file).is_file()}
    config, recipe = found.get("config.json", {}), training.get("recipe") or {}
    # The tokenizer itself without settings of calls, or what it was made from.
    about: dict[str, Any] = {"name": (recipe["data"] if "training" in recipe else {}).get("tokenizer", f"of {name}")}
    about |= {"vocab_size": config.get("vocab_size"), "trained_on": None}
    if about["name"] == "bpe":
        about["trained_on"] = training.get("text_sha256")
    if "tokenizer.json" in found:
        parts = json.dumps({**found["tokenizer.json"], "truncation": None, "padding": None}, sort_keys=True)
        about["sha256"] = hashlib.sha256(parts.encode()).hexdigest()
    encoding = encoding_text(config.get("position_encoding") or training.get("position_encoding") or "-")
    return ModelResults(name, weights, results, training, recipe, encoding, about)


def scores(run: ModelResults, tokenizer: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields rows of the table: title, text, and how it was measured, if that matters; all but the lengths."""
    training, recipe, data = run.training, run.recipe, run.training.get("data", {})
    per = loss_unit(training)
    yield "encoding", run.encoding, {}
    if data:
        yield "trained on", describe_data(data)["described"]["train"]["title"], {}
        yield "evaluated on", text_of(data), {}
    for key in FACTS:
        if (value := training.get(key)) is not None:
            title = "sequence length" if key == "length" else key.replace("_", " ")
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            yield title, f"{value:,}" if isinstance(value, int) else shown, {}
    splits = data.get("splits") or {}
    text = {key: value for key, value in data.items() if key not in _NOTES and value is not None}
    text |= {key: recipe[key] for key in ("train_file", "validation_file") if recipe.get(key)}
    text["length"] = training.get("length")
    if "task" in data:
        # Training samples depend on the seed.
        train = text = text | {key: recipe["data"].get(key) for key in _TASK}
    else:
        text["tokenizer"] = tokenizer
        train = {**text, "train": splits.get("train"), "train_sha256": training.get("text_sha256")}
    if text.get("validation_file"):
        text = {key: value for key, value in text.items() if key != "train_file"}
    curves = run.results.get("curves", {"training": [], "validation": []})
    for title, rows, how in (
        ("training loss", curves["training"], train),
        ("validation loss", curves["validation"], {**text, "validation": splits.get("validation")}),
    ):
        if rows:
            yield title, f"{rows[-1]['loss']:.5g} nats per {per}", how
    text |= {"text": splits.get(data.get("split")), "tokens": training.get("tokens")}
    text["tokens_sha256"] = training.get("tokens_sha256")
    metrics = dict(training.get("metrics", {}))
    for name, errors in metrics.pop("test_sets", {}).items():
        yield f"wrong answer tokens, {name}", f"{errors['token_error']:.2%}", text
    for metric, score in metrics.items():
        unit = {"loss": f" nats per {per}", "perplexity": f" per {per}"}.get(metric, "")
        yield f"{metric.replace('_', ' ')}, {data['split']}", f"{score['value']:.5g}{unit}", text
    for name, task in run.results.get("lm_eval", {}).get("tasks", {}).items():
        how = {key: task.get(key) for key in ("version", "shots", "split", "samples", "limit", "data")}
        for metric, score in task["metrics"].items():
            error = "" if score["standard_error"] is None else f" ± {score['standard_error']:.3g}"
            first = "" if how["limit"] is None else f" (first {how['limit']} questions)"
            yield f"{name}, {metric}", f"{score['value']:.4g}{error}{first}", how


def tokenizers(runs: Sequence[ModelResults]) -> list[dict[str, Any]]:
    """Returns what tells tokenizers of runs apart: the tokenizer itself if all have it, else what is known of it."""
    key = ("sha256",) if all("sha256" in run.tokenizer for run in runs) else ("name", "vocab_size", "trained_on")
    return [{part: run.tokenizer[part] for part in key} for run in runs]


def reasons_for(basis: Mapping[str, Any], how: Mapping[str, Any]) -> str:
    """Returns in words how two measurements differ; empty if they do not."""
    found = []
    for line in differences(basis, how):
        key = line.partition(": ")[0]
        # Earlier versions recorded the tokens of the user's own files only.
        if key == "tokens_sha256" and None in (basis[key], how[key]) and "train_file" not in how:
            continue
        if key.startswith("tokenizer."):
            found.append("another tokenizer" if "'of " not in line else "a tokenizer that is not known")
        else:
            found.append(_WORDS.get(key, line))
    if "another tokenizer" in found:
        # Its tokens are others in any case.
        found = [text for text in found if text != _WORDS["tokens_sha256"]]
    return "; ".join(dict.fromkeys(found))


def titles_of(rows: Sequence[str]) -> str:
    """Returns the titles of rows with what several have in common at their end once: `loss, perplexity, test`."""
    by_end: dict[str, list[str]] = {}
    for row in rows:
        *start, end = row.rsplit(", ", 1)
        by_end.setdefault(end, []).extend(start)
    return ", ".join(", ".join([*starts, end]) for end, starts in by_end.items())


def table(runs: Sequence[ModelResults]) -> tuple[str, list[str]]:
    """Returns the table, one column for each run, and the reasons for its marks."""
    columns = []
    for run, tokenizer in zip(runs, tokenizers(runs)):
        columns.append({title: (text, how) for title, text, how in scores(run, tokenizer)})
    rows, reasons = [["", *(run.name for run in runs)]], dict[str, list[str]]()
    for title in dict.fromkeys(itertools.chain(*columns)):
        found = [(run.name, *column[title]) for run, column in zip(runs, columns) if title in column]
        first, _, basis = found[0]
        texts = dict.fromkeys((run.name for run in runs), "-")
        for name, text, how in found:
            changed = reasons_for(basis, how)
            texts[name] = text + " (!)" * bool(changed)
            if changed:
                reason = f"of {name}: not comparable with {first}: {changed}."
                reasons.setdefault(reason, []).append(title)
        rows.append([title, *texts.values()])
    return markdown_table(rows, aligned=True), [f"{titles_of(titles)} {text}" for text, titles in reasons.items()]


def lengths(runs: Sequence[ModelResults]) -> tuple[dict[str, tuple[str, list[dict[str, Any]]]], list[str]]:
    """Returns results by length: by file name the title and the entries, all on the same tokens; and warnings."""
    groups: dict[str, dict[str, list[Any]]] = {}
    for run, tokenizer in zip(runs, tokenizers(runs)):
        for stem, content in run.results.items():
            for entry in content["checkpoints"] if stem.startswith("length") else []:
                how = {key: value for key, value in content["data"].items() if key not in (*_NOTES, *_NAMES)}
                how |= {"dtype": entry.get("dtype"), "tokens_sha256": entry["tokens_sha256"]}
                group = groups.setdefault(stem, {}).setdefault(
                    json.dumps(how, sort_keys=True), [{**how, "tokenizer": tokenizer}, content["data"]]
                )
                group.append({**entry, "name": run.name})
    tables: dict[str, tuple[str, list[dict[str, Any]]]] = {}
    warnings = []
    for stem, found in groups.items():
        (basis, *_), *_ = found.values()
        for number, (how, data, *entries) in enumerate(found.values(), 1):
            title = measured_text(data, entries)
            changed = reasons_for(basis, how)
            if changed and any(title == other for other, _ in tables.values()):
                title += f" ({changed})"
            tables[stem + f"_{number}" * (number > 1)] = title, entries
            if trained := ", ".join(dict.fromkeys(entry["name"] for entry in entries if entry.get("trained_on"))):
                warnings.append(f"{stem} of {trained}: measured on text that the model was trained on.")
            if changed:
                names = ", ".join(dict.fromkeys(entry["name"] for entry in entries))
                warnings.append(f"{stem} of {names}: not comparable with its first table: {changed}.")
    return tables, warnings


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parser().parse_args(arguments)
    if options.output:
        check_writable(options.output)
    shared = {path.stem: read_json(path) for path in options.results}
    names = names_of(options.folders)
    runs = [read_run(pathlib.Path(folder), name, shared) for folder, name in zip(options.folders, names)]
    for stem, content in shared.items():
        if not any(own_entries(content, run.weights) for run in runs):
            raise ValueError(f"results={stem!r} is not valid: none of its checkpoints has the weights of a FOLDER.")
    text, reasons = table(runs)
    by_length, warnings = lengths(runs)
    print(text)
    for title, entries in by_length.values():
        print(f"\n{heading(entries, title)}:\n\n{length_table(entries)}")
    for run in runs[1:]:
        if not (runs[0].recipe and run.recipe):
            changed = ["not known"]
        elif ("training" in runs[0].recipe) != ("training" in run.recipe):
            changed = ["one was trained and the other fine-tuned, with other settings"]
        else:
            changed = material(runs[0].recipe, run.recipe) or ["no differences"]
        print(f"\nRecipe, {runs[0].name} → {run.name}:", *changed, sep="\n- ")
    for warning in (*reasons, *warnings):
        print(f"\n(!) {warning}")
    if options.output:
        paths = []
        if curves := {run.name: run.results["curves"] for run in runs if "curves" in run.results}:
            marked = any(row in reason for reason in reasons for row in ("training loss", "validation loss"))
            titles: dict[str, list[str]] = {}
            for run in (run for run in runs if run.name in curves):
                titles.setdefault(curves_title(run.training), []).append(run.name)
            title = "; ".join(titles if len(titles) == 1 else (f"{', '.join(titles[one])}: {one}" for one in titles))
            title += " (not comparable: other text or tokenizer)" * marked
            units = {loss_unit(run.training) for run in runs if run.name in curves}
            unit = units.pop() if len(units) == 1 else "token"
            encodings = [run.encoding for run in runs if run.name in curves]
            paths += save_figure(curves_figure(curves, encodings, title=title, unit=unit), options.output / "curves")
        for stem, (title, entries) in by_length.items():
            paths += draw(entries, options.output / stem, title=title)
        for stem in by_length:
            remove_numbered_figures(options.output / stem, paths)
        print(f"\nWritten: {', '.join(map(str, paths)) or 'no figure, for lack of curves'}")
