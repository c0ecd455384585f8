"""Run by torchrun: trains the recipes of cases.json one after another. See test_layouts.py."""

import json
import pathlib
import shutil
import sys

import torch

from whatwhere.scripts.training.loop import train
from whatwhere.scripts.training.recipe import parse_recipe


def main() -> None:
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text())
    for name, case in cases.items():
        train(parse_recipe(case["recipe"]), folder / name, resume_from=case["resume_from"])
    torch.distributed.destroy_process_group()


def copy_unfinished(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the folder of a finished run, as if it had been killed before its end."""
    shutil.copytree(source, target)
    for name in ("results.json", "config.json", "model.safetensors"):
        (target / name).unlink()


if __name__ == "__main__":
    main()
