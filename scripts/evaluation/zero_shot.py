"""The six zero-shot tasks of PoPE's Table 5 in lm-eval: their names there, their scores in a table beside the paper's.

LAMBADA is the greedy last word (the paper, section 5), BLiMP and CBT are means over their parts: 67 paradigms, four
word classes. For HellaSwag, PIQA and ARC-Easy the paper does not say whether the likelihood of an answer is divided by
its length. Earlier public code of one of its authors (github.com/RobertCsordas/moeut_training_code, in
`framework/dataset/text/`) divides by the number of tokens in all three, so `acc_norm`, which divides by the number of
characters, is what we put beside the paper; `lm_eval.json` holds `acc` too.

For CBT that code also divides, and it ends the context with a space, which puts candidates into tokens that are rare in
text. We follow GPT-2's definition (the whole likelihood of the candidate and the rest of its sentence). How the paper
computed its CBT is not known: there, compare models with each other rather than with the paper.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import transformers

from ...position_base import suggest
from ...position_registry import max_length
from .results import lm_eval_tasks
from .tasks.zero_shot_files import missing_files

TASK_FOLDER = pathlib.Path(__file__).with_name("tasks")

# Draws for the standard error of LAMBADA's perplexity. lm-eval's default of 100,000 takes minutes.
BOOTSTRAP_DRAWS = 1000
# max_length for lm-eval, in tokens, for models without a limit: longer than any question.
MAX_LENGTH = 1 << 17


@dataclasses.dataclass(frozen=True)
class ZeroShotTask:
    """A task of the table.

    Attributes:
        title: as the paper writes it.
        hub: lm-eval's task or group that reads the Hub's data.
        local: our group that reads local files.
        scored: the names of the local group's scores in lm-eval's report.
        metric: the one that stands beside the paper's.
        chance: its expected value by guessing.
    """

    title: str
    hub: str
    local: str
    scored: str
    metric: str
    chance: float


TASKS = {
    "lambada": ZeroShotTask(
        "LAMBADA", "lambada_openai", "whatwhere_local_lambada_openai", "lambada_openai", "acc", 0.0
    ),
    "blimp": ZeroShotTask("BLiMP", "blimp", "whatwhere_local_blimp", "whatwhere_local_blimp", "acc", 0.5),
    "cbt": ZeroShotTask("CBT", "whatwhere_cbt", "whatwhere_local_cbt", "whatwhere_local_cbt", "acc", 0.1),
    "hellaswag": ZeroShotTask("HellaSwag", "hellaswag", "whatwhere_local_hellaswag", "hellaswag", "acc_norm", 0.25),
    "piqa": ZeroShotTask("PIQA", "piqa", "whatwhere_local_piqa", "piqa", "acc_norm", 0.5),
    "arc_easy": ZeroShotTask("ARC-Easy", "arc_easy", "whatwhere_local_arc_easy", "arc_easy", "acc_norm", 0.25),
}

# Gopalakrishnan et al. 2025 (2509.10534), Table 5: accuracy in percent, in the order of TASKS, and the printed mean.
TABLE_5 = {
    "RoPE, 124M": ((28.74, 77.55, 38.80, 29.55, 60.28, 37.08), 45.33),
    "PoPE, 124M": ((27.67, 77.75, 44.43, 29.18, 59.58, 38.52), 46.19),
    "RoPE, 253M": ((31.38, 79.12, 48.51, 31.47, 62.24, 39.87), 48.76),
    "PoPE, 253M": ((30.47, 80.01, 49.39, 31.82, 61.70, 39.32), 48.78),
    "RoPE, 774M": ((35.95, 81.05, 52.56, 35.39, 63.55, 42.28), 51.80),
    "PoPE, 774M": ((36.89, 82.03, 53.67, 35.86, 63.93, 42.37), 52.46),
}


def choose_tasks(names: str | None, data_dir: str | os.PathLike[str] | None) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the tasks to run, and those to leave out with the local files that they lack.

    Args:
        names: keys of TASKS with commas between them; None for all for which there is data.
        data_dir: the folder of local data sets; None for the Hub's.

    Raises:
        ValueError: a name is not a task, or is there twice; no task has its files.
        FileNotFoundError: the folder does not exist, or lacks files of a task that was asked for.
    """
    chosen = list(TASKS) if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in TASKS:
            raise ValueError(f"tasks={names!r}: {name!r} is not a task. {suggest(name, TASKS)}")
        if chosen.count(name) > 1:
            raise ValueError(f"tasks={names!r} names {name} twice.")
    missing = {} if data_dir is None else {name: missing_files(name, data_dir) for name in chosen}
    missing = {name: files for name, files in missing.items() if files}
    if missing and (names is not None or len(missing) == len(chosen)):
        lacks = "; ".join(f"{name}: {', '.join(files)}" for name, files in missing.items())
        raise FileNotFoundError(f"data-dir={str(data_dir)!r} lacks files of tasks: {lacks}.")
    return [name for name in chosen if name not in missing], missing


