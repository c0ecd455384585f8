"""Model cards of trained models, each in a folder of its own: what was measured, and no weights.

A card of two runs, in `model_cards/NAME/`:

    python -m whatwhere.scripts.cards runs/rope runs/pope

Every card of that folder anew, from the files in it alone:

    python -m whatwhere.scripts.cards

RUN is the folder of a finished run of `whatwhere.scripts.train` or `...finetune`. The card's folder gets `config.json`,
copies of its results files (`results.json`, `length.json`, `length_*.json`, `lm_eval.json`: those about its weights),
`curves.json` (its `metrics.jsonl`, thinned), the figures that are drawn from them, and `README.md`. `--results` adds
files in which several checkpoints were measured together, such as `length/length_pg19.json`: every card takes those
that have an entry of its weights (a second file of the same name as `length_FOLDER.json`). Absolute paths in recorded
commands lose their folders.

Published weights are loaded from their Hub id (`--published`); for others the card gives the command that makes them.
NAME is `{recipe}_{encoding}`, or what `--name` says, in which also `{data}` (the training corpus or the task), `{seed}`
and `{folder}` are replaced.

The text of the cards is in `whatwhere.model_card`; a card in the folder of weights comes from
`whatwhere.scripts.evaluation.card`. Cards of the papers' tables are written by `whatwhere.scripts.reproduce --cards`;
without RUN they are written anew, too. A model card quotes the columns of the tables beside it to which its run
belongs. If README.md of the output folder has the two lines of `INDEX`, the list of cards between them is replaced.
"""

import argparse
import json
import pathlib
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import transformers

from ..model_card import Weights, figures_of, model_card, read_results, result_files, weights_fingerprint
from .evaluation import length as length_evaluation
from .evaluation import windows
from .evaluation.figures import new_figure
from .evaluation.results import check_writable, write_json
from .evaluation.zero_shot import TABLE_5, TASKS
from .extras import explain

# Points of a curve: more are not seen.
POINTS = 100
TEMPLATE = "{recipe}_{encoding}"
INDEX = ("<!-- whatwhere.scripts.cards: list -->", "<!-- whatwhere.scripts.cards: end of list -->")

# A path of at least one folder from the root, at the beginning of a word or after `=`.
_ABSOLUTE = re.compile(r"(?<![^\s='\"])/(?:[^/\s'\"]+/)+(?=[^/\s'\"])")


