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
import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ...model_card import weights_fingerprint
from ...position_encoding import suggest
from ...position_encodings import reach
from ..extras import explain
from .checkpoints import choose_device, load_config, load_tokenizer, names_of
from .lm_eval.zero_shot_files import DATA_DIR_VARIABLE, data_folder, missing_files
from .options import add_model_options, at_least_one
from .results import check_writable, lm_eval_tasks, provenance, read_json, write_json

TASK_FOLDER = pathlib.Path(__file__).with_name("lm_eval")

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
        config = load_config(checkpoint, trust_remote_code=trust_remote_code)
        if hasattr(config, "position_encoding") and reach(config) is None:
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
    # lm-eval's names depend on where the data came from.
    scores = {
        checkpoint: {name: found["tasks"][TASKS[name].scored if local else TASKS[name].hub] for name in tasks}
        for checkpoint, found in contents.items()
    }
    asked = [["task", "in lm-eval", "version", "metric", "split", "shots", "questions"]]
    for name, task in next(iter(scores.values())).items():
        cells = [
            TASKS[name].title,
            TASKS[name].local if local else TASKS[name].hub,
            task["version"],
            TASKS[name].metric,
        ]
        asked.append([*map(str, [*cells, task["split"], task["shots"]]), f"{task['samples']:,}"])
    notes = "\n".join(f"- {note}" for note in _notes(contents, local=local, left_out=left_out))
    return "\n\n".join(["# Zero-shot evaluation", _comparison(contents, scores, tasks), _rows(asked), notes]) + "\n"


def _comparison(contents: Mapping[str, Any], scores: Mapping[str, Any], tasks: Sequence[str]) -> str:
    """One row a checkpoint, then chance and the paper's; the mean is over the same tasks in every row."""
    mean = "mean" if len(tasks) == len(TASKS) else f"mean of these {len(tasks)}"
    rows = [["accuracy, %", "parameters", *(TASKS[name].title for name in tasks), mean]]
    for checkpoint, by_task in scores.items():
        metrics = [by_task[name]["metrics"][TASKS[name].metric] for name in tasks]
        average = 100 * sum(metric["value"] for metric in metrics) / len(metrics)
        rows.append([checkpoint, f"{contents[checkpoint]['parameters']:,}", *map(_percent, metrics), f"{average:.2f}"])
    chances = [100 * TASKS[name].chance for name in tasks]
    rows.append(["chance", "", *(f"{chance:.0f}" for chance in chances), f"{sum(chances) / len(chances):.2f}"])
    for name, (figures, _) in TABLE_5.items():
        chosen = [figures[list(TASKS).index(task)] for task in tasks]
        encoding, size = name.split(", ")
        cells = [f"{figure:.2f}" for figure in (*chosen, sum(chosen) / len(chosen))]
        rows.append([f"{encoding}, the paper's", size, *cells])
    return _rows(rows)


def _notes(contents: Mapping[str, Any], *, local: bool, left_out: Mapping[str, Sequence[str]]) -> list[str]:
    notes = []
    limit = next(iter(contents.values()))["limit"]
    if limit is not None:
        notes.append(
            f"**Only the first {limit} questions of each task** (of each part of BLiMP and CBT): not comparable with "
            "the paper, or with other results."
        )
    notes += [f"**{TASKS[name].title} was not run**: missing {', '.join(files)}." for name, files in left_out.items()]
    for checkpoint, found in contents.items():
        if found["truncated_requests"]:
            notes.append(
                f"{checkpoint}: {found['truncated_requests']:,} requests were longer than its {found['max_length']:,} "
                "tokens and lost their beginning."
            )
    if local:
        notes.append("Questions from local files; those of HellaSwag and ARC-Easy differ a little from the Hub's.")
    notes.append(
        "± is one standard error over questions. The paper: Gopalakrishnan et al. 2025 (2509.10534), Table 5; models "
        "trained on OpenWebText with 1,024 tokens."
    )
    return notes


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

    Args:
        folder: made if it does not exist.
        content: from `content`.
        report: from `run`.

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
    add_model_options(parser)
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
    """Evaluates every checkpoint, writes all results and returns the table in Markdown.

    Args:
        options: of the command line.
        origin: from `provenance`.

    Raises:
        ValueError: an option or a checkpoint is not valid.
        OSError: data is missing, or results can not be written.
        ImportError: lm-eval is not installed.
    """
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
    for checkpoint in options.checkpoints:
        load_config(checkpoint, trust_remote_code=options.trust_remote_code)
        load_tokenizer(checkpoint, trust_remote_code=options.trust_remote_code)
        check_writable(result_folder(checkpoint, options.output))
        old_results(result_folder(checkpoint, options.output))
    check_writable(options.output)
    device = choose_device(options.device)
    manager = task_manager(data_dir)
    contents = {}
    for checkpoint in options.checkpoints:
        try:
            report = run(
                checkpoint,
                tasks,
                manager,
                local=local,
                limit=options.limit,
                batch_size=options.batch_size if options.batch_size == "auto" else int(options.batch_size),
                device=device,
                dtype=options.dtype,
                attn_implementation=options.attn_implementation,
                trust_remote_code=options.trust_remote_code,
            )
        except ConnectionError as error:
            raise ConnectionError(
                f"the questions come from the Hub, which did not answer: {error}. With --data-dir or "
                f"{DATA_DIR_VARIABLE} they come from local files."
            ) from error
        data = "local files" if local else "Hub"
        contents[checkpoint] = content(report, origin, data=data, device=device, dtype=options.dtype)
        folder = result_folder(checkpoint, options.output)
        for name in save(folder, contents[checkpoint], report):
            print(f"{name}: {str(folder / 'lm_eval.json')!r} keeps its scores, which are of more questions.")
    text = table(contents, tasks, local=local, left_out=left_out)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "zero_shot.md").write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    main()
