"""Trains a model from a recipe, evaluates it, and saves it with its tokenizer, results and card.

On a laptop, without a download (a small RoPE model on the source code of Python's standard library, about a minute):

    python -m whatwhere.scripts.train demo_rope

On one or more GPUs:

    accelerate launch -m whatwhere.scripts.train code_cope --output runs/code_cope

On several CPU processes (`accelerate launch --cpu` starts only one):

    torchrun --nproc_per_node 2 -m whatwhere.scripts.train demo_rope

RECIPE is a YAML file or the name of a shipped one (their comments explain every key). Any key can be set on the command
line: `--set training.steps=2000 --set model.position_encoding=alibi`.

On your own text:

    python -m whatwhere.scripts.train demo_rope --train-file mytext/*.txt --output runs/mine

A document is a text file, a line of a jsonl file or a row of a parquet file (with the text in `text`, or what `--set
data.text_field=body` says). Text files are UTF-8; a byte order mark is removed, and line ends become "\\n". Without
`--validation-file` a part is held out: 5 % of the documents, or of fewer than 20 documents the last 5 % of each. In a
recipe the keys are `data.train_file` and `data.validation_file`; paths are relative to the current folder.

Ctrl-C or SIGTERM writes a checkpoint before the run stops. `--resume` goes on from the newest checkpoint, exactly: the
weights and metrics are those of a run that was never interrupted. If that checkpoint is damaged, `--resume-from 400`
goes on from the one after step 400.
"""

import argparse
import os
import shlex
import sys

import yaml

from .extras import fail_import

try:
    from .training.loop import Interrupted, TrainingError, train
    from .training.recipe import load_recipe
except ImportError as error:
    fail_import(__name__, error)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m whatwhere.scripts.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    result.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a key of the recipe")
    result.add_argument("--output", metavar="DIR", help="where the run goes; default runs/<the recipe's name>")
    result.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the output folder")
    result.add_argument(
        "--resume-from",
        type=int,
        metavar="STEP",
        help="go on from the checkpoint after this step, and delete those after it",
    )
    result.add_argument(
        "--train-file",
        nargs="+",
        metavar="FILE",
        help="your own text in place of the recipe's: text (UTF-8), jsonl or parquet files, folders or patterns",
    )
    result.add_argument(
        "--validation-file",
        nargs="+",
        metavar="FILE",
        help="text to evaluate on; default: a part of --train-file, which is held out",
    )
    result.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    output = None
    try:
        own = {"train_file": options.train_file, "validation_file": options.validation_file}
        if options.data_dir and options.train_file:
            raise ValueError(f"--data-dir={options.data_dir!r} has no effect with --train-file.")
        recipe = load_recipe(options.recipe, options.set, **own)
        output = options.output or os.path.join("runs", recipe.name)
        results = train(
            recipe,
            output,
            resume=options.resume,
            resume_from=options.resume_from,
            data_dir=options.data_dir,
            arguments=arguments,
        )
    except (ValueError, OSError, TrainingError) as error:
        sys.exit(f"error: {error}")
    except (Interrupted, KeyboardInterrupt) as stop:
        data_dir = ["--data-dir", options.data_dir] if options.data_dir else []
        command = [os.path.join(str(output), "recipe.yaml"), "--output", str(output), "--resume", *data_dir]
        reason = str(stop).strip() or "interrupted"
        if os.path.exists(command[0]):
            print(f"{reason}. Go on with:\n", file=sys.stderr)
            print(f"    python -m whatwhere.scripts.train {shlex.join(command)}", file=sys.stderr)
        else:
            print(f"{reason}. Nothing was written yet: start again.", file=sys.stderr)
        sys.exit(128 + getattr(stop, "number", 2))
    if results:
        print(yaml.safe_dump({"output": str(output), "metrics": results["metrics"]}, sort_keys=False), end="")


if __name__ == "__main__":
    main()
