"""The parser of `whatwhere train`."""

import argparse

from .options import add_recipe, add_resume, check_recipe, command_parser, is_resumed

DESCRIPTION = """Train a model from a recipe, evaluate it, and save it with its tokenizer, results and card.

On a laptop, without a download:  whatwhere train demo_rope
On your own text:                 whatwhere train demo_rope --train-file mytext/*.txt --output runs/mine
On one or more GPUs:              accelerate launch -m whatwhere train code_cope
On several CPU processes:         torchrun --nproc_per_node 2 -m whatwhere train demo_rope
Encodings over three seeds:       whatwhere train demo_rope --encodings rope pope --seeds 0 1 2 --output runs/both

To continue after an interruption: whatwhere train --output runs/demo_rope --resume

Comments in the recipes (scripts/recipes/) explain every key. Ctrl-C, SIGTERM or SIGUSR1 writes a checkpoint; --resume
continues from it, with the same weights and metrics as an uninterrupted run."""
EPILOG = """A document is a text file, a line of a jsonl file or a row of a parquet file (its `text`, or --set
data.text_field=NAME). Without --validation-file, 5 % of the documents are held out, or with fewer than 20 documents the
last 5 % of each."""


def _check(options: argparse.Namespace) -> None:
    check_recipe(options)
    for name in ("encodings", "seeds"):
        given = getattr(options, name)
        if given and (options.recipe is None or (is_resumed(options) and options.resume != "auto")):
            raise argparse.ArgumentTypeError(
                f"--{name} needs a RECIPE, and no --resume: it continues runs that are not finished."
            )
        key = {"encodings": "model.position_encoding", "seeds": "seed"}[name]
        if given and any(one.partition("=")[0].strip() == key for one in options.set):
            raise argparse.ArgumentTypeError(f"--set {key}=... has no effect with --{name}: give one of them.")
        if given and len(set(given)) < len(given):
            raise argparse.ArgumentTypeError(f"--{name} {' '.join(map(str, given))} is not valid: one is given twice.")


def parser() -> argparse.ArgumentParser:
    usage = "RECIPE [OPTIONS]\n       whatwhere train --output DIR --resume"
    result = command_parser("train", usage, DESCRIPTION, epilog=EPILOG, check=_check)
    add_recipe(result)
    result.add_argument("--output", metavar="DIR", help="the folder of the run; default runs/<the recipe's name>")
    add_resume(result)
    result.add_argument(
        "--encodings", nargs="+", metavar="NAME", help="train each in a folder in --output, and compare the runs"
    )
    result.add_argument(
        "--seeds", nargs="+", type=int, metavar="N", help="train with each; the same command continues what is left"
    )
    return result
