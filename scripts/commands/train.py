"""`whatwhere train`: see `training/loop.py`."""

import argparse
import os
from pathlib import Path

from transformers import AutoConfig

from whatwhere.model_card import encoding_text

from ..parsers import command_parser
from .run_options import add_recipe, add_resume, continued, ending, is_resumed, recipe_of

DESCRIPTION = """Train a model from a recipe, evaluate it, and save it with its tokenizer, results and card.

On a laptop, without a download:  whatwhere train demo_rope
On your own text:                 whatwhere train demo_rope --train-file mytext/*.txt --output runs/mine
On one or more GPUs:              accelerate launch -m whatwhere train code_cope
On several CPU processes:         torchrun --nproc_per_node 2 -m whatwhere train demo_rope

To continue after an interruption: whatwhere train --output runs/demo_rope --resume

Comments in the recipes (scripts/recipes/) explain every key. Ctrl-C, SIGTERM or SIGUSR1 writes a checkpoint; --resume
continues from it, with the same weights and metrics as an uninterrupted run."""
EPILOG = """A document is a text file, a line of a jsonl file or a row of a parquet file (its `text`, or --set
data.text_field=NAME). Without --validation-file, 5 % of the documents are held out, or with fewer than 20 documents the
last 5 % of each."""


def parser() -> argparse.ArgumentParser:
    usage = "RECIPE [OPTIONS]\n       whatwhere train --output DIR --resume"
    result = command_parser("train", usage, DESCRIPTION, epilog=EPILOG)
    add_recipe(result)
    result.add_argument("--output", metavar="DIR", help="the folder of the run; default runs/<the recipe's name>")
    add_resume(result)
    return result


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    from ..cards.folder import card_of_run
    from ..training.loop import TrainingRun, train
    from ..training.run_folder import RunFolder

    if options.recipe is None and is_resumed(options):
        if options.output is None:
            raise ValueError("no --output is given: name the folder of the run to resume.")
        folder = RunFolder(Path(options.output), TrainingRun.record)
        folder.settings()
        options.recipe = folder.path / folder.record
    recipe = recipe_of(options)
    output = options.output or os.path.join("runs", recipe.name)
    resume = {"resume": options.resume, "resume_from": options.resume_from}
    with continued(output, TrainingRun.record, options.data_dir), card_of_run(output):
        results = train(recipe, output, **resume, data_dir=options.data_dir, arguments=arguments)
    if results:
        trained = encoding_text(AutoConfig.from_pretrained(output).position_encoding)
        if best := results.get("kept"):
            trained += f", the model of step {best['step']:,}"
        is_task = "task" in results["data"]
        print(ending(output, trained, results, {"": "metrics"}, following="task" if is_task else "length"))
