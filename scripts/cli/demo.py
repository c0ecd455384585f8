"""Train rope, pope and cope on code, compare them up to 10 times the trained length, and load one of them.

    whatwhere demo --steps 100

On a laptop, without downloads: at most 8 minutes on 2 CPU cores. The output folder gets a checkpoint folder for each
encoding, `length.json`, `length.png` and `length.svg`. Running the command again continues after an
interruption, and reuses finished training runs of the same recipe.
"""

import argparse
import pathlib

from .options import command_parser


def parser() -> argparse.ArgumentParser:
    result = command_parser("demo", "[OPTIONS]", __doc__)
    result.add_argument("--output", type=pathlib.Path, default=pathlib.Path("demo"), help="default %(default)s")
    result.add_argument("--steps", type=int, help="training steps (default: as in the recipes)")
    result.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a key of the recipes, as in train"
    )
    return result
