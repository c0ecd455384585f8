"""The table `conversion` of `whatwhere reproduce`: a model with RoPE gets other position encodings and is trained on.

The source is trained by the recipe `convert_small`. Each system is converted as by `whatwhere convert`, and trained on
the same corpus as by `whatwhere finetune`, with 1, 3 and 10 % of the source's tokens, each in a run of its own. All are
measured on WikiText-103 and PG-19 in windows of 1 to 16 times the trained length, as by `whatwhere length`.

Folders in OUTPUT/convert_small: `source`; `<system>-0` right after conversion; `<system>-<percent>`.
"""

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...model_card import weights_fingerprint
from ...validation import suggest
from ..cards.folder import card_of_run
from ..checks import differences, parse
from ..conversion.folder import convert_folder
from ..conversion.record import RECORD
from ..evaluation.data_description import measured_text
from ..evaluation.figures import legend_below, line_styles, new_figure, number_ticks, save_figure
from ..evaluation.results import markdown_table, provenance, read_json
from ..training import loop
from ..training.finetune import FinetuneSettings, finetune
from ..training.recipe import load_recipe
from ..training.run_folder import RunFolder
from ..writing import write_json, write_text
from .measures import BOOKS, measure_lengths, measured

RECIPE = "convert_small"
PERCENT = (1, 3, 10)
# The text of training; the texts of the measurements, and the lengths in multiples of the trained length.
TEXT = "wikipedia_en"
TEXTS: tuple[dict[str, Any], ...] = (
    {**BOOKS, "text_tokens": 8192},
    {"corpus": "wikitext103", "split": "test", "document_limit": None, "text_tokens": 32768, "joined": True},
)
MULTIPLES = (1, 2, 4, 8, 16)
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}


@dataclasses.dataclass(frozen=True)
class System:
    """A row: the new encoding, and the learning rates of `finetune`."""

    label: str
    encoding: Any = "rope"
    parameters: dict | None = None
    rope: dict | None = None
    rate: float = 3e-4
    new_rate: float | None = None


def folders(root: Path, name: str) -> dict[int, Path]:
    """Returns the folders of a system by percent, 0 right after conversion."""
    return {percent: root / f"{name}-{percent}" for percent in (0, *PERCENT)}


SYSTEMS = {
    "continued": System("RoPE, trained on unchanged"),
    "yarn": System("RoPE with YaRN, factor 16", rope=YARN),
    "none": System("none (DroPE)", "none"),
    "pope": System("PoPE", "pope"),
    "pope-softplus": System("PoPE with softplus, one channel for each pair", "pope", {"magnitude": "softplus"}),
    "cope-rope": System("CoPE + RoPE", "cope+rope", new_rate=1e-2),
    "cope": System("CoPE", "cope", new_rate=1e-2),
    "plan-pope": System("RoPE, RoPE, PoPE, by layer", ["rope", "rope", "pope"]),
    "plan-none": System("RoPE, RoPE, none, by layer", ["rope", "rope", "none"]),
}


def train(output: Path, systems: Sequence[str], data_dir: str | None) -> None:
    """Trains, converts and measures what is missing; interrupted runs are continued."""
    recipe, root = load_recipe(RECIPE), output / RECIPE
    source = root / "source"
    with card_of_run(source):
        loop.train(recipe, source, resume="auto", data_dir=data_dir)
    _measure(source, data_dir)
    for name in systems:
        system = SYSTEMS[name]
        start, *others = folders(root, name).values()
        if (start / RECORD).exists():
            check_conversion(start, system, weights_fingerprint(source))
        else:
            shutil.rmtree(start, ignore_errors=True)
            convert_folder(str(source), start, system.encoding, system.parameters, system.rope)
        _measure(start, data_dir)
        for percent, trained in zip(PERCENT, others):
            check_training(trained, start)
            _finetune(system, start, trained, percent, data_dir)
            _measure(trained, data_dir)


