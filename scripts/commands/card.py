"""`whatwhere card`: its help is in `cli/card.py`."""

import collections
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from whatwhere_cli.card import parser

from ...model_card import encoding_text, weights_fingerprint
from ..cards.content import headline
from ..cards.folder import replaced_card, write_card
from ..evaluation.curves import read_curves
from ..evaluation.data_description import describe_data, measured_text
from ..evaluation.length_report import draw
from ..evaluation.results import markdown_table, own_entries, own_lengths, read_json, read_results, result_files
from ..writing import check_writable, write_json, write_text

INDEX = ("<!-- whatwhere card: list -->", "<!-- whatwhere card: end of list -->")

# The folders of an absolute path, at the beginning of a word or after `=`.
_ABSOLUTE = re.compile(r"(?<![^\s='\"])/(?:[^/\s'\"]+/)+(?=[^/\s'\"])")


def without_folders(content: Any) -> Any:
    """Returns JSON content with absolute paths replaced by their last part."""
    if isinstance(content, dict):
        return {key: without_folders(value) for key, value in content.items()}
    if isinstance(content, list):
        return [without_folders(value) for value in content]
    return _ABSOLUTE.sub("", content) if isinstance(content, str) else content


def card_folder(run: pathlib.Path, output: pathlib.Path, name: str | None = None) -> pathlib.Path:
    """Returns the folder of a finished run's card; its default name is the recipe's, with the encoding at its end."""
    if not (run / "config.json").is_file() and (run / "adapter_config.json").is_file():
        raise ValueError(
            f"run={str(run)!r} is an adapter, whose card lies beside its weights: leave out --output. `whatwhere "
            "finetune` saves a full model with --lora --merge."
        )
    results = read_json(run / "results.json")
    if results.get("weights_sha256") is None or results["weights_sha256"] != weights_fingerprint(run):
        raise ValueError(f"run={str(run)!r} is not valid: its results.json is of other weights.")
    if name is None:
        encoding = encoding_text(read_json(run / "config.json").get("position_encoding", "stock"))
        encoding = encoding.replace(", ", "-").replace("+", "_")
        name = (results.get("recipe") or {}).get("name") or run.resolve().name
        if not re.search(rf"(^|[^a-z]){re.escape(encoding)}$", name):
            name += f"_{encoding}"
    folder = output / name
    if folder.exists() and any(folder.iterdir()) and not (folder / "card.json").is_file():
        raise ValueError(f"name={name!r} is not valid: {str(folder)!r} exists, and is not a model's card.")
    return folder


def _add_results(runs: Sequence[pathlib.Path], files: Sequence[pathlib.Path]) -> None:
    """Writes, beside the weights of each run, the entries of length results measured with them, and their figure."""
    for path in files:
        content, found = read_json(path), False
        for run in runs:
            if own := own_entries(content, weights_fingerprint(run)):
                found = True
                write_json(run / path.name, own)
                entries = own["checkpoints"]
                draw(entries, run / path.stem, title=measured_text(own["data"], entries))
        if not found:
            raise _of_other_weights(path)


def _of_other_weights(path: pathlib.Path) -> ValueError:
    return ValueError(f"results={str(path)!r} is not valid: none of its checkpoints has the weights of a RUN.")


def collect(run: pathlib.Path, folder: pathlib.Path, shared: Mapping[str, Mapping[str, Any]]) -> None:
    """Copies the files for a card from a run's folder, and the entries with its weights from `shared`, by file name."""
    weights = read_json(run / "results.json")["weights_sha256"]
    found = own_lengths({**read_results(run, weights=weights), **shared}, weights)
    if (run / "metrics.jsonl").is_file():
        found["curves"] = {**read_curves(run / "metrics.jsonl"), "weights_sha256": weights}
    training = dict(found["results"])
    recipe = training.pop("recipe", None)
    found["results"] = {**training, "data": describe_data(training["data"])}
    folder.mkdir(parents=True, exist_ok=True)
    for old in result_files(folder):
        old.unlink()
    for name, content in found.items():
        write_json(folder / f"{name}.json", without_folders(content))
    if recipe:
        text = yaml.safe_dump(without_folders(recipe), sort_keys=False, allow_unicode=True)
        write_text(folder / "recipe.yaml", text)
    write_json(folder / "config.json", read_json(run / "config.json"))
    words = shlex.split(training["command"])
    place = words[words.index("--output") + 1] if "--output" in words else str(run)
    has_tokenizer = (run / "tokenizer_config.json").is_file()
    write_json(folder / "card.json", without_folders({"weights": place, "tokenizer": has_tokenizer}))


