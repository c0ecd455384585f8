"""Zero-shot evaluation of checkpoints with lm-eval: LAMBADA (OpenAI's), BLiMP, CBT, HellaSwag, PIQA, ARC-Easy.

On a laptop (some questions of each task, from local files; two minutes for a model of `make demo`):

    python -m whatwhere.scripts.zero_shot demo/rope demo/pope --data-dir data --limit 20

On a GPU, all questions from the Hub, our models beside any other:

    python -m whatwhere.scripts.zero_shot runs/pope openai-community/gpt2 --device cuda --batch-size 64

A checkpoint is a folder or a Hub id that AutoModelForCausalLM and AutoTokenizer can load, ours or stock. Without
`--data-dir` and the variable WHATWHERE_DATA_DIR the questions come from the Hub; with one of them from local files
(`whatwhere.scripts.evaluation.tasks.zero_shot_files` says which), through the same task definitions of lm-eval. CBT,
which lm-eval lacks, is ours. lm-eval's own command line takes the same tasks:

    lm_eval --model hf --model_args pretrained=demo/pope,trust_remote_code=True --tasks lambada_openai,whatwhere_cbt \\
        --include_path "$(python -m whatwhere.scripts.zero_shot --print-task-folder)"

It cuts questions to the model's configured length, `max_position_embeddings`, unless `--model_args` has another one
(`pretrained=demo/pope,max_length=16384`). This script does not cut those for our models whose position encoding has no
limit (all but `absolute` and plain `relative`). The tasks of local files are `whatwhere_local_lambada_openai`,
`whatwhere_local_blimp`, `whatwhere_local_cbt`, `whatwhere_local_hellaswag`, `whatwhere_local_piqa` and
`whatwhere_local_arc_easy`.

Output: `lm_eval.json` in each checkpoint's folder, from which `python -m whatwhere.scripts.evaluation.card FOLDER`
makes its card, and lm-eval's whole report under `lm_eval/` there (for a Hub id both are in a folder of `--output`);
`zero_shot.md` and `zero_shot.json` in `--output`, beside the paper's Table 5; by default that is the folder of the
checkpoint if there is one, else `zero_shot/`. Scores that a folder holds about other
tasks of the same weights stay, and so do scores of more questions than were asked now.
"""

import argparse
import json
import os
import pathlib
from typing import Any

import transformers

from ..model_card import weights_fingerprint
from .evaluation import zero_shot
from .evaluation.results import check_writable, provenance, write_json
from .evaluation.tasks.zero_shot_files import DATA_DIR_VARIABLE, data_folder
from .extras import explain


def result_folder(checkpoint: str, output: pathlib.Path) -> pathlib.Path:
    """Returns where a checkpoint's results go: its own folder, or for a Hub id one in `output`."""
    return pathlib.Path(checkpoint) if pathlib.Path(checkpoint).is_dir() else output / checkpoint.replace("/", "__")


def check_checkpoint(checkpoint: str, *, trust_remote_code: bool = False) -> None:
    """Raises ValueError, with the reason, if a checkpoint's configuration or tokenizer cannot be read."""
    if pathlib.Path(checkpoint).exists() and not (pathlib.Path(checkpoint) / "config.json").is_file():
        raise ValueError(f"checkpoint={checkpoint!r} is not a model folder: it has no config.json.")
    for auto in (transformers.AutoConfig, transformers.AutoTokenizer):
        try:
            auto.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error


