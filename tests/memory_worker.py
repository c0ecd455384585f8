"""Measures the peak of resident memory of training steps, above what the process had before it built the model.

    python tests/memory_worker.py RECIPE --train-file FILE [--set KEY=VALUE]

Under torchrun for several processes. Prints one line of JSON: the bytes of each process. In glibc's default setting,
freed memory of small tensors stays with the process; with MALLOC_MMAP_THRESHOLD_=100000 it is returned, and the peak is
that of the tensors.
"""

import argparse
import json
import pathlib
import tempfile

import accelerate.utils
import torch

from whatwhere.scripts.training.loop import TrainingRun
from whatwhere.scripts.training.recipe import load_recipe


def resident(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--train-file", nargs="+")
    options = parser.parse_args()
    # As on a GPU: the update needs no temporary tensors.
    plain = torch.optim.AdamW
    torch.optim.AdamW = lambda *arguments, **settings: plain(*arguments, **settings | {"fused": True})
    recipe = load_recipe(options.recipe, options.set, train_file=options.train_file)
    # Loads what the first step of any model needs.
    layer = torch.nn.Linear(4, 4)
    layer(torch.ones(1, 4)).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    with tempfile.TemporaryDirectory() as folder:
        before = resident("VmRSS")
        run = TrainingRun(recipe, pathlib.Path(folder))
        # Sets the peak to what is resident now: at first, each process has the whole model.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        batches = run.batches()
        for _ in range(recipe.training.steps):
            run.train_step(next(batches))
        peaks = accelerate.utils.gather_object([resident("VmHWM") - before])
        if run.accelerator.is_main_process:
            print(json.dumps(peaks))
        run.accelerator.end_training()


if __name__ == "__main__":
    main()