class _LogFilter(logging.Filter):
    """Drops what lm-eval logs once for each of thousands of requests, and counts the requests that it cut."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated = 0

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "Truncating" in message and "from the left" in message:
            self.truncated += 1
            return False
        return "Custom kwargs can be passed to" not in message


def task_manager(data_dir: str | os.PathLike[str] | None = None) -> Any:
    """Returns lm-eval's `TaskManager` with its own tasks and ours; making it takes some seconds.

    Args:
        data_dir: the folder that our local tasks read.

    Raises:
        ImportError: lm-eval is not installed.
    """
    from lm_eval.tasks import TaskManager

    metadata = None if data_dir is None else {"data_dir": str(data_dir)}
    return TaskManager(include_path=str(TASK_FOLDER), metadata=metadata)


def run(
    checkpoint: str,
    tasks: Sequence[str],
    manager: Any,
    *,
    local: bool,
    limit: int | None = None,
    batch_size: int | str = 8,
    device: str = "cpu",
    dtype: str = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Asks one checkpoint the questions of tasks and returns lm-eval's report, with `truncated_requests` added.

    A question that is longer than the model's configured length loses its beginning; `truncated_requests` counts the
    requests (one for each answer to choose from) to which that happened. Questions are never cut for our models whose
    position encoding has no limit.

    Args:
        checkpoint: a folder or Hub id with a tokenizer.
        tasks: keys of TASKS.
        manager: from `task_manager`.
        local: read local files, not the Hub.
        limit: ask only so many questions of each task, of BLiMP's and CBT's parts each; None for all.
        batch_size: requests in a batch, or "auto", which finds the largest.
        device: for example "cuda".
        dtype: of the model's weights and activations.
        attn_implementation: None for the model's own choice.
        trust_remote_code: run the code in the checkpoint's folder.

    Raises:
        ValueError: the checkpoint can not be loaded.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from safetensors import SafetensorError

    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        if hasattr(config, "position_encoding") and max_length(config) is None:
            options["max_length"] = MAX_LENGTH
        model = HFLM(
            pretrained=checkpoint,
            backend="causal",
            device=device,
            dtype=dtype,
            batch_size=batch_size,
            trust_remote_code=trust_remote_code,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error
    log_filter = _LogFilter()
    # A filter of a logger does not see what its children log: it must be theirs.
    loggers = [logging.getLogger(f"lm_eval.{name}") for name in ("api.task", "models.huggingface")]
    for logger in loggers:
        logger.addFilter(log_filter)
    # One chunk of draws is no work for several processes.
    processes = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        report = lm_eval.simple_evaluate(
            model,
            tasks=[TASKS[name].local if local else TASKS[name].hub for name in tasks],
            task_manager=manager,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_DRAWS,
            log_samples=False,
        )
    finally:
        for logger in loggers:
            logger.removeFilter(log_filter)
        if processes is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = processes
    return {**report, "truncated_requests": log_filter.truncated}


def content(
    report: Mapping[str, Any], origin: Mapping[str, Any], *, data: str, device: str, dtype: str
) -> dict[str, Any]:
    """Returns the content of `lm_eval.json` from a report.

    Args:
        report: from `run`.
        origin: from `provenance`: the command, the date, the versions.
        data: where the questions came from.
        device: that the model ran on.
        dtype: that it ran in.
    """
    limit = report["config"]["limit"]
    about = {"limit": limit, "data": data, "device": device, "dtype": dtype}
    about |= {key: origin[key] for key in ("command", "date")}
    return {
        "tasks": {name: {**task, **about} for name, task in lm_eval_tasks(report).items()},
        "limit": limit,
        "parameters": report["config"]["model_num_parameters"],
        "max_length": report["max_length"],
        "truncated_requests": report["truncated_requests"],
        **origin,
    }


def merge(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Puts new scores among those that a checkpoint has already, if they are about the same weights.

    Args:
        old: the content of the `lm_eval.json` that is there; None for none.
        new: from `content`, with `weights_sha256`, which is None for a model that has no folder.

    Returns:
        The content to write, and the tasks whose old scores stay because they are of more questions. Its `command`
        lists the commands of all the scores in it, one a line.
    """
    if old is None or new["weights_sha256"] is None or old.get("weights_sha256") != new["weights_sha256"]:
        return dict(new), []
    kept = [
        name for name, task in new["tasks"].items() if old["tasks"].get(name, {}).get("samples", 0) > task["samples"]
    ]
    tasks = {**old["tasks"], **{name: task for name, task in new["tasks"].items() if name not in kept}}
    commands = dict.fromkeys(task.get("command", old["command"]) for task in tasks.values())
    return {**new, "tasks": tasks, "command": "\n".join(commands)}, kept