def old_results(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the `lm_eval.json` of a folder, None if there is none; raises ValueError if it is broken."""
    path = folder / "lm_eval.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("tasks"), dict):
        raise ValueError(f"{str(path)!r} must hold an object with `tasks`.")
    return content


def save(folder: pathlib.Path, content: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """Writes `lm_eval.json` and lm-eval's report into the folder of a checkpoint's results.

    Args:
        folder: made if it does not exist.
        content: from `zero_shot.content`.
        report: from `zero_shot.run`.

    Returns:
        The tasks whose scores in `lm_eval.json` stay as they were, because they are of more questions.
    """
    from lm_eval.utils import handle_non_serializable

    fingerprint = weights_fingerprint(folder) if (folder / "config.json").is_file() else None
    merged, kept = zero_shot.merge(old_results(folder), {**content, "weights_sha256": fingerprint})
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
        prog="python -m whatwhere.scripts.zero_shot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="a folder or a Hub id")
    parser.add_argument("--tasks", help=f"some of {','.join(zero_shot.TASKS)} (default: all for which there is data)")
    parser.add_argument("--data-dir", help=f"folder of local data sets (default: ${DATA_DIR_VARIABLE}, else the Hub)")
    parser.add_argument("--limit", type=int, help="ask only so many questions of each task, or part of BLiMP and CBT")
    parser.add_argument("--batch-size", default="8", help="requests in a batch, or auto (default %(default)s)")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--attn-implementation", help="default: the model's own choice")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code in the checkpoint's folder")
    parser.add_argument(
        "--output", type=pathlib.Path, help="default: the folder of the one checkpoint, or zero_shot/ for several"
    )
    parser.add_argument(
        "--print-task-folder", action="store_true", help="print the folder for lm_eval --include_path, and stop"
    )
    options = parser.parse_args(arguments)
    if options.print_task_folder:
        print(zero_shot.TASK_FOLDER)
        return
    if options.output is None:
        alone = len(options.checkpoints) == 1 and pathlib.Path(options.checkpoints[0]).is_dir()
        options.output = pathlib.Path(options.checkpoints[0] if alone else "zero_shot")
    try:
        table = evaluate(options, provenance("whatwhere.scripts.zero_shot", arguments))
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {explain(error)}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted. Checkpoints that were done have their lm_eval.json.\n")
    print(table)
    print(
        f"In {options.output}: zero_shot.md, zero_shot.json. Cards: python -m whatwhere.scripts.evaluation.card FOLDER"
    )


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
    for checkpoint in options.checkpoints:
        if options.checkpoints.count(checkpoint) > 1:
            raise ValueError(f"checkpoint={checkpoint!r} is given twice.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']!r}: this command runs in one process; lm-eval's own command line "
            "takes the same tasks, and accelerate."
        )
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"limit={options.limit!r} is not valid: it must be at least 1.")
    if options.batch_size != "auto" and not (options.batch_size.isdigit() and int(options.batch_size)):
        raise ValueError(f"batch-size={options.batch_size!r} is not valid: it must be at least 1, or auto.")
    local = bool(options.data_dir or os.environ.get(DATA_DIR_VARIABLE))
    data_dir = data_folder(options.data_dir) if local else None
    tasks, left_out = zero_shot.choose_tasks(options.tasks, data_dir)
    for name, files in left_out.items():
        print(f"{zero_shot.TASKS[name].title} is left out: {str(data_dir)!r} lacks {', '.join(files)}.")
    # What can be wrong is found before the first model runs.
    for checkpoint in options.checkpoints:
        check_checkpoint(checkpoint, trust_remote_code=options.trust_remote_code)
        check_writable(result_folder(checkpoint, options.output))
        old_results(result_folder(checkpoint, options.output))
    check_writable(options.output)
    device = options.device
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    manager = zero_shot.task_manager(data_dir)
    contents = {}
    for checkpoint in options.checkpoints:
        try:
            report = zero_shot.run(
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
        contents[checkpoint] = zero_shot.content(report, origin, data=data, device=device, dtype=options.dtype)
        folder = result_folder(checkpoint, options.output)
        for name in save(folder, contents[checkpoint], report):
            print(f"{name}: {str(folder / 'lm_eval.json')!r} keeps its scores, which are of more questions.")
    table = zero_shot.table(contents, tasks, local=local, left_out=left_out)
    write_json(options.output / "zero_shot.json", {"checkpoints": contents, "left_out": left_out, **origin})
    (options.output / "zero_shot.md").write_text(table, encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