class CardError(ValueError):
    """A card that cannot be written, with the reason."""


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises CardError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CardError(f"{str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CardError(f"{str(path)!r} must hold a JSON object.")
    return content


def without_folders(content: Any) -> Any:
    """Returns JSON content in which absolute paths are replaced by their last part."""
    if isinstance(content, dict):
        return {key: without_folders(value) for key, value in content.items()}
    if isinstance(content, list):
        return [without_folders(value) for value in content]
    return _ABSOLUTE.sub("", content) if isinstance(content, str) else content


def thin_curves(lines: Sequence[Mapping[str, Any]], *, points: int = POINTS) -> dict[str, Any]:
    """Returns the contents of `curves.json`, without its weights.

    Args:
        lines: those of `metrics.jsonl`.
        points: about so many are kept of the training loss.

    Returns:
        `training`: rows of `step` (the last one of a group of consecutive lines), `loss` (their mean, nats a token)
        and `lines` (how many there are); `validation`: `step`, `loss` and other scores, all of them.
    """
    training = [line for line in lines if "loss" in line]
    size = -(-len(training) // points)
    groups = [training[start : start + size] for start in range(0, len(training), size or 1)]
    names = ("loss", "perplexity", "bits_per_byte", "token_error", "sequence_error")
    return {
        "training": [
            {
                "step": group[-1]["step"],
                "loss": _rounded(sum(line["loss"] for line in group) / len(group)),
                "lines": len(group),
            }
            for group in groups
        ],
        "validation": [
            {
                "step": line["step"],
                **{
                    name: _rounded(line[f"validation_{name}"])
                    for name in names
                    if line.get(f"validation_{name}") is not None
                },
            }
            for line in lines
            if "validation_loss" in line
        ],
    }


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")


def draw_curves(curves: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws training and validation loss against steps; the same numbers give the same bytes.

    Args:
        curves: from `thin_curves`.
        path: of the PNG file.
    """
    figure = new_figure(6.4, 3.6)
    axes = figure.add_subplot()
    for key, style in (("training", {"linewidth": 1.2}), ("validation", {"marker": "o", "markersize": 4})):
        if rows := curves[key]:
            axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label=key, **style)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("loss (nats per predicted token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def draw(folder: pathlib.Path, results: Mapping[str, Any]) -> None:
    """Draws the figures of a card into its folder, each as the PNG file of its results' name."""
    for path in folder.glob("*.png"):
        path.unlink()
    if "curves" in results:
        draw_curves(results["curves"], folder / "curves.png")
    for name in (name for name in results if name == "length" or name.startswith("length_")):
        checkpoints = results[name]["checkpoints"]
        with tempfile.TemporaryDirectory() as drafts:
            # Every format is drawn; a card shows one.
            stem = pathlib.Path(drafts) / name
            if name == "length":
                length_evaluation.draw(checkpoints, stem)
            else:
                windows.draw(checkpoints, stem, title="{corpus}, {split}".format_map(results[name]["data"]))
            save_small(stem.with_suffix(".png"), folder / f"{name}.png")


def save_small(figure: pathlib.Path, path: pathlib.Path) -> None:
    """Saves a figure with a palette of 64 colours, which are enough for lines and make it a third as large."""
    from PIL import Image

    with Image.open(figure) as image:
        image.convert("RGB").quantize(colors=64).save(path, optimize=True)


def place_of(command: str) -> str:
    """Returns the folder that a recorded training command makes; raises CardError if it does not say it."""
    words = shlex.split(command)
    if "--output" not in words[:-1]:
        raise CardError(f"results.json: command={command!r} has no --output: the card could not say where weights are.")
    return words[words.index("--output") + 1]


def card_name(run: pathlib.Path, template: str, results: Mapping[str, Any], encoding: str) -> str:
    """Returns the name of a run's card.

    Args:
        run: the folder of the run.
        template: with `{recipe}`, `{data}`, `{encoding}`, `{seed}` or `{folder}` in it.
        results: the contents of its `results.json`.
        encoding: the name of its position encoding.

    Raises:
        CardError: the template is not valid, or what it gives is no name of a folder.
    """
    folder, data = run.resolve().name, results["data"]
    corpus = (data.get("splits") or {}).get("train", "") if data["source"] == "corpus" else ""
    fields = {
        "recipe": results.get("recipe", {}).get("name") or folder,
        "data": corpus.partition(":")[0] or data.get("task") or data["source"],
        "encoding": encoding.replace("+", "_"),
        "seed": results.get("seed"),
        "folder": folder,
    }
    try:
        name = template.format_map(fields)
    except (KeyError, ValueError, IndexError) as error:
        allowed = ", ".join(f"{{{field}}}" for field in fields)
        raise CardError(f"name={template!r} is not valid. It can have in it: {allowed}.") from error
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise CardError(f"name={name!r} is not valid: it must be letters, digits, '.', '-' and '_'.")
    return name


def card_folder(run: pathlib.Path, output: pathlib.Path, template: str = TEMPLATE) -> pathlib.Path:
    """Returns the folder of a run's card, which need not exist.

    Args:
        run: the folder of a finished run.
        output: the folder of all cards.
        template: see `card_name`.

    Raises:
        CardError: the folder holds no finished run, or other weights than its results are about; or the card's folder
            holds something else.
    """
    for file in ("config.json", "results.json"):
        if not (run / file).is_file():
            raise CardError(f"run={str(run)!r} is not the folder of a finished run: it has no {file}.")
    results = read_json(run / "results.json")
    weights = results.get("weights_sha256")
    if weights is None:
        raise CardError(f"run={str(run)!r} holds results that state no weights_sha256, such as those of an adapter.")
    if weights != weights_fingerprint(run):
        raise CardError(f"run={str(run)!r} holds other weights than its results.json is about.")
    encoding = str(read_json(run / "config.json").get("position_encoding"))
    folder = output / card_name(run, template, results, encoding)
    if folder.exists() and any(folder.iterdir()) and not (folder / "card.json").is_file():
        raise CardError(f"name={folder.name!r} is not valid: {str(folder)!r} holds something else than a model's card.")
    return folder


def collect(
    run: pathlib.Path,
    folder: pathlib.Path,
    *,
    published: str | None = None,
    shared: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[str]:
    """Copies what a card is made of from the folder of a run.

    Args:
        run: the folder of a finished run.
        folder: of the card, from `card_folder`.
        published: the Hub id of the weights; None if they are not published.
        shared: contents of files in which several checkpoints were measured, by name; taken if one has these weights.

    Returns:
        what was left out, in sentences.

    Raises:
        CardError: a file is not valid.
    """
    results = read_json(run / "results.json")
    weights = results["weights_sha256"]
    found = read_results(run, weights=weights) or {}
    notes = [
        f"{run}: {path.name} is left out, it does not say that it is about these weights."
        for path in result_files(run)
        if path.stem not in found
    ]
    for name, content in (shared or {}).items():
        if weights in [entry.get("weights") for entry in content["checkpoints"]]:
            if name in found:
                notes.append(f"{run}: {name}.json is left out, the file of --results takes its place.")
            found[name] = {**content, "weights_sha256": weights}
    if (run / "metrics.jsonl").is_file():
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found["curves"] = {**thin_curves([json.loads(line) for line in lines]), "weights_sha256": weights}
    place = published or place_of(without_folders(results["command"]))
    folder.mkdir(parents=True, exist_ok=True)
    for old in result_files(folder):
        old.unlink()
    for name, content in found.items():
        write_json(folder / f"{name}.json", without_folders(content))
    write_json(folder / "config.json", read_json(run / "config.json"))
    about = {"weights": place, "published": published is not None}
    write_json(folder / "card.json", {**about, "tokenizer": (run / "tokenizer_config.json").is_file()})
    return notes


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes README.md and the figures of a model's card from the other files in its folder; returns its path.

    The tables beside the folder are read, too.

    Raises:
        CardError: a file is missing, or states other weights than `results.json`.
    """
    about = read_json(folder / "card.json")
    training = read_json(folder / "results.json")
    weights = training["weights_sha256"]
    results = read_results(folder, weights=weights) or {}
    for path in result_files(folder):
        if path.stem not in results:
            raise CardError(f"{str(path)!r} is about other weights than results.json beside it.")
    draw(folder, results)
    remarks = {"results": beside_tables(folder, training), "lm_eval": beside_table_5(results.get("lm_eval", {}))}
    card = model_card(
        transformers.AutoConfig.from_pretrained(folder),
        results=results,
        name=folder.name,
        weights=weights,
        has_tokenizer=about["tokenizer"],
        figures=figures_of(folder, results),
        remarks={key: text for key, text in remarks.items() if text},
        elsewhere=Weights(about["weights"], None if about["published"] else training["command"], _needs(training)),
    )
    path = folder / "README.md"
    card.save(path)
    return path


def _needs(training: Mapping[str, Any]) -> str:
    """What is to be known of a training command before it is run again."""
    text = ""
    if training.get("seconds") is not None:
        text += f"It took {training['seconds'] / 60:,.1f} minutes (device `{training['device']}`). "
    if training["data"].get("place") == "local files":
        text += (
            "The corpora were local files, in the folder that `WHATWHERE_DATA_DIR` names "
            "(`whatwhere.scripts.data.corpora` says how they lie there); without that variable they are downloaded, "
            "and versions can differ. "
        )
    return text + "Other machines and versions give other weights, and figures that differ a little."


def tables(output: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the results of the papers' tables among the cards in a folder, by the names of theirs."""
    found = {path.parent.name: read_json(path) for path in sorted(output.glob("*/results.json"))}
    return {name: content for name, content in found.items() if "table" in content}


def beside_tables(folder: pathlib.Path, training: Mapping[str, Any]) -> str:
    """Returns, in Markdown, the columns of the papers' tables to which a run belongs; empty if there is none.

    Args:
        folder: of the model's card; those of the tables are beside it.
        training: the contents of its `results.json`.
    """
    parts = []
    for name, table in tables(folder.parent).items():
        mine = [(cell["row"], cell["column"]) for cell in table["cells"] if _has_run(cell, training)]
        if not mine:
            continue
        rows = [["", "column", "ours", "seeds", "paper", "verdict"]]
        # The order is one of rows: those of a column stand together.
        for column in dict.fromkeys(column for _, column in mine):
            for cell in (cell for cell in table["cells"] if cell["column"] == column):
                ours, mark = cell["ours"], "**" if (cell["row"], cell["column"]) in mine else ""
                value = "-" if ours["mean"] is None else f"{ours['mean']:.2f}"
                value += "" if ours["spread"] is None else f" ± {ours['spread']:.2f}"
                texts = [cell["label"], cell["column_label"], value, str(len(ours["seeds"]))]
                texts += [cell["paper"]["text"] or "-", cell["verdict"]["text"]]
                rows.append([f"{mark}{text}{mark}" for text in texts])
        title = table["title"] + (", small version" if table["small"] else "")
        parts.append(
            f"Beside the paper: [{title}](../{name}/README.md), which says what differs from the paper's runs and how "
            f"to read the verdicts. Figures: {table['unit']}; in bold: this model, or the mean of it and other seeds."
        )
        parts.append(_markdown(rows))
    return "\n\n".join(parts)


def _has_run(cell: Mapping[str, Any], training: Mapping[str, Any]) -> bool:
    """Returns whether a run is one of those of a cell: the seconds that it took, to the last bit, are its own."""
    keys = ("seed", "steps", "parameters", "seconds")
    return any(all(seed[key] == training.get(key) for key in keys) for seed in cell["ours"]["seeds"])


def beside_table_5(lm_eval: Mapping[str, Any]) -> str:
    """Returns, in Markdown, zero-shot accuracies beside PoPE's Table 5; empty if none of its tasks was scored.

    Args:
        lm_eval: the contents of `lm_eval.json`.
    """
    scored = {}
    for key, task in TASKS.items():
        for name in (task.hub, task.local, task.scored):
            if name in lm_eval.get("tasks", {}):
                scored[key] = lm_eval["tasks"][name]["metrics"][task.metric]["value"]
    if not scored:
        return ""
    rows = [["accuracy, %", *(f"{TASKS[key].title} ({TASKS[key].metric})" for key in scored)]]
    rows.append(["**this model**", *(f"**{100 * value:.2f}**" for value in scored.values())])
    rows.append(["guessing", *(f"{100 * TASKS[key].chance:.0f}" for key in scored)])
    for name, (figures, _) in TABLE_5.items():
        rows.append([f"paper: {name}", *(f"{figures[list(TASKS).index(key)]:.2f}" for key in scored)])
    return (
        "Beside the paper (PoPE, 2509.10534, Table 5: models of these sizes, trained on OpenWebText, on all questions; "
        "`whatwhere.scripts.evaluation.zero_shot` says what it leaves open):\n\n" + _markdown(rows)
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def regenerate(output: pathlib.Path) -> list[pathlib.Path]:
    """Writes every card in a folder anew, of models and of tables, and the list of them; returns their paths."""
    from .reproduction.report import card_from_results

    paths = []
    for folder in sorted(path.parent for path in output.glob("*/results.json")):
        if (folder / "card.json").is_file():
            paths.append(write(folder))
        else:
            text = card_from_results(folder / "results.json")
            paths.append(folder / "README.md")
            paths[-1].write_text(text, encoding="utf-8")
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
    """Returns the list of the cards in a folder, in Markdown: models with what they reach, tables with the verdicts."""
    models = [["model", "position encoding", "parameters", "held-out figure", "measured besides"]]
    for folder in sorted(path.parent for path in output.glob("*/card.json")):
        results = read_results(folder, weights=read_json(folder / "results.json")["weights_sha256"]) or {}
        training, config = results["results"], read_json(folder / "config.json")
        models.append(
            [
                f"[`{folder.name}`]({folder.name}/README.md)",
                f"`{config['position_encoding']}`",
                f"{training['parameters']:,}" if training.get("parameters") else "",
                _headline(training),
                ", ".join(f"`{name}.json`" for name in results if name not in ("results", "curves")),
            ]
        )
    verdicts = [["table", "of", "runs", "cells"]]
    for name, table in tables(output).items():
        counts: dict[str, int] = {}
        for cell in table["cells"]:
            counts[cell["verdict"]["text"]] = counts.get(cell["verdict"]["text"], 0) + 1
        runs = {seed["folder"] for cell in table["cells"] for seed in cell["ours"]["seeds"]}
        texts = ", ".join(f"{count} {text}" for text, count in counts.items())
        verdicts.append([f"[`{name}`]({name}/README.md)", table["title"], str(len(runs)), texts])
    return "\n\n".join(_markdown(rows) for rows in (models, verdicts) if len(rows) > 1)


def _headline(training: Mapping[str, Any]) -> str:
    """The first figure of a training run, with what it is."""
    metrics, data = training["metrics"], training["data"]
    if sets := metrics.get("test_sets"):
        name, scores = next(iter(sets.items()))
        return f"{100 * scores['token_error']:.2f} % wrong answer tokens, {data['task'].replace('_', ' ')}, {name}"
    # Perplexity where there is text; the papers give nats for music and genomes.
    name = "perplexity" if "bits_per_byte" in metrics else "loss"
    corpus = (data.get("splits") or {}).get(data["split"]) or data.get("dataset") or data["source"]
    return f"{name} {metrics[name]['value']:.4g}, `{corpus}`"


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m whatwhere.scripts.cards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", type=pathlib.Path, metavar="RUN", help="default: every card there, anew")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("model_cards"), metavar="DIR")
    parser.add_argument("--name", default=TEMPLATE, help="of the cards; default %(default)s")
    parser.add_argument("--published", metavar="ID", help="the Hub id of the weights of the one RUN")
    parser.add_argument(
        "--results", nargs="+", default=[], type=pathlib.Path, metavar="FILE", help="of several checkpoints together"
    )
    options = parser.parse_args(arguments)
    try:
        check_writable(options.output)
        for path in make(
            options.runs, options.output, template=options.name, published=options.published, files=options.results
        ):
            print(path)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {explain(error)}\n")


def make(
    runs: Sequence[pathlib.Path],
    output: pathlib.Path,
    *,
    template: str = TEMPLATE,
    published: str | None = None,
    files: Sequence[pathlib.Path] = (),
) -> list[pathlib.Path]:
    """Makes the cards of runs, or without one every card anew; returns the paths of what was written.

    Args:
        runs: folders of finished runs.
        output: the folder of all cards.
        template, published: see `card_folder` and `collect`.
        files: results of several checkpoints, measured together.

    Raises:
        CardError: see `card_folder` and `collect`; or two runs have one name, a file is of none of the runs, or there
            is nothing to do.
    """
    if not runs:
        if published or files:
            raise CardError("--published and --results are about a RUN: give it.")
        if not (paths := regenerate(output)):
            raise CardError(f"output={str(output)!r} holds no cards to write anew: give a RUN.")
        return paths
    if published and len(runs) > 1:
        raise CardError(f"--published {published!r} is not valid: it is of one RUN, and there are {len(runs)}.")
    shared: dict[str, dict[str, Any]] = {}
    for path in files:
        if not path.is_file():
            raise CardError(f"results={str(path)!r} is not a file.")
        content = read_json(path)
        if not path.stem.startswith("length") or not isinstance(content.get("checkpoints"), list):
            raise CardError(f"results={str(path)!r} is not valid: it must be a length*.json with `checkpoints`.")
        name = path.stem if path.stem not in shared else f"length_{path.resolve().parent.name}"
        if name in shared:
            raise CardError(f"results={str(path)!r} is not valid: another file would have the name {name!r}, too.")
        shared[name] = content
    folders: dict[pathlib.Path, pathlib.Path] = {}
    for run in runs:
        folder = card_folder(run, output, template)
        if folder in folders:
            raise CardError(
                f"name={template!r} is not valid: {str(folders[folder])!r} and {str(run)!r} would both be "
                f"{folder.name!r}. Give --name, with {{seed}} or {{folder}}."
            )
        folders[folder] = run
    for folder, run in folders.items():
        for note in collect(run, folder, published=published, shared=shared):
            print(note)
    for path, name in zip(files, shared):
        if not any((folder / f"{name}.json").is_file() for folder in folders):
            raise CardError(f"results={str(path)!r} is not valid: none of its checkpoints has the weights of a RUN.")
    return [*(write(folder) for folder in folders), *write_index(output)]


if __name__ == "__main__":
    main()
