"""Zero-shot evaluation of checkpoints with lm-eval: LAMBADA (OpenAI's), BLiMP, CBT, HellaSwag, PIQA, ARC-Easy.

On a laptop (some questions of each task, from local files; two minutes for a model of `whatwhere demo`):

    whatwhere zero-shot demo/rope demo/pope --data-dir data --limit 20

On a GPU, all questions from the Hub, our models beside any other:

    whatwhere zero-shot runs/pope openai-community/gpt2 --device cuda --batch-size 64

A checkpoint is a folder or a Hub id that AutoModelForCausalLM and AutoTokenizer can load, ours or stock. Without
`--data-dir` and the variable WHATWHERE_DATA_DIR the questions come from the Hub; with one of them from local files
(`lm_eval/zero_shot_files.py` says which), through the same task definitions of lm-eval. CBT, which lm-eval lacks, is
ours. lm-eval's own command line runs the same tasks:

    lm_eval --model hf --model_args pretrained=demo/pope,trust_remote_code=True --tasks lambada_openai,whatwhere_cbt \\
        --include_path "$(whatwhere zero-shot --print-task-folder)"

It cuts questions to the model's configured length, `max_position_embeddings`, unless `--model_args` has another one
(`pretrained=demo/pope,max_length=16384`). This command does not cut them for our models whose position encoding has no
limit (all but `absolute` and plain `relative`). The tasks of local files are `whatwhere_local_lambada_openai`,
`whatwhere_local_blimp` and so on, one for each key of `TASKS`.

Output: `lm_eval.json` in each checkpoint's folder and lm-eval's whole report under `lm_eval/` there (for a Hub id in a
folder of `--output`); `zero_shot.md`, a table beside the paper's Table 5, in `--output`, by default the folder of the
one checkpoint, else `zero_shot/`. Scores that a folder holds about other tasks of the same weights stay, and so do
scores of more questions than were asked now.

**The metrics.** LAMBADA is the greedy last word (PoPE, section 5), BLiMP and CBT are means over their parts: 67
paradigms, four word classes. For HellaSwag, PIQA and ARC-Easy the paper does not say whether an answer's likelihood
is divided by its length. Earlier public code of one of its authors (github.com/RobertCsordas/moeut_training_code, in
`framework/dataset/text/`) divides by the number of tokens in all three, so we put `acc_norm`, which divides by the
number of characters, beside the paper; `lm_eval.json` holds `acc` too. For CBT that code also divides, and it ends the
context with a space, which puts candidates into tokens that are rare in text. We follow GPT-2's definition (the whole
likelihood of the candidate and the rest of its sentence). How the paper computed its CBT is not known: there, compare
models with each other rather than with the paper.
"""

import argparse
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...model_card import weights_fingerprint
from ...position_base import suggest
from ...position_registry import max_length
from ..extras import explain
from .checkpoints import Loading, names_of
from .lm_eval.zero_shot_files import DATA_DIR_VARIABLE, data_folder, missing_files
from .options import add_loading, at_least_one, loading_of
from .results import check_writable, lm_eval_tasks, markdown_table, provenance, read_json, write_json

TASK_FOLDER = pathlib.Path(__file__).with_name("lm_eval")

# Draws for the standard error of LAMBADA's perplexity. lm-eval's default of 100,000 takes minutes.
BOOTSTRAP_DRAWS = 1000
# max_length for lm-eval, in tokens, for models without a limit: longer than any question.
MAX_LENGTH = 1 << 17


class ZeroShotTask(NamedTuple):
    """A task of the table.

    Attributes:
        title: as the paper writes it.
        hub: lm-eval's task or group that reads the Hub's data.
        metric: the one that stands beside the paper's.
        chance: its expected value by guessing.
        is_group: whether it has parts, so that the scores of local files have the name of our group.
    """

    title: str
    hub: str
    metric: str
    chance: float
    is_group: bool = False

    @property
    def local(self) -> str:
        """Our group that reads local files."""
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


