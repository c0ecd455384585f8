"""Zero-shot evaluation of checkpoints with lm-eval: LAMBADA (OpenAI's), BLiMP, CBT, HellaSwag, PIQA, ARC-Easy.

Output: `lm_eval.json` in each checkpoint's folder with lm-eval's full report under `lm_eval/` (for Hub ids in a folder
of `--output`), and `zero_shot.md` in `--output`, a table with the paper's Table 5. `--output` defaults to the folder of
a single checkpoint, else to `zero_shot/`. Existing scores of the same weights are kept if they are of other tasks or of
more questions.

**Metrics.** LAMBADA is scored by the greedy last word (PoPE, section 5). BLiMP and CBT are means over their parts (67
paradigms, four word classes). For HellaSwag, PIQA and ARC-Easy the paper does not state whether likelihoods are
normalised by length. Earlier public code of one of its authors (github.com/RobertCsordas/moeut_training_code, in
`framework/dataset/text/`) divides by the number of tokens in all three, so the table has `acc_norm`, which divides by
the number of characters; `lm_eval.json` has `acc`, too. For CBT that code also divides, and ends the context with a
space, which gives candidates an unusual tokenisation. We follow GPT-2's definition (the likelihood of the candidate and
the rest of its sentence), so CBT scores are comparable between models here, but not with the paper.
"""

import argparse
import contextlib
import functools
import io
import json
import logging
import os
import pathlib
import shlex
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from whatwhere_cli.zero_shot import parser

from ...model_card import weights_fingerprint
from ...validation import suggest
from ..data.folder import DATA_DIR_VARIABLE, data_folder
from ..errors import program
from ..progress import Progress, without_bars
from ..writing import check_writable, write_json
from .checkpoints import (
    MAX_LENGTH,
    Loading,
    checked_loading,
    loading_of,
    longest_length,
    names_of,
    output_of,
)
from .lm_eval.zero_shot_files import FILES
from .results import lm_eval_tasks, markdown_table, provenance, read_json
from .scorer import scorer

TASK_FOLDER = pathlib.Path(__file__).with_name("lm_eval")

# Bootstrap samples for the standard error of LAMBADA's perplexity; lm-eval's default of 100,000 takes minutes.
BOOTSTRAP_DRAWS = 1000


class ZeroShotTask(NamedTuple):
    """A task of the table; the scores of a group with local files have the name of our group."""

    title: str
    # lm-eval's task or group with the Hub's data.
    hub: str
    metric: str
    chance: float
    is_group: bool = False

    @property
    def local(self) -> str:
        """Our group with local files."""
        return f"whatwhere_local_{self.hub.removeprefix('whatwhere_')}"

    @property
    def scored(self) -> str:
        """The name of the local group's scores in lm-eval's report."""
        return self.local if self.is_group else self.hub


