"""Results of models side by side: runs of train and finetune, evaluated checkpoints, and cards of models.

    whatwhere compare runs/rope runs/pope --output comparison

Prints tables, the differences of the recipes (not of speed, memory and logs), and what is not comparable. A score is
compared with that of the first folder that has it. If the two were not measured in the same way (text, tokenizer,
tokens, limits), it is marked, and the reason is printed. Lengths that were measured on other tokens get a separate
table and figure. Runs of one recipe with different seeds also get a row with the mean and the standard deviation.
"""

import argparse
import pathlib

from .options import command_parser


def parser() -> argparse.ArgumentParser:
    result = command_parser("compare", "FOLDER FOLDER [...] [OPTIONS]", __doc__, check=_check)
    result.add_argument("folders", nargs="+", metavar="FOLDER", help="a run, a checkpoint, or a model's card")
    result.add_argument("--output", type=pathlib.Path, metavar="DIR", help="draw losses, and perplexity by length")
    result.add_argument(
        "--results", nargs="+", default=[], type=pathlib.Path, metavar="FILE", help="length*.json of several FOLDERs"
    )
    return result


def _check(options: argparse.Namespace) -> None:
    # One folder may have several runs, if it is none itself.
    folder = pathlib.Path(options.folders[0])
    if len(options.folders) < 2 and (not folder.is_dir() or any(folder.glob("*.json"))):
        raise argparse.ArgumentTypeError("give at least two folders.")