def choose_tasks(names: str | None, data_dir: str | os.PathLike[str] | None) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the tasks to run, and those to leave out with the local files that they lack.

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
    loading: Loading,
    *,
    local: bool,
    limit: int | None = None,
    batch_size: int | str = 8,
) -> dict[str, Any]:
    """Asks one checkpoint the questions of tasks and returns lm-eval's report, with `truncated_requests` added.

    A question that is longer than the model's configured length loses its beginning; `truncated_requests` counts the
    requests (one for each answer to choose from) to which that happened. Questions are never cut for our models whose
    position encoding has no limit.

    Args:
        checkpoint: a folder or Hub id with a tokenizer.
        tasks: keys of TASKS.
        manager: from `task_manager`.
        loading: how it is loaded.
        local: read local files, not the Hub.
        limit: ask only so many questions of each task, of BLiMP's and CBT's parts each; None for all.
        batch_size: requests in a batch, or "auto", which finds the largest.

    Raises:
        ValueError: the checkpoint cannot be loaded.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from safetensors import SafetensorError

    options: dict[str, Any] = (
        {} if loading.attn_implementation is None else {"attn_implementation": loading.attn_implementation}
    )
    config = loading.config(checkpoint)
    if hasattr(config, "position_encoding") and max_length(config) is None:
        options["max_length"] = MAX_LENGTH
    try:
        model = HFLM(
            pretrained=checkpoint,
            backend="causal",
            device=loading.device,
            dtype=loading.dtype,
            batch_size=batch_size,
            trust_remote_code=loading.trust_remote_code,
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
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
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
    return {**report, "truncated_requests": log_filter.truncated}


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


def merge(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Puts new scores among those that a checkpoint has already, if they are about the same weights.

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


def table(
    contents: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[str],
    *,
    local: bool,
    left_out: Mapping[str, Sequence[str]],
) -> str:
    """Returns the scores of checkpoints, beside chance and the paper's Table 5, in Markdown.

    Args:
        contents: from `content`, by checkpoint; all of the same tasks and limit.
        tasks: keys of TASKS, in the order of the columns.
        local: the questions came from local files.
        left_out: tasks that were not run, and the files that they lack.
    """
    # The mean is over the same tasks in every row.
    mean = "mean" if len(tasks) == len(TASKS) else f"mean of these {len(tasks)}"
    rows = [["accuracy, %", "parameters", *(TASKS[name].title for name in tasks), mean]]
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
                f"{checkpoint}: {cut:,} requests were longer than its {limit:,} tokens and lost their beginning."
            )
    printed = {"chance, ": [100 * task.chance for task in TASKS.values()]}
    printed |= {f"the paper's {name}": list(figures) for name, (figures, _) in TABLE_5.items()}
    for name, figures in printed.items():
        chosen = [figures[list(TASKS).index(task)] for task in tasks]
        cells = [f"{figure:.2f}" for figure in (*chosen, sum(chosen) / len(chosen))]
        rows.append([*name.split(", "), *cells])
    limit = next(iter(contents.values()))["limit"]
    if limit is not None:
        notes.append(
            f"**Only the first {limit} questions of each task, or part of a task**: not comparable with others."
        )
    notes += [f"**{TASKS[name].title} was not run**: missing {', '.join(files)}." for name, files in left_out.items()]
    if local:
        notes.append("Questions from local files; those of HellaSwag and ARC-Easy differ a little from the Hub's.")
    notes.append(
        "± is one standard error over questions. The paper: Gopalakrishnan et al. 2025 (2509.10534), Table 5; models "
        "trained on OpenWebText with 1,024 tokens."
    )
    lines = "\n".join(f"- {note}" for note in notes)
    return f"# Zero-shot evaluation\n\n{markdown_table(rows)}\n\n{lines}\n"


def result_folder(checkpoint: str, output: pathlib.Path) -> pathlib.Path:
    """Returns where a checkpoint's results go: its own folder, or for a Hub id one in `output`."""
    return pathlib.Path(checkpoint) if pathlib.Path(checkpoint).is_dir() else output / checkpoint.replace("/", "__")