TASKS = {
    "lambada": ZeroShotTask("LAMBADA", "lambada_openai", "acc", 0.0),
    "blimp": ZeroShotTask("BLiMP", "blimp", "acc", 0.5, is_group=True),
    "cbt": ZeroShotTask("CBT", "whatwhere_cbt", "acc", 0.1, is_group=True),
    "hellaswag": ZeroShotTask("HellaSwag", "hellaswag", "acc_norm", 0.25),
    "piqa": ZeroShotTask("PIQA", "piqa", "acc_norm", 0.5),
    "arc_easy": ZeroShotTask("ARC-Easy", "arc_easy", "acc_norm", 0.25),
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


def choose_tasks(names: str | None, data_dir: pathlib.Path | None) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the tasks to run, and the tasks to leave out with their missing local files.

    Files may not be missing for a task in `names`, or for all tasks.
    """
    chosen = list(TASKS) if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in TASKS:
            raise ValueError(f"tasks={names!r}: {name!r} is not a task. {suggest(name, TASKS)}")
    missing = {}
    if data_dir is not None:
        found = {name: [file for file in FILES[name] if not (data_dir / file).is_file()] for name in chosen}
        missing = {name: files for name, files in found.items() if files}
    if missing and (names is not None or len(missing) == len(chosen)):
        lacks = "; ".join(f"{name}: {', '.join(files)}" for name, files in missing.items())
        raise ValueError(f"data-dir={str(data_dir)!r} has no files for: {lacks}.")
    return [name for name in chosen if name not in missing], missing


def _is_wanted(record: logging.LogRecord) -> bool:
    """Filters the messages that lm-eval logs for every request."""
    message = record.getMessage()
    return not any(text in message for text in ("Truncating", "Custom kwargs can be passed to"))


def task_manager(data_dir: str | os.PathLike[str] | None = None) -> Any:
    """Returns lm-eval's `TaskManager` with its tasks and ours; this takes some seconds."""
    from lm_eval.tasks import TaskManager

    # Filters of a parent logger do not apply to messages of its children.
    for name in ("api.task", "models.huggingface"):
        logging.getLogger(f"lm_eval.{name}").addFilter(_is_wanted)
    metadata = None if data_dir is None else {"data_dir": str(data_dir)}
    return TaskManager(include_path=str(TASK_FOLDER), metadata=metadata)


def load_scorer(checkpoint: str, loading: Loading, batch_size: int | str) -> Any:
    """Returns lm-eval's model of a checkpoint; raises ValueError if it cannot be loaded."""
    with checked_loading(checkpoint):
        found = scorer(
            loading.processes,
            pretrained=checkpoint,
            backend="causal",
            device=loading.device,
            dtype=loading.dtype,
            batch_size=batch_size,
            trust_remote_code=loading.trust_remote_code,
            attn_implementation=loading.attn_implementation,
        )
    if hasattr(found.model.config, "position_encoding") and longest_length(found.model) is None:
        # Otherwise lm-eval reads it from the configuration.
        found._max_length = MAX_LENGTH
    return found


class Requests(Progress):
    """The progress of lm-eval, which makes its bars by the arguments of tqdm."""

    def __init__(self, *, name: str, total: int, disable: bool = False, **options: Any) -> None:
        super().__init__(name, total, unit="requests", shown=not disable)

    update = Progress.advance


@contextlib.contextmanager
def quiet(name: str | None = None) -> Iterator[None]:
    """Replaces lm-eval's many progress bars by one with this name, or by none, and mutes what else it prints.

    It also asks git for the version of the working folder, whatever that is.
    """
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.evaluator
    import lm_eval.models.huggingface
    import tqdm as tqdm_module

    class Silent(tqdm_module.tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    with contextlib.ExitStack() as stack:
        for owner, bar in (
            (tqdm_module, Silent),
            (lm_eval.api.model, Silent),
            (lm_eval.api.task, Silent),
            (lm_eval.models.huggingface, Silent if name is None else functools.partial(Requests, name=name)),
        ):
            stack.enter_context(unittest.mock.patch.object(owner, "tqdm", bar, create=True))
        stack.enter_context(
            unittest.mock.patch.object(lm_eval.evaluator, "get_git_commit_hash", create=True, return_value=None)
        )
        stack.enter_context(without_bars())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def run(
    model: Any, tasks: Sequence[str], manager: Any, *, local: bool, limit: int | None = None, name: str | None = None
) -> dict[str, Any] | None:
    """Evaluates a model of `load_scorer`; returns lm-eval's report with `truncated_requests`, in the first process.

    Progress is displayed under `name`.

    Questions longer than the model's configured length are truncated at the beginning; `truncated_requests` counts the
    truncated requests (one for each possible answer). Questions are never truncated for our models whose position
    encoding has no limit.
    """
    import lm_eval

    # BOOTSTRAP_DRAWS fit into one chunk, so more processes do not help.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        with quiet(name):
            report = lm_eval.simple_evaluate(
                model,
                tasks=[TASKS[task].local if local else TASKS[task].hub for task in tasks],
                task_manager=manager,
                limit=limit,
                bootstrap_iters=BOOTSTRAP_DRAWS,
                log_samples=False,
            )
    except ConnectionError as error:
        raise ConnectionError(f"{error}. For local files, give --data-dir, or set {DATA_DIR_VARIABLE}.") from error
    return report and {**report, "truncated_requests": model.truncated}


def content(report: Mapping[str, Any], origin: Mapping[str, Any], loading: Loading, *, local: bool) -> dict[str, Any]:
    """Returns the content of `lm_eval.json` from a report of `run`; `origin` is from `provenance`."""
    limit = report["config"]["limit"]
    about = {"limit": limit, "data": "local files" if local else "the Hub"}
    about |= {"device": loading.device, "dtype": loading.dtype}
    about |= {key: origin[key] for key in ("command", "date")}
    return {
        "tasks": {name: {**task, **about} for name, task in lm_eval_tasks(report).items()},
        "limit": limit,
        "parameters": report["config"]["model_num_parameters"],
        "max_length": report["max_length"],
        "truncated_requests": report["truncated_requests"],
        **origin,
    }


def _heading(name: str) -> str:
    task = TASKS[name]
    return task.title if task.metric == "acc" else f"{task.title} ({task.metric})"


def _percent(score: Mapping[str, Any]) -> str:
    error = score["standard_error"]
    return f"{100 * score['value']:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def table(
    contents: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[str],
    *,
    local: bool,
    left_out: Mapping[str, Sequence[str]],
) -> str:
    """Returns the scores of checkpoints with chance level and the paper's Table 5, in Markdown.

    `contents`, by checkpoint, all have the same tasks and limit; `left_out` are the missing files of other tasks.
    """
    # The mean is over the same tasks in every row.
    mean = "mean" if len(tasks) == len(TASKS) else f"mean of these {len(tasks)}"
    rows = [["accuracy, %", "parameters", *map(_heading, tasks), mean]]
    notes = []
    for checkpoint, found in contents.items():
        # lm-eval's names depend on where the data came from.
        names = [TASKS[name].scored if local else TASKS[name].hub for name in tasks]
        metrics = [found["tasks"][key]["metrics"][TASKS[name].metric] for key, name in zip(names, tasks)]
        average = 100 * sum(metric["value"] for metric in metrics) / len(metrics)
        rows.append([checkpoint, f"{found['parameters']:,}", *map(_percent, metrics), f"{average:.2f}"])
        if cut := found["truncated_requests"]:
            limit = found["max_length"]
            notes.append(
                f"{checkpoint}: {cut:,} requests were longer than {limit:,} tokens and truncated at the beginning."
            )
    printed = {"chance, ": [100 * task.chance for task in TASKS.values()]}
    printed |= {f"the paper's {name}": list(figures) for name, (figures, _) in TABLE_5.items()}
    for name, figures in printed.items():
        chosen = [figures[list(TASKS).index(task)] for task in tasks]
        cells = [f"{figure:.2f}" for figure in (*chosen, sum(chosen) / len(chosen))]
        rows.append([*name.split(", "), *cells])
    limit = next(iter(contents.values()))["limit"]
    if limit is not None:
        notes.append(f"**Only the first {limit} questions of each task or part**: not comparable with other results.")
    notes += [f"**{TASKS[name].title} was not run**: missing {', '.join(files)}." for name, files in left_out.items()]
    if local:
        notes.append("Questions from local files; HellaSwag's and ARC-Easy's differ slightly from the Hub's.")
    notes.append(
        "± is one standard error over questions. The paper: Gopalakrishnan et al. 2025 (2509.10534), Table 5; models "
        "trained on OpenWebText with 1,024 tokens."
    )
    lines = "\n".join(f"- {note}" for note in notes)
    return f"# Zero-shot evaluation\n\n{markdown_table(rows)}\n\n{lines}\n"


def result_folder(checkpoint: str, output: pathlib.Path) -> pathlib.Path:
    """Returns the folder for a checkpoint's results: its own folder, or for a Hub id one in `output`."""
    return pathlib.Path(checkpoint) if pathlib.Path(checkpoint).is_dir() else output / checkpoint.replace("/", "__")


def save(folder: pathlib.Path, content: dict[str, Any], report: dict[str, Any]) -> None:
    """Writes `lm_eval.json` and lm-eval's report into the folder of a checkpoint's results.

    Existing scores of the same weights are kept if they are of other tasks or of more questions.
    """
    from lm_eval.utils import handle_non_serializable

    file = folder / "lm_eval.json"
    if (folder / "config.json").is_file():
        content = {**content, "weights_sha256": weights_fingerprint(folder)}
        old = read_json(file) if file.is_file() else {}
        if old.get("weights_sha256") == content["weights_sha256"]:
            tasks = dict(content["tasks"])
            for name, task in old["tasks"].items():
                if name not in tasks or task["samples"] > tasks[name]["samples"]:
                    tasks[name] = {"command": old["command"], **task}
            commands = dict.fromkeys(task["command"] for task in tasks.values())
            content |= {"tasks": tasks, "command": "\n".join(commands)}
    write_json(file, content)
    raw = folder / "lm_eval" / f"results_{content['date'].replace(':', '-')}.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps(report, indent=2, default=handle_non_serializable) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parser().parse_args(arguments)
    if options.print_task_folder:
        print(TASK_FOLDER)
        return
    options.output = options.output or output_of(options.checkpoints, "zero_shot")
    names_of(options.checkpoints)
    file = options.output / "zero_shot.md"
    replaced = ", in place of an earlier table" if file.is_file() else ""
    text = evaluate(options, provenance("zero-shot", arguments))
    if text is not None:
        print(text)
        print(f"Written: {file}{replaced}")
        if local := [checkpoint for checkpoint in options.checkpoints if pathlib.Path(checkpoint).is_dir()]:
            print(f"Next, model cards: {shlex.join([*program(), 'card', *local])}")


def evaluate(options: argparse.Namespace, origin: dict[str, Any]) -> str | None:
    """Evaluates every checkpoint. The first process writes all results and returns the table in Markdown."""
    loading = loading_of(options)
    is_first = loading.processes.is_first
    data_dir = data_folder(options.data_dir)
    local = data_dir is not None
    tasks, left_out = choose_tasks(options.tasks, data_dir)
    for name, files in left_out.items() if is_first else ():
        print(f"{TASKS[name].title} is left out: {str(data_dir)!r} has no {', '.join(files)}.")
    # Raises errors before the first model runs.
    folders = [result_folder(checkpoint, options.output) for checkpoint in options.checkpoints]
    for checkpoint, folder in zip(options.checkpoints, folders):
        loading.tokenizer(checkpoint, loading.config(checkpoint))
        check_writable(folder)
        if (folder / "lm_eval.json").is_file():
            read_json(folder / "lm_eval.json")
    check_writable(options.output)
    manager = task_manager(data_dir)
    contents = {}
    for checkpoint, folder in zip(options.checkpoints, folders):
        model = load_scorer(checkpoint, loading, options.batch_size)
        report = run(model, tasks, manager, local=local, limit=options.limit, name=checkpoint)
        if report is not None and is_first:
            contents[checkpoint] = content(report, origin, loading, local=local)
            save(folder, contents[checkpoint], report)
    if not is_first:
        return None
    text = table(contents, tasks, local=local, left_out=left_out)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "zero_shot.md").write_text(text, encoding="utf-8")
    return text
