"""`whatwhere finetune`: see `training/finetune.py`."""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from ..training.errors import reported
from .common import command_parser

if TYPE_CHECKING:
    from ..training.finetune import Settings

DESCRIPTION = """Fine-tune one of our models, or a stock GPT-2 or Llama, with its position encoding or a new one.

On your own text:    whatwhere finetune demo/pope --train-file mytext/*.txt --output runs/mine
GPT-2 with CoPE:     whatwhere finetune openai-community/gpt2 --position-encoding cope --lora --merge --output runs/cope

Ctrl-C or SIGTERM writes a checkpoint; --resume continues from the newest one. Several processes: torchrun -m whatwhere
finetune."""
# For each option its metavar, or the type of a value that is not text, and what it says.
OPTIONS: dict[str, tuple[Any, str]] = {
    "position-encoding": ("NAME", "default: the checkpoint's own"),
    "position-encoding-parameters": ("JSON", "of the encoding"),
    "rope-parameters": ("JSON", "in place of the checkpoint's own"),
    "train-file": ("FILES", "your text: text, jsonl or parquet files, folders or patterns"),
    "validation-file": ("FILES", "text to evaluate on; default: a part of --train-file"),
    "data": ("SOURCE", "stdlib (default), hub, local, or a corpus such as pg19"),
    "dataset": ("ID", "of --data hub; --dataset-config: its configuration"),
    "dataset-config": ("NAME", argparse.SUPPRESS),
    "splits": ("JSON", "our splits: those of the source (scripts/data/corpus.py)"),
    "text-field": ("NAME", "column of the documents; default text"),
    "streaming": (bool, "read the training text as it is needed"),
    "shuffle-buffer": (int, "sequences that --streaming shuffles; default 256"),
    "tokenizer": ("ID", "default: the checkpoint's own"),
    "sequence-length": (int, "default: the model's max_position_embeddings"),
    "evaluation-blocks": (int, "sequences to evaluate on; default 256"),
    "steps": (int, "optimiser steps; default 500"),
    "batch-size": (int, "sequences per device; default 8"),
    "accumulation": (int, "batches per step; default 1"),
    "learning-rate": (float, "default 5e-5, with --lora 2e-4"),
    "schedule": ("NAME", "cosine (default), linear or constant"),
    "warmup-steps": (int, "default 0"),
    "weight-decay": (float, "default 0"),
    "save-every": (int, "steps between checkpoints; default 100"),
    "seed": (int, "default 0"),
    "bf16": (bool, "mixed precision"),
    "activation-checkpointing": (bool, "less memory, more time"),
    "cpu": (bool, "use no GPU"),
    "lora": (bool, "train low-rank adapters (peft)"),
    "lora-rank": (int, "default 16; --lora-alpha: default 32; --lora-dropout: default 0"),
    "lora-alpha": (float, argparse.SUPPRESS),
    "lora-dropout": (float, argparse.SUPPRESS),
    "merge": (bool, "with --lora: save a whole model"),
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line; what is not given is left out, for the defaults of `Settings`."""
    usage = "CHECKPOINT --output DIR [OPTIONS]"
    result = command_parser("finetune", usage, DESCRIPTION, argument_default=argparse.SUPPRESS)
    result.add_argument("checkpoint", help="folder or Hub id")
    result.add_argument("--output", required=True, metavar="DIR", help="where the run goes")
    result.add_argument("--resume", action="store_true", default=False, help="continue from the newest checkpoint")
    result.add_argument("--data-dir", default=None, metavar="DIR", help="local data; default $WHATWHERE_DATA_DIR")
    for name, (kind, text) in OPTIONS.items():
        if kind is bool:
            result.add_argument(f"--{name}", action="store_true", help=text)
        elif kind == "FILES":
            result.add_argument(f"--{name}", nargs="+", metavar="FILE", help=text)
        elif isinstance(kind, type):
            result.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=text)
        else:
            result.add_argument(f"--{name}", type=json.loads if kind == "JSON" else str, metavar=kind, help=text)
    return result


def settings_of(options: argparse.Namespace) -> "Settings":
    """Returns the settings of a run; raises ValueError with everything that is wrong with them."""
    from ..checks import parse
    from ..training.finetune import FinetuneError, Settings

    values = {key: value for key, value in vars(options).items() if key not in ("output", "resume", "data_dir")}
    values.setdefault("data", "local" if values.get("train_file") else "stdlib")
    return parse(Settings, values, error=FinetuneError)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)

    def advice() -> str:
        begun = os.path.exists(os.path.join(options.output, "finetune.json"))
        return "Continue with the same command and --resume." if begun else "Nothing was written yet: start again."

    with reported(advice):
        from ..training.finetune import finetune

        results = finetune(
            settings_of(options),
            options.output,
            resume=options.resume,
            data_dir=options.data_dir,
            arguments=arguments,
        )
        for when, key in (("before", "metrics_before"), ("after", "metrics")) if results else ():
            scores = ", ".join(f"{name} {score['value']:.4f}" for name, score in results[key].items())
            print(f"{options.output}, {when} fine-tuning: {scores}")
