"""The parser of `whatwhere finetune`."""

import argparse

from .options import add_resume, command_parser, is_resumed, json_value, name_or_list

DESCRIPTION = """Fine-tune CHECKPOINT, a folder or Hub id: ours, Llama, Mistral, Phi-3, Qwen2, Qwen3, SmolLM3 or GPT-2.

On your own text:    whatwhere finetune demo/pope --train-file mytext/*.txt --output runs/mine
GPT-2 with CoPE:     whatwhere finetune openai-community/gpt2 --position-encoding cope --lora --merge --output runs/cope
After Ctrl-C, SIGTERM or SIGUSR1, which write a checkpoint: whatwhere finetune --output runs/mine --resume"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line; options that are not given get the defaults of `FinetuneSettings`."""
    result = command_parser(
        "finetune",
        "CHECKPOINT --output DIR [OPTIONS]",
        DESCRIPTION,
        argument_default=argparse.SUPPRESS,
        check=_check,
    )
    result.add_argument("--output", required=True, metavar="DIR", help="the folder of the run")
    add_resume(result)
    result.add_argument("--data-dir", default=None, metavar="DIR", help="local data; default $WHATWHERE_DATA_DIR")
    result.add_argument("checkpoint", nargs="?", help=argparse.SUPPRESS)
    result.add_argument(
        "--position-encoding", type=name_or_list, metavar="NAME", help="a name, or '[rope, cope]'; default: the same"
    )
    result.add_argument(
        "--position-encoding-parameters", type=json_value, metavar="JSON", help="parameters of the encoding"
    )
    result.add_argument("--rope-parameters", type=json_value, metavar="JSON", help="default: the checkpoint's own")
    result.add_argument(
        "--train-file", nargs="+", metavar="FILE", help="text, jsonl or parquet files of one format, folders, patterns"
    )
    result.add_argument(
        "--validation-file", nargs="+", metavar="FILE", help="text to evaluate on; default: a part of --train-file"
    )
    result.add_argument(
        "--data", metavar="NAME", help="stdlib (default), hub, local, mixture, or a corpus such as pg19"
    )
    result.add_argument("--dataset", metavar="NAME", help="data set of --data hub")
    result.add_argument("--dataset-config", metavar="NAME", help="its configuration")
    result.add_argument(
        "--splits",
        type=json_value,
        metavar="JSON",
        help='splits of the data, such as {"train": "train[1000:]", "validation": "train[:1000]"}',
    )
    result.add_argument(
        "--mixture", type=json_value, metavar="JSON", help="several texts with weights, as data.mixture in a recipe"
    )
    result.add_argument("--text-field", metavar="NAME", help="column of the documents; default text")
    result.add_argument("--streaming", action="store_true", help="stream the training text")
    result.add_argument(
        "--shuffle-buffer", type=int, metavar="N", help="documents in the shuffle buffer of --streaming; default 256"
    )
    result.add_argument("--tokenizer", metavar="NAME", help="default: the checkpoint's own")
    result.add_argument("--sequence-length", type=int, metavar="N", help="default: the model's max_position_embeddings")
    result.add_argument("--evaluation-blocks", type=int, metavar="N", help="sequences to evaluate on; default 256")
    result.add_argument("--steps", type=int, metavar="N", help="optimiser steps; default 500")
    result.add_argument("--batch-size", type=int, metavar="N", help="sequences per device; default 8")
    result.add_argument("--accumulation", type=int, metavar="N", help="batches per step; default 1")
    result.add_argument("--learning-rate", type=float, metavar="X", help="default 5e-5, with --lora 2e-4")
    result.add_argument(
        "--new-learning-rate", type=float, metavar="X", help="of a new encoding's parameters; default: the same"
    )
    result.add_argument("--schedule", metavar="NAME", help="cosine (default), linear, constant")
    result.add_argument("--warmup-steps", type=int, metavar="N", help="default 0")
    result.add_argument("--weight-decay", type=float, metavar="X", help="default 0")
    result.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints; default 100")
    result.add_argument("--seed", type=int, metavar="N", help="default 0")
    result.add_argument("--bf16", action="store_true", help="mixed precision")
    result.add_argument("--activation-checkpointing", action="store_true", help="use less memory and more time")
    result.add_argument(
        "--dp-shard", type=int, metavar="N", help="processes of torchrun that share the model by FSDP2; default 1"
    )
    result.add_argument("--lora", action="store_true", help="train low-rank adapters (peft)")
    result.add_argument("--lora-rank", type=int, metavar="N", help="default 16")
    result.add_argument("--lora-alpha", type=float, metavar="X", help="default 32")
    result.add_argument("--lora-dropout", type=float, metavar="X", help="default 0")
    result.add_argument("--merge", action="store_true", help="with --lora: save a full model")
    return result


def _check(options: argparse.Namespace) -> None:
    if "checkpoint" not in options and not is_resumed(options):
        raise ValueError("no CHECKPOINT is given: name a folder or a Hub id.")