def regenerate(output: pathlib.Path) -> list[pathlib.Path]:
    """Rewrites all cards in a folder, of models and of tables, and their list; returns the paths."""
    from ..reproduction import report

    paths = []
    for folder in sorted(path.parent for path in output.glob("*/results.json")):
        if (folder / "card.json").is_file():
            paths.append(write_card(folder))
        else:
            table = read_json(folder / "results.json")
            paths.append(report.write(table, report.markdown(table, card=True), folder / "README.md", "results.json"))
    return [*paths, *write_index(output)]


def write_index(output: pathlib.Path) -> list[pathlib.Path]:
    """Replaces the list of cards in a folder's README.md if it has the `INDEX` marks; returns its path, if written."""
    path = output / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if any(text.count(line) != 1 for line in INDEX):
        return []
    before, after = text.split(INDEX[0])[0], text.split(INDEX[1])[1]
    path.write_text(f"{before}{INDEX[0]}\n{index(output)}\n{INDEX[1]}{after}", encoding="utf-8")
    return [path]


def index(output: pathlib.Path) -> str:
    """Returns the list of cards in a folder, in Markdown: models with their results, and tables with their verdicts."""
    models = []
    for folder in sorted(path.parent for path in output.glob("*/card.json")):
        training, config = read_json(folder / "results.json"), read_json(folder / "config.json")
        size = f"{training['parameters']:,}" if training.get("parameters") else ""
        others = [f"`{path.name}`" for path in result_files(folder) if path.stem.startswith(("length", "lm_eval"))]
        encoding = f"`{encoding_text(config['position_encoding'])}`"
        models.append([_link(folder.name), encoding, size, headline(training, config["vocab_size"]), ", ".join(others)])
    tables = []
    for path in sorted(output.glob("*/results.json")):
        if "table" not in (table := read_json(path)):
            continue
        verdicts = collections.Counter(map(_outcome, table["cells"]))
        runs = {seed["folder"] for cell in table["cells"] for seed in cell["ours"]["seeds"]}
        counts = ", ".join(f"{count} {text}" for text, count in verdicts.items())
        tables.append([_link(path.parent.name), table["title"], str(len(runs)), counts])
    heads = ["model", "position encoding", "parameters", "held-out result", "other measurements"]
    found = ([heads, *models], [["table", "title", "runs", "cells"], *tables])
    return "\n\n".join(markdown_table(rows) for rows in found if len(rows) > 1)


def _outcome(cell: Mapping[str, Any]) -> str:
    """Returns the verdict of a cell; cells of our own tables have none."""
    if "verdict" in cell:
        return cell["verdict"]["text"]
    return "measured" if cell["ours"]["seeds"] else "not supported" if cell["not_supported"] else "not run"


def _link(name: str) -> str:
    return f"[`{name}`]({name}/README.md)"


def make(
    runs: Sequence[pathlib.Path],
    output: pathlib.Path,
    *,
    name: str | None = None,
    files: Sequence[pathlib.Path] = (),
    licence: str | None = None,
) -> list[pathlib.Path]:
    """Writes the cards of runs into separate folders, or without runs rewrites all cards there; returns the paths.

    `name` is as in `card_folder`, for a single run; `files` are length results of several runs, measured together;
    `licence` is as in `write_card`.
    """
    if not runs:
        if name or files or licence:
            raise ValueError("--name, --results and --licence need a RUN.")
        if not (paths := regenerate(output)):
            raise ValueError(f"output={str(output)!r} has no cards: give a RUN.")
        return paths
    shared = {path.stem: read_json(path) for path in files}
    folders = [card_folder(run, output, name) for run in runs]
    if len(set(folders)) < len(folders):
        raise ValueError("two runs have the same card folder: give one RUN at a time, and --name.")
    # Before files beside them are replaced.
    for folder in folders:
        replaced_card(folder)
    for run, folder in zip(runs, folders):
        collect(run, folder, shared)
    for path in files:
        if not any((folder / path.name).is_file() for folder in folders):
            raise _of_other_weights(path)
    return [*(write_card(folder, licence=licence) for folder in folders), *write_index(output)]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parser().parse_args(arguments)
    if options.output is None:
        _add_results(options.runs, options.results)
        paths = [write_card(run, name=options.name, licence=options.licence) for run in options.runs]
    else:
        check_writable(options.output)
        given = {"name": options.name, "files": options.results, "licence": options.licence}
        paths = make(options.runs, options.output, **given)
    for path in paths:
        print(path)
