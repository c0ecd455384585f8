"""Model cards, written from results files.

The card of a checkpoint, README.md beside the weights, from its configuration and the results files in its folder:

    whatwhere card demo/pope

Cards of finished runs in folders of their own, without weights, as in `model_cards/`:

    whatwhere card runs/rope runs/pope --output model_cards --results results/length_pg19.json

Every card of such a folder again, from the files in it alone, and the list in its README.md:

    whatwhere card --output model_cards

A card's folder holds `config.json`, `recipe.yaml`, the results files about its weights (`results.json`, `length.json`,
`length_*.json`, `lm_eval.json`), `curves.json` (its `metrics.jsonl`, thinned), one figure, and `card.json`, which says
where the weights are. `--results` adds files in which several checkpoints were measured together: every card keeps its
own entries, and shows those of the cards beside it that were measured on the same text. Absolute paths in recorded
commands lose their folders. Published weights are loaded from their Hub id (`--published`); for others the card gives
the command that trains them. Cards of the papers' tables, which `whatwhere reproduce --cards` makes, are written again
too, and a model's card quotes the columns to which its run belongs.
"""

import argparse
import collections
import json
import pathlib
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
import yaml

from ...model_card import weights_fingerprint
from ..evaluation.data_description import describe_data
from ..evaluation.length_report import draw as draw_length
from ..evaluation.results import (
    check_writable,
    markdown_table,
    read_json,
    read_results,
    result_files,
    write_json,
    write_text,
)
from ..extras import explain
from .content import headline, model_card
from .curves import draw_curves, thin_curves

INDEX = ("<!-- whatwhere card: list -->", "<!-- whatwhere card: end of list -->")

# A path of at least one folder from the root, at the beginning of a word or after `=`.
_ABSOLUTE = re.compile(r"(?<![^\s='\"])/(?:[^/\s'\"]+/)+(?=[^/\s'\"])")


def write_card(folder: str | pathlib.Path, *, name: str | None = None, figures: bool = True) -> pathlib.Path:
    """Writes README.md into a folder, from the other files in it, and returns its path.

    Args:
        folder: a checkpoint, or the folder of a card.
        name: of the model; by default that of the folder.
        figures: draw the figure of a card's folder again. A checkpoint's is there or not.

    Raises:
        ValueError: the folder holds no model of this package, or a file is broken or about other weights.
    """
    folder = pathlib.Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"folder={str(folder)!r} is not a model folder: it has no config.json.")
    config = transformers.AutoConfig.from_pretrained(folder)
    if not hasattr(config, "position_encoding"):
        raise ValueError(
            f"folder={str(folder)!r} holds a model of type {config.model_type!r}, which is not one of ours."
        )
    about = read_json(folder / "card.json") if (folder / "card.json").is_file() else None
    weights = read_json(folder / "results.json")["weights_sha256"] if about else weights_fingerprint(folder)
    results = _own_lengths(read_results(folder, weights=weights if about else None), weights)
    if about and (other := [path.name for path in result_files(folder) if path.stem not in results]):
        raise ValueError(f"{str(folder / other[0])!r} is about other weights than results.json beside it.")
    first = next((key for key in results if key.startswith("length")), None)
    compared = _compared(folder, f"{first}.json", results[first]) if about and first else []
    figure = first or ("curves" if about and "curves" in results else None)
    if about and figures and figure:
        _draw(folder, figure, results[figure], compared)
    path = folder / "README.md"
    training = results.get("results", {})
    if about and training and (folder / "recipe.yaml").is_file():
        training["recipe"] = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    has_tokenizer = about["tokenizer"] if about else (folder / "tokenizer_config.json").is_file()
    card = model_card(
        config,
        results,
        name=name or folder.resolve().name,
        weights=weights,
        has_tokenizer=has_tokenizer,
        figure=f"{figure}.png" if figure and (folder / f"{figure}.png").is_file() else None,
        compared=compared,
        paper_tables=_tables_of(folder, training) if about else [],
        recipe_file="recipe.yaml" if (folder / "recipe.yaml").is_file() else None,
        place=about["weights"] if about else None,
        is_published=about["published"] if about else True,
    )
    write_text(path, str(card))
    return path