def _percent(score: Mapping[str, Any]) -> str:
    error = score["standard_error"]
    return f"{100 * score['value']:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def _rows(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def table(
    contents: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[str],
    *,
    local: bool,
    left_out: Mapping[str, Sequence[str]],
) -> str:
    """Returns the scores of checkpoints, beside the paper's Table 5, in Markdown.

    Args:
        contents: from `content`, by checkpoint; all of the same tasks and limit.
        tasks: keys of TASKS, in the order of the columns.
        local: the questions came from local files.
        left_out: tasks that were not run, and the files that they lack.
    """
    # The scores by checkpoint and task: lm-eval's names depend on where the data came from.
    scores = {
        checkpoint: {name: found["tasks"][TASKS[name].scored if local else TASKS[name].hub] for name in tasks}
        for checkpoint, found in contents.items()
    }
    parts = [
        "# Zero-shot evaluation",
        _comparison(contents, scores, tasks),
        _questions(next(iter(scores.values())), local=local),
        "Every accuracy; CN, NE, P, V are CBT's common nouns, named entities, prepositions and verbs:",
        _accuracies(scores),
        "\n".join(f"- {note}" for note in _notes(contents, tasks, local=local, left_out=left_out)),
    ]
    return "\n\n".join(parts) + "\n"


def _comparison(contents: Mapping[str, Any], scores: Mapping[str, Any], tasks: Sequence[str]) -> str:
    """One row a checkpoint, then guessing and the paper's; the mean is over the same tasks in every row."""
    mean = "mean" if len(tasks) == len(TASKS) else f"mean of these {len(tasks)}"
    rows = [["accuracy, %", "parameters", *(TASKS[name].title for name in tasks), mean]]
    for checkpoint, by_task in scores.items():
        metrics = [by_task[name]["metrics"][TASKS[name].metric] for name in tasks]
        average = 100 * sum(metric["value"] for metric in metrics) / len(metrics)
        rows.append([checkpoint, f"{contents[checkpoint]['parameters']:,}", *map(_percent, metrics), f"{average:.2f}"])
    chances = [100 * TASKS[name].chance for name in tasks]
    rows.append(["guessing", "", *(f"{chance:.0f}" for chance in chances), f"{sum(chances) / len(chances):.2f}"])
    for name, (figures, _) in TABLE_5.items():
        chosen = [figures[list(TASKS).index(task)] for task in tasks]
        encoding, size = name.split(", ")
        cells = [f"{figure:.2f}" for figure in (*chosen, sum(chosen) / len(chosen))]
        rows.append([f"{encoding}, the paper's", size, *cells])
    return _rows(rows)


def _questions(by_task: Mapping[str, Any], *, local: bool) -> str:
    """What was asked: it is the same for all checkpoints."""
    rows = [["task", "in lm-eval", "version", "metric above", "split", "shots", "questions"]]
    for name, task in by_task.items():
        known = TASKS[name]
        cells = [known.title, known.local if local else known.hub, task["version"], known.metric]
        rows.append([*map(str, [*cells, task["split"], task["shots"]]), f"{task['samples']:,}"])
    return _rows(rows)


def _accuracies(scores: Mapping[str, Any]) -> str:
    """All accuracies, those of CBT's word classes too."""
    rows = [["checkpoint", "task", "metric", "accuracy, %"]]
    for checkpoint, by_task in scores.items():
        for name, task in by_task.items():
            shown = {TASKS[name].title: task}
            if name == "cbt":
                shown |= {f"CBT, {part.split('_')[-1].upper()}": found for part, found in task["subtasks"].items()}
            for title, found in shown.items():
                accuracies = {key: metric for key, metric in found["metrics"].items() if key.startswith("acc")}
                rows += [[checkpoint, title, key, _percent(metric)] for key, metric in accuracies.items()]
    return _rows(rows)


def _notes(
    contents: Mapping[str, Any], tasks: Sequence[str], *, local: bool, left_out: Mapping[str, Sequence[str]]
) -> list[str]:
    notes = []
    limit = next(iter(contents.values()))["limit"]
    if limit is not None:
        notes.append(
            f"**Only the first {limit} questions of each task** (of each part of BLiMP and CBT): not comparable with "
            "the paper, or with other results."
        )
    for name, files in left_out.items():
        notes.append(f"**{TASKS[name].title} was not run**: the data folder lacks {', '.join(files)}.")
    for checkpoint, found in contents.items():
        if found["truncated_requests"]:
            notes.append(
                f"{checkpoint}: {found['truncated_requests']:,} requests were longer than its {found['max_length']:,} "
                "tokens and lost their beginning."
            )
    changed = [TASKS[name].title for name in tasks if name in ("hellaswag", "arc_easy")]
    if local and changed:
        notes.append(
            f"The local data of {' and '.join(changed)} are not quite the Hub's: "
            "`whatwhere.scripts.evaluation.tasks.zero_shot_files` says how."
        )
    notes.append(
        "The paper: Gopalakrishnan et al. 2025 (2509.10534), Table 5; models of these sizes, trained on OpenWebText "
        "with 1,024 tokens. It does not say which accuracy it gives for HellaSwag, PIQA and ARC-Easy, or how CBT is "
        "scored; `whatwhere.scripts.evaluation.zero_shot` says why we compare these."
    )
    notes.append(f"Questions from {'local files' if local else 'the Hub'}. ± is one standard error over questions.")
    return notes