def old_results(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the `lm_eval.json` of a folder, None if there is none; raises ValueError if it is broken."""
    content = read_json(folder / "lm_eval.json") if (folder / "lm_eval.json").is_file() else None
    if content is not None and not isinstance(content.get("tasks"), dict):
        raise ValueError(f"{str(folder / 'lm_eval.json')!r} must hold an object with `tasks`.")
    return content


def save(folder: pathlib.Path, content: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """Writes `lm_eval.json` and lm-eval's report into the folder of a checkpoint's results.

    Returns:
        The tasks whose scores in `lm_eval.json` stay as they were, because they are of more questions.
    """
    from lm_eval.utils import handle_non_serializable

    fingerprint = weights_fingerprint(folder) if (folder / "config.json").is_file() else None
    merged, kept = merge(old_results(folder), {**content, "weights_sha256": fingerprint})
    if fingerprint is None:
        del merged["weights_sha256"]
    write_json(folder / "lm_eval.json", merged)
    raw = folder / "lm_eval" / f"results_{content['date'].replace(':', '-')}.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps(report, indent=2, default=handle_non_serializable) + "\n", encoding="utf-8")
    return kept


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="whatwhere zero-shot",
        usage="%(prog)s CHECKPOINT [CHECKPOINT ...] [options]",
        description="Zero-shot evaluation with lm-eval: LAMBADA, BLiMP, CBT, HellaSwag, PIQA, ARC-Easy.",
        epilog="example: whatwhere zero-shot demo/rope demo/pope --limit 20",
    )
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="a folder or a Hub id")
    parser.add_argument("--tasks", help=f"some of {','.join(TASKS)} (default: all for which there are data)")
    parser.add_argument(
        "--data-dir", metavar="DIR", help=f"local data sets (default: ${DATA_DIR_VARIABLE}, else the Hub)"
    )
    parser.add_argument(
        "--limit", type=at_least_one, metavar="N", help="only the first N questions of each task, or part of a task"
    )
    parser.add_argument("--batch-size", default="8", metavar="N", help="requests in a batch, or auto (default 8)")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR", help="default: the one checkpoint, or zero_shot/")
    parser.add_argument(
        "--print-task-folder", action="store_true", help="print the folder for lm_eval --include_path, and stop"
    )
    add_loading(parser)
    options = parser.parse_args(arguments)
    if options.print_task_folder:
        print(TASK_FOLDER)
        return
    if options.output is None:
        alone = len(options.checkpoints) == 1 and pathlib.Path(options.checkpoints[0]).is_dir()
        options.output = pathlib.Path(options.checkpoints[0] if alone else "zero_shot")
    try:
        print(evaluate(options, provenance("zero-shot", arguments)))
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {explain(error)}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted. Finished checkpoints have their lm_eval.json.\n")
    print(f"In {options.output}: zero_shot.md. A card: whatwhere card FOLDER")


def evaluate(options: argparse.Namespace, origin: dict[str, Any]) -> str:
    """Evaluates every checkpoint, writes all results and returns the table in Markdown."""
    if not options.checkpoints:
        raise ValueError("no CHECKPOINT is given: name a folder or a Hub id.")
    names_of(options.checkpoints)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']!r}: this command runs in one process; lm-eval's own command line "
            "takes the same tasks, and accelerate."
        )
    if options.batch_size != "auto" and not (options.batch_size.isdigit() and int(options.batch_size)):
        raise ValueError(f"batch-size={options.batch_size!r} is not valid: it must be at least 1, or auto.")
    local = bool(options.data_dir or os.environ.get(DATA_DIR_VARIABLE))
    data_dir = data_folder(options.data_dir) if local else None
    tasks, left_out = choose_tasks(options.tasks, data_dir)
    for name, files in left_out.items():
        print(f"{TASKS[name].title} is left out: {str(data_dir)!r} lacks {', '.join(files)}.")
    # What can be wrong is found before the first model runs.
    loading = loading_of(options)
    for checkpoint in options.checkpoints:
        loading.config(checkpoint)
        loading.tokenizer(checkpoint)
        check_writable(result_folder(checkpoint, options.output))
        old_results(result_folder(checkpoint, options.output))
    check_writable(options.output)
    manager = task_manager(data_dir)
    contents = {}
    for checkpoint in options.checkpoints:
        try:
            report = run(
                checkpoint,
                tasks,
                manager,
                loading,
                local=local,
                limit=options.limit,
                batch_size=options.batch_size if options.batch_size == "auto" else int(options.batch_size),
            )
        except ConnectionError as error:
            raise ConnectionError(
                f"the questions come from the Hub, which did not answer: {error}. With --data-dir or "
                f"{DATA_DIR_VARIABLE} they come from local files."
            ) from error
        contents[checkpoint] = content(report, origin, loading, local=local)
        folder = result_folder(checkpoint, options.output)
        for name in save(folder, contents[checkpoint], report):
            print(f"{name}: {str(folder / 'lm_eval.json')!r} keeps its scores, which are of more questions.")
    text = table(contents, tasks, local=local, left_out=left_out)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "zero_shot.md").write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    main()