def _compared(folder: pathlib.Path, name: str, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries of the cards beside a folder that are about the same tokens, named by their folders."""
    texts = {entry["tokens_sha256"] for entry in own["checkpoints"]}
    found = []
    for path in sorted(folder.parent.glob(f"*/{name}")):
        if path.parent != folder and (path.parent / "card.json").is_file():
            entries = [entry for entry in read_json(path)["checkpoints"] if entry["variant"] is None]
            found += [{**entry, "name": path.parent.name} for entry in entries if entry["tokens_sha256"] in texts]
    return found


def _draw(
    folder: pathlib.Path, name: str, content: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]
) -> pathlib.Path:
    """Draws the figure of a card into its folder, as the one PNG file there, and returns its path."""
    from PIL import Image

    for path in folder.glob("*.png"):
        path.unlink()
    path = folder / f"{name}.png"
    with tempfile.TemporaryDirectory() as drafts:
        draft = pathlib.Path(drafts) / path.name
        if name == "curves":
            draw_curves(content, draft)
        else:
            own = [{**entry, "name": folder.name} for entry in content["checkpoints"]]
            title = "{corpus}, {split}".format_map(content["data"])
            draw_length([*own, *map(dict, compared)], draft.with_suffix(""), title=title)
        # A palette is enough for lines, and makes the file a third as large.
        with Image.open(draft) as image:
            image.convert("RGB").quantize(colors=64).save(path, optimize=True)
    return path


def without_folders(content: Any) -> Any:
    """Returns JSON content in which absolute paths are replaced by their last part."""
    if isinstance(content, dict):
        return {key: without_folders(value) for key, value in content.items()}
    if isinstance(content, list):
        return [without_folders(value) for value in content]
    return _ABSOLUTE.sub("", content) if isinstance(content, str) else content


def own_entries(content: Mapping[str, Any], weights: str) -> dict[str, Any] | None:
    """Returns the part of length results that is about some weights; None if there is none.

    The commands are those that name one of the entries' checkpoints, or all of them.
    """
    entries = [entry for entry in content["checkpoints"] if entry.get("weights") == weights]
    if not entries:
        return None
    keys = ("command", "date", "versions")
    runs = [*content.get("earlier", []), {key: content[key] for key in keys}]
    names = {entry.get("checkpoint", entry["name"]) for entry in entries}
    runs = [run for run in runs if any(name in run["command"] for name in names)] or runs
    data = describe_data(content["data"])
    return {"weights_sha256": weights, "data": data, "checkpoints": entries, "earlier": runs[:-1], **runs[-1]}


def _own_lengths(results: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """Returns results in which those of length hold the entries of some weights only; without any they are left out."""
    found = {name: own_entries(one, weights) if name.startswith("length") else one for name, one in results.items()}
    return {name: one for name, one in found.items() if one is not None}


def card_folder(run: pathlib.Path, output: pathlib.Path, name: str | None = None) -> pathlib.Path:
    """Returns the folder of a finished run's card; its name is by default the recipe and the encoding.

    Raises:
        ValueError: the folder holds no finished run, or other weights than its results are about; or the card's folder
            holds something else.
    """
    for file in ("config.json", "results.json"):
        if not (run / file).is_file():
            raise ValueError(f"run={str(run)!r} is not the folder of a finished run: it has no {file}.")
    results = read_json(run / "results.json")
    if results.get("weights_sha256") is None or results["weights_sha256"] != weights_fingerprint(run):
        raise ValueError(f"run={str(run)!r} is not valid: its results.json must be about the weights beside it.")
    if name is None:
        encoding = str(read_json(run / "config.json").get("position_encoding")).replace("+", "_")
        name = f"{results.get('recipe', {}).get('name') or run.resolve().name}_{encoding}"
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"name={name!r} is not valid: it must be letters, digits, '.', '-' and '_'.")
    folder = output / name
    if folder.exists() and any(folder.iterdir()) and not (folder / "card.json").is_file():
        raise ValueError(f"name={name!r} is not valid: {str(folder)!r} holds something else than a model's card.")
    return folder


def collect(
    run: pathlib.Path,
    folder: pathlib.Path,
    *,
    published: str | None = None,
    shared: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[str]:
    """Copies what a card is made of from the folder of a run; returns what was left out, in sentences.

    Args:
        run: the folder of a finished run.
        folder: of the card, from `card_folder`.
        published: the Hub id of the weights; None if they are not published.
        shared: contents of files in which several checkpoints were measured, by name; taken if one has these weights.
    """
    weights = read_json(run / "results.json")["weights_sha256"]
    found = read_results(run, weights=weights)
    notes = [
        f"{run}: {path.name} is left out, it does not say that it is about these weights."
        for path in result_files(run)
        if path.stem not in found
    ]
    found = _own_lengths({**found, **(shared or {})}, weights)
    if (run / "metrics.jsonl").is_file():
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found["curves"] = {**thin_curves([json.loads(line) for line in lines]), "weights_sha256": weights}
    training = without_folders(found["results"])
    recipe = training.pop("recipe", None)
    found["results"] = {**training, "data": describe_data(training["data"])}
    if published is None and "--output" not in shlex.split(training["command"])[:-1]:
        raise ValueError(
            f"results.json: command={training['command']!r} has no --output, which says where weights are."
        )
    words = shlex.split(training["command"])
    place = published or words[words.index("--output") + 1]
    folder.mkdir(parents=True, exist_ok=True)
    for old in result_files(folder):
        old.unlink()
    for name, content in found.items():
        write_json(folder / f"{name}.json", without_folders(content))
    if recipe:
        write_text(folder / "recipe.yaml", yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
    write_json(folder / "config.json", read_json(run / "config.json"))
    about = {"weights": place, "published": published is not None}
    write_json(folder / "card.json", {**about, "tokenizer": (run / "tokenizer_config.json").is_file()})
    return notes


def _paper_tables(output: pathlib.Path) -> dict[str, dict[str, Any]]:
    found = {path.parent.name: read_json(path) for path in sorted(output.glob("*/results.json"))}
    return {name: content for name, content in found.items() if "table" in content}


def _tables_of(folder: pathlib.Path, training: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns `name` and `title` of the tables beside a card to which its run belongs.

    A run is known by the seconds that it took, to the last bit.
    """
    keys = ("seed", "steps", "parameters", "seconds")
    return [
        {"name": name, "title": table["title"] + (", small version" if table["small"] else "")}
        for name, table in _paper_tables(folder.parent).items()
        if any(
            all(seed[key] == training.get(key) for key in keys)
            for cell in table["cells"]
            for seed in cell["ours"]["seeds"]
        )
    ]


def regenerate(output: pathlib.Path, *, figures: bool = True) -> list[pathlib.Path]:
    """Writes every card in a folder anew, of models and of tables, and the list of them; returns their paths."""
    from ..reproduction.report import card_from_results

    paths = []
    for folder in sorted(path.parent for path in output.glob("*/results.json")):
        if (folder / "card.json").is_file():
            paths.append(write_card(folder, figures=figures))
        else:
            paths.append(folder / "README.md")
            paths[-1].write_text(card_from_results(folder / "results.json"), encoding="utf-8")
    return [*paths, *write_index(output)]


def write_index(output: pathlib.Path) -> list[pathlib.Path]:
    """Replaces the list of cards in a folder's README.md, if it has a place for it; returns its path, if so."""
    path = output / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if any(text.count(line) != 1 for line in INDEX):
        return []
    before, after = text.split(INDEX[0])[0], text.split(INDEX[1])[1]
    path.write_text(f"{before}{INDEX[0]}\n{index(output)}\n{INDEX[1]}{after}", encoding="utf-8")
    return [path]


def index(output: pathlib.Path) -> str:
    """Returns the list of the cards in a folder, in Markdown: models with their results, tables with the verdicts."""
    models = []
    for folder in sorted(path.parent for path in output.glob("*/card.json")):
        training, config = read_json(folder / "results.json"), read_json(folder / "config.json")
        size = f"{training['parameters']:,}" if training.get("parameters") else ""
        others = [f"`{path.name}`" for path in result_files(folder) if path.stem not in ("results", "curves")]
        encoding = f"`{config['position_encoding']}`"
        models.append([_link(folder.name), encoding, size, headline(training), ", ".join(others)])
    tables = []
    for name, table in _paper_tables(output).items():
        verdicts = collections.Counter(cell["verdict"]["text"] for cell in table["cells"])
        runs = {seed["folder"] for cell in table["cells"] for seed in cell["ours"]["seeds"]}
        counts = ", ".join(f"{count} {text}" for text, count in verdicts.items())
        tables.append([_link(name), table["title"], str(len(runs)), counts])
    heads = ["model", "position encoding", "parameters", "held-out result", "other measurements"]
    found = ([heads, *models], [["table", "of", "runs", "cells"], *tables])
    return "\n\n".join(markdown_table(rows) for rows in found if len(rows) > 1)


def _link(name: str) -> str:
    return f"[`{name}`]({name}/README.md)"


def read_shared(files: Sequence[pathlib.Path]) -> dict[str, dict[str, Any]]:
    """Returns length results of several checkpoints, by name; raises ValueError if a file is no such file."""
    shared: dict[str, dict[str, Any]] = {}
    for path in files:
        content = read_json(path) if path.is_file() else {}
        if not path.stem.startswith("length") or not isinstance(content.get("checkpoints"), list):
            raise ValueError(f"results={str(path)!r} is not valid: it must be a length*.json with `checkpoints`.")
        if path.stem in shared:
            raise ValueError(f"results={str(path)!r} is not valid: two files have the name {path.stem!r}: rename one.")
        shared[path.stem] = content
    return shared


def make(
    runs: Sequence[pathlib.Path],
    output: pathlib.Path,
    *,
    name: str | None = None,
    published: str | None = None,
    files: Sequence[pathlib.Path] = (),
    figures: bool = True,
) -> list[pathlib.Path]:
    """Makes the cards of runs in folders of their own, or without a run every card there anew; returns their paths.

    Args:
        runs: folders of finished runs.
        output: the folder of all cards.
        name, published: see `card_folder` and `collect`; of one run.
        files: results of several checkpoints, measured together.
        figures: draw the figures.

    Raises:
        ValueError: a run, a file or an option is not valid, or there is nothing to do.
    """
    if not runs:
        if name or published or files:
            raise ValueError("--name, --published and --results need a RUN.")
        if not (paths := regenerate(output, figures=figures)):
            raise ValueError(f"output={str(output)!r} holds no cards: give a RUN.")
        return paths
    if (published or name) and len(runs) > 1:
        raise ValueError(f"--published and --name are of one RUN, and there are {len(runs)}.")
    shared = read_shared(files)
    folders = [card_folder(run, output, name) for run in runs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(f"two runs would both be {str(folder)!r}: make their cards one by one, with --name.")
    for run, folder in zip(runs, folders):
        for note in collect(run, folder, published=published, shared=shared):
            print(note)
    for path in files:
        if not any((folder / path.name).is_file() for folder in folders):
            raise ValueError(f"results={str(path)!r} is not valid: none of its checkpoints has the weights of a RUN.")
    return [*(write_card(folder, figures=figures) for folder in folders), *write_index(output)]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="whatwhere card",
        usage="%(prog)s [RUN ...] [options]",
        description="Write model cards from results files: beside the weights, or in folders of their own.",
        epilog="example: whatwhere card demo/pope",
    )
    parser.add_argument("runs", nargs="*", type=pathlib.Path, metavar="RUN", help="default: every card in --output")
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help="the folder of all cards (default: beside the weights)"
    )
    parser.add_argument("--name", help="of the folder of the one RUN in --output (default: recipe and encoding)")
    parser.add_argument("--published", metavar="ID", help="the Hub id of the weights of the one RUN")
    parser.add_argument(
        "--results", nargs="+", default=[], type=pathlib.Path, metavar="FILE", help="of several checkpoints together"
    )
    options = parser.parse_args(arguments)
    try:
        if options.output is None:
            if options.name or options.published or options.results:
                raise ValueError("--name, --published and --results need --output.")
            if not options.runs:
                raise ValueError("give a RUN, or --output with the folder of all cards.")
            paths = [write_card(run) for run in options.runs]
        else:
            check_writable(options.output)
            paths = make(
                options.runs, options.output, name=options.name, published=options.published, files=options.results
            )
        for path in paths:
            print(path)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {explain(error)}\n")


if __name__ == "__main__":
    main()
