"""The parser of `whatwhere zero-shot`."""

import argparse
import pathlib

from .options import add_loading, at_least_one, command_parser

DESCRIPTION = """Zero-shot evaluation with lm-eval: LAMBADA, BLiMP, CBT, HellaSwag, PIQA, ARC-Easy.

    whatwhere zero-shot demo/rope demo/pope --limit 100"""
# Those that `evaluation/zero_shot.py` has.
TASKS = ("lambada", "blimp", "cbt", "hellaswag", "piqa", "arc_easy")


def parser() -> argparse.ArgumentParser:
    result = command_parser("zero-shot", "CHECKPOINT [CHECKPOINT ...] [OPTIONS]", DESCRIPTION, check=_check)
    result.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="a folder or a Hub id")
    result.add_argument("--tasks", help=f"some of {','.join(TASKS)} (default: all with data)")
    result.add_argument(
        "--data-dir", metavar="DIR", help="local data sets (default: $WHATWHERE_DATA_DIR, else the Hub)"
    )
    result.add_argument(
        "--limit", type=at_least_one, metavar="N", help="only the first N questions of each task or part"
    )
    result.add_argument(
        "--batch-size",
        type=lambda text: text if text == "auto" else at_least_one(text),
        default=8,
        metavar="N",
        help="requests in a batch, or auto for the largest that fits (default 8)",
    )
    result.add_argument("--output", type=pathlib.Path, metavar="DIR", help="default: the checkpoint's, or zero_shot/")
    result.add_argument(
        "--print-task-folder", action="store_true", help="print the folder for lm_eval --include_path and exit"
    )
    add_loading(result)
    return result


def _check(options: argparse.Namespace) -> None:
    if not options.checkpoints and not options.print_task_folder:
        raise ValueError("no CHECKPOINT is given: name a folder or a Hub id.")