def check_conversion(folder: Path, system: System, source: str) -> None:
    """Raises ValueError if a folder has another conversion than that of a system, of a source with this SHA-256."""
    if read_json(folder / RECORD)["source_weights_sha256"] != source:
        raise ValueError(f"{str(folder)!r} is a conversion of another source: choose another --output.")
    config, record = read_json(folder / "config.json"), read_json(folder / RECORD)
    # PoPE in place of RoPE has RoPE's frequencies, but no such field.
    given = config.get("rope_parameters") or record.get("rope_parameters") or {}
    rope = {"rope_type": "default", **given}
    wanted = {
        "position_encoding": system.encoding,
        "position_encoding_parameters": system.parameters or {},
        "rope_parameters": {"rope_type": "default", **(system.rope or {})},
    }
    if changed := differences(_part({**config, "rope_parameters": rope}, wanted), wanted):
        raise ValueError(
            f"{str(folder)!r} is another conversion (there → needed): {'; '.join(changed)}. Remove it, or choose "
            "another --output."
        )


def _part(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of settings that other settings have, too."""
    return {
        key: _part(found.get(key) or {}, value) if isinstance(value, Mapping) else found.get(key)
        for key, value in wanted.items()
    }


def check_training(folder: Path, start: Path) -> None:
    """Raises ValueError if a finished run did not begin with the weights that the folder `start` has."""
    results = RunFolder(folder).results()
    if results is not None and results["base_weights_sha256"] != weights_fingerprint(start):
        raise ValueError(
            f"{str(folder)!r} was trained from other weights than those in {str(start)!r}: remove it, or choose "
            "another --output."
        )


def _finetune(system: System, start: Path, output: Path, percent: int, data_dir: str | None) -> None:
    """Trains a converted model with a share of the source's tokens."""
    recipe = load_recipe(RECIPE)
    steps = recipe.training.steps * percent // 100
    settings = {
        "checkpoint": str(start),
        "data": TEXT,
        # YaRN's configured length is that of the longer texts.
        "sequence_length": recipe.data.sequence_length,
        "evaluation_blocks": 32,
        "steps": steps,
        "batch_size": 8,
        "accumulation": recipe.training.batch_size // 8,
        "learning_rate": system.rate,
        "new_learning_rate": system.new_rate,
        "warmup_steps": steps // 10,
        "weight_decay": recipe.training.weight_decay,
    }
    with card_of_run(output):
        finetune(parse(FinetuneSettings, settings), output, resume="auto", data_dir=data_dir)


def _measure(folder: Path, data_dir: str | None) -> None:
    for text in TEXTS:
        measure_lengths(folder, MULTIPLES, data_dir, text)


def collect(output: Path, systems: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of what is measured: perplexity by system, percent, text and multiple of the length."""
    source = output / RECIPE / "source"
    found_in = [("source", "the source", 0, source)]
    for name in systems:
        made = folders(output / RECIPE, name)
        found_in += [(name, SYSTEMS[name].label, percent, folder) for percent, folder in made.items()]
    rows = []
    for name, label, percent, folder in found_in:
        found = {text["corpus"]: measured(folder, weights_fingerprint(folder), text) for text in TEXTS}
        if all(set(MULTIPLES) <= set(one) for one in found.values()):
            cells = {text: {str(k): one[k]["perplexity"] for k in MULTIPLES} for text, one in found.items()}
            rows.append({"system": name, "label": label, "percent": percent, "perplexity": cells})
    if not rows or rows[0]["system"] != "source":
        raise ValueError(f"{str(source)!r} is not a finished and measured run: there is no report.")
    return {"rows": rows, "source": read_json(source / "results.json")}


def write(report: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Writes the report into a folder: `stem`.json, .md, and .png and .svg."""
    write_json(folder / f"{stem}.json", dict(report))
    write_text(folder / f"{stem}.md", markdown(report))
    return [folder / f"{stem}.json", folder / f"{stem}.md", *draw(report, folder / stem)]


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the table."""
    length, tokens = report["source"]["length"], report["source"]["tokens_trained"]
    multiples = [str(multiple) for multiple in MULTIPLES]
    columns = [("wikitext103", "WikiText-103", k) for k in (multiples[0], multiples[-1])]
    columns += [("pg19", "PG-19", k) for k in multiples]
    head = ["system", "tokens, % of the source's"]
    rows = [[*head, *(f"{title}, {length * int(k):,}" for _, title, k in columns)]]
    for row in report["rows"]:
        cells = [row["perplexity"][text][k] for text, _, k in columns]
        rows.append([row["label"], str(row["percent"]), *("-" if cell is None else f"{cell:.1f}" for cell in cells)])
    lines = [
        f"Perplexity in windows of several lengths. The source: {report['source']['parameters']:,} parameters, trained "
        f"on {tokens / 1e6:.1f} million tokens in sequences of {length}, seed {report['source']['seed']}.",
        "",
        markdown_table(rows),
    ]
    return "\n".join(lines)


def draw(report: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draws the perplexity on PG-19 at the trained length, and at 16 times it, against the tokens of training."""
    figure = new_figure(11.0, 5.4)
    figure.suptitle(measured_text({**TEXTS[0], "documents": TEXTS[0]["document_limit"]}, []), fontsize="medium")
    panels = figure.subplots(1, 2)
    places = [0, *PERCENT]
    names = list(dict.fromkeys(row["system"] for row in report["rows"][1:]))
    # The first two rows have RoPE, and the others are named as encodings.
    styles = line_styles(["rope" if name == "continued" else name.replace("-", "+") for name in names])
    for panel, multiple in zip(panels, ("1", "16")):
        for name, style in zip(names, styles):
            rows = [row for row in report["rows"] if row["system"] == name]
            values = [row["perplexity"]["pg19"][multiple] for row in rows]
            panel.plot([places.index(row["percent"]) for row in rows], values, label=rows[0]["label"], **style)
        panel.axhline(report["rows"][0]["perplexity"]["pg19"][multiple], color="0.5", linestyle=":", label="the source")
        panel.set_xticks(range(len(places)), [f"{percent} %" for percent in places])
        panel.set_yscale("log")
        number_ticks(panel.yaxis)
        panel.set_title(f"windows of {int(multiple) * report['source']['length']:,} tokens", fontsize="medium")
        panel.set_xlabel("tokens of training after conversion, of the source's")
        panel.set_ylabel("perplexity per token")
        panel.grid(alpha=0.3)
    legend_below(figure, panels[0])
    return save_figure(figure, stem)


def chosen_systems(options: Any, table: str, systems: Mapping[str, System]) -> list[str]:
    """Returns the systems that `--rows` names, by default all; raises ValueError for options that are not valid."""
    for name in ("seeds", "set", "cards"):
        if getattr(options, name) not in (None, []):
            raise ValueError(f"--{name} has no effect with {table}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{table} runs on one process: the batch size of `finetune` is for each process.")
    for name in options.rows or ():
        if name not in systems:
            raise ValueError(f"--rows {name!r} is not valid. {suggest(name, systems)}")
    return options.rows or list(systems)


def main(options: Any, arguments: list[str] | None) -> None:
    """Runs the command line of `whatwhere reproduce conversion`; raises ValueError for options that are not valid."""
    if not options.small:
        raise ValueError("conversion has only a small version: add --small.")
    systems = chosen_systems(options, "conversion", SYSTEMS)
    if options.dry_run:
        for name in systems:
            trained = folders(options.output / RECIPE, name)
            states = (f"{percent} % {RunFolder(folder).state()}" for percent, folder in trained.items() if percent)
            print(f"{name}: {', '.join(states)}")
        return
    if not options.report_only:
        train(options.output, systems, options.data_dir)
    report = collect(options.output, list(SYSTEMS)) | provenance("reproduce", arguments)
    files = write(report, options.output, "conversion_small")
    print(markdown(report))
    print(f"Written: {', '.join(map(str, files))}")
