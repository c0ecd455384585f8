"""`whatwhere compare`: its help is in `cli/compare.py`."""

import hashlib
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from whatwhere_cli.compare import parser

from ...model_card import encoding_text
from ..checks import differences, material
from ..evaluation.checkpoints import check_finished, names_of
from ..evaluation.curves import curves_figure, read_curves
from ..evaluation.data_description import curves_title, describe_data, loss_unit, measured_text, text_of
from ..evaluation.figures import save_figure
from ..evaluation.length_report import draw, heading, remove_numbered_figures, table_rows
from ..evaluation.results import markdown_table, own_entries, read_json, result_files, results_of
from ..writing import check_writable

FACTS = ("parameters", "steps", "tokens_trained", "samples_trained", "length", "seed", "device", "base_model")
# Parts of a description of data that do not say which text is scored.
_NOTES = ("described", "example", "kind", "prompt", "splits")
# Names of the user's own files; the tokens say whether two texts are the same.
_NAMES = ("files", "held_out_part")
# Keys of a toy task's recipe that say which samples are scored, and how.
_TASK = ("loss", "task_parameters", "test_samples", "test_sets", "validation_samples")
# Columns of text: wider tables are divided, and longer texts of a run get a line of their own.
WIDTH, LONG = 100, 40
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


class Score(NamedTuple):
    """A cell of the table: a text, how it was measured, if that matters, and the number in it, with its format."""

    text: str
    how: Mapping[str, Any]
    value: float | None = None
    form: str = ""


def number(value: float, form: str, how: Mapping[str, Any], more: str = "") -> Score:
    """Returns a cell with a number; `form` is as in "{:.5g} nats", and `more` follows it."""
    return Score(form.format(value) + more, how, value, form)


def scores(run: ModelResults, tokenizer: Any) -> Iterator[tuple[str, Score]]:
    """Yields title and cell of each score of a run, all but the lengths."""
    training, recipe, data = run.training, run.recipe, run.training.get("data", {})
    per = loss_unit(training)
    yield "encoding", Score(run.encoding, {})
    if data:
        yield "trained on", Score(describe_data(data)["described"]["train"]["title"], {})
        yield "evaluated on", Score(text_of(data), {})
    for key in FACTS:
        if (value := training.get(key)) is not None:
            title = "sequence length" if key == "length" else key.replace("_", " ")
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            yield title, Score(f"{value:,}" if isinstance(value, int) else shown, {})
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
            yield title, number(rows[-1]["loss"], f"{{:.5g}} nats per {per}", how)
    text |= {"text": splits.get(data.get("split")), "tokens": training.get("tokens")}
    text["tokens_sha256"] = training.get("tokens_sha256")
    metrics = dict(training.get("metrics", {}))
    for name, errors in metrics.pop("test_sets", {}).items():
        yield f"wrong answer tokens, {name}", number(errors["token_error"], "{:.2%}", text)
    for metric, score in metrics.items():
        unit = {"loss": f" nats per {per}", "perplexity": f" per {per}"}.get(metric, "")
        yield f"{metric.replace('_', ' ')}, {data['split']}", number(score["value"], "{:.5g}" + unit, text)
    for name, task in run.results.get("lm_eval", {}).get("tasks", {}).items():
        how = {key: task.get(key) for key in ("version", "shots", "split", "samples", "limit", "data")}
        for metric, score in task["metrics"].items():
            error = "" if score["standard_error"] is None else f" ± {score['standard_error']:.3g}"
            first = "" if how["limit"] is None else f" (first {how['limit']} questions)"
            yield f"{name}, {metric}", number(score["value"], "{:.4g}", how, error + first)


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
    """Returns the table, one row for each run and each recipe with several seeds, and the reasons for its marks."""
    rows = [dict(scores(run, tokenizer)) for run, tokenizer in zip(runs, tokenizers(runs))]
    columns, reasons = dict[str, list[str]](), dict[str, list[str]]()
    groups = seeds_of(runs)
    for title in dict.fromkeys(itertools.chain(*rows)):
        found = [(run.name, row[title]) for run, row in zip(runs, rows) if title in row]
        first, basis = found[0]
        texts, unequal = dict.fromkeys((run.name for run in runs), "-"), set()
        for name, score in found:
            changed = reasons_for(basis.how, score.how)
            texts[name] = score.text + " (!)" * bool(changed)
            if changed:
                unequal.add(name)
                reason = f"of {name}: not comparable with {first}: {changed}."
                reasons.setdefault(reason, []).append(title)
        for name, members in groups.items():
            cells = [row[title] for run, row in zip(runs, rows) if run in members and title in row]
            same = not unequal & {run.name for run in members} and len(cells) == len(members)
            texts[name] = over_seeds(cells) if same else "-"
        columns[title] = list(texts.values())
    names = [*(run.name for run in runs), *groups]
    return layout(names, columns), [f"{titles_of(titles)} {text}" for text, titles in reasons.items()]


def seeds_of(runs: Sequence[ModelResults]) -> dict[str, list[ModelResults]]:
    """Returns the runs of one recipe with different seeds, two or more, by the name of their row."""
    groups: dict[str, list[ModelResults]] = {}
    for run in runs:
        origin = [run.training.get(key) for key in ("base_model", "base_weights_sha256")]
        recipe = {key: value for key, value in run.recipe.items() if key != "seed"}
        about = json.dumps([run.encoding, origin, recipe or run.name], sort_keys=True, default=str)
        groups.setdefault(about, []).append(run)
    return {
        f"{group[0].name}, mean of {len(group)} seeds": group
        for group in groups.values()
        if len({run.training.get("seed") for run in group}) == len(group) > 1
    }


def over_seeds(cells: Sequence[Score]) -> str:
    """Returns mean and standard deviation of numbers; or the text, if it is the same for all; or all texts."""
    values = [cell.value for cell in cells if cell.value is not None]
    if len(values) < len(cells):
        return ", ".join(dict.fromkeys(cell.text for cell in cells))
    form = cells[0].form
    start, unit = form[: form.index("}") + 1], form[form.index("}") + 1 :]
    spread = start.replace(".5g", ".2g").replace(".4g", ".2g").format(statistics.stdev(values))
    return f"{start.format(statistics.mean(values))} ± {spread}{unit}"


def layout(names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> str:
    """Returns what is the same for all as lines, and the rest as tables with a row for each name."""
    lines, long, shown = [], [], []
    for title, texts in columns.items():
        known = [text for text in texts if text != "-"]
        if len(known) == len(texts) and len(set(texts)) == 1:
            lines.append(f"{title}: {texts[0]}")
        elif max(map(len, texts)) > LONG:
            long += [f"{title}, {name}: {text}" for name, text in zip(names, texts)]
        else:
            shown.append([title, *texts])
    rows = zip(["", *names], *shown)
    return "\n\n".join(filter(None, ["\n".join(lines), "\n".join(long), divided([list(row) for row in rows])]))


def divided(rows: Sequence[Sequence[str]]) -> str:
    """Returns Markdown tables of so many columns as fit in `WIDTH`, each with the first; empty without others."""
    first, *columns = zip(*rows)
    tables: list[list[Sequence[str]]] = []
    for column in columns:
        if not tables or 1 + sum(max(map(len, one)) + 3 for one in (*tables[-1], column)) > WIDTH:
            tables.append([first])
        tables[-1].append(column)
    return "\n\n".join(markdown_table([list(row) for row in zip(*one)], aligned=True) for one in tables)


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


def lengths_over_seeds(
    entries: Sequence[dict[str, Any]], groups: Mapping[str, Sequence[ModelResults]]
) -> list[list[str]]:
    """Returns the rows of a table of mean perplexities of runs of one recipe, by length; none without such runs."""
    lengths = sorted({cell["length"] for entry in entries for cell in entry["cells"]})
    rows = [["model", *(f"{length:,}" for length in lengths)]]
    for name, members in groups.items():
        for variant in dict.fromkeys(entry["variant"] for entry in entries):
            names = {run.name for run in members}
            mine = [one for one in entries if one["name"] in names and one["variant"] == variant]
            row = [name + (f", {variant}" if variant else "")]
            for length in lengths:
                cells = [cell for one in mine for cell in one["cells"] if cell["length"] == length and cell["reached"]]
                values = [cell["perplexity"] for cell in cells if cell["perplexity"] is not None]
                spread = f"{statistics.mean(values):,.2f} ± {statistics.stdev(values):,.2f}" if len(values) > 1 else ""
                row.append(spread if len(values) == len(names) else "-")
            rows += [row] if len(mine) == len(names) else []
    return rows if len(rows) > 1 else []


def runs_in(folder: str) -> list[str]:
    """Returns a folder, or the runs in the folder of `whatwhere train --encodings`."""
    path = pathlib.Path(folder)
    if not path.is_dir() or [*path.glob("*.json")] or [*path.glob("*.yaml")]:
        return [folder]
    return [str(one) for one in sorted(path.iterdir()) if (one / "results.json").is_file()] or [folder]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parser().parse_args(arguments)
    if options.output:
        check_writable(options.output)
    shared = {path.stem: read_json(path) for path in options.results}
    options.folders = [one for folder in options.folders for one in runs_in(folder)]
    if len(options.folders) < 2:
        raise ValueError("give at least two folders.")
    names = names_of(options.folders)
    runs = [read_run(pathlib.Path(folder), name, shared) for folder, name in zip(options.folders, names)]
    for stem, content in shared.items():
        if not any(own_entries(content, run.weights) for run in runs):
            raise ValueError(f"results={stem!r} is not valid: none of its checkpoints has the weights of a FOLDER.")
    text, reasons = table(runs)
    by_length, warnings = lengths(runs)
    print(text)
    for title, entries in by_length.values():
        print(f"\n{heading(entries, title)}:\n\n{divided(table_rows(entries))}")
        if means := lengths_over_seeds(entries, seeds_of(runs)):
            print(f"\nMean ± standard deviation over seeds:\n\n{divided(means)}")
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
