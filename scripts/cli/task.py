"""Measure the error rates of checkpoints on toy tasks.

    whatwhere task runs/flip_flop
    whatwhere task runs/flip_flop --sets 'sparser={"ignore": 0.995}' --samples 10000
    whatwhere task --task alice openai-community/gpt2

Answers are predicted from the correct tokens before them (teacher forcing). `token_error` is the share of wrong answer
tokens, `sequence_error` the share of sequences with at least one. The probe `alice` asks any causal language model how
often a word occurs in the last sentence: `accuracy` is the share of questions for which the correct answer (0 to 5) is
the most likely, `probability` the mean probability of the correct answer among the six, and `most_common` the accuracy
of always giving the most common answer.
"""

import argparse
import json
import pathlib
from typing import Any

from .options import add_loading, at_least_one, command_parser

# Those that `toy_tasks/registry.py` has.
TASKS = ("flip_flop", "selective_copy", "counting", "indirect_indexing", "alice")


def named_parameters(text: str) -> tuple[str, dict[str, Any]]:
    """Parses `NAME=JSON`; an argparse type."""
    name, _, values = text.partition("=")
    return name, dict(json.loads(values))


def parser() -> argparse.ArgumentParser:
    result = command_parser("task", "CHECKPOINT [CHECKPOINT ...] [OPTIONS]", __doc__)
    result.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    result.add_argument("--task", help=f"{', '.join(TASKS)}; default: the checkpoint's")
    result.add_argument(
        "--sets",
        action="append",
        type=named_parameters,
        metavar="NAME=JSON",
        help="""a test set, such as 'sparse={"ignore": 0.98}'; may be repeated""",
    )
    result.add_argument("--samples", type=at_least_one, metavar="N", help="samples per test set; default: the set's")
    result.add_argument("--seed", type=int, default=0, help="seed of the samples (default %(default)s)")
    result.add_argument("--batch-size", type=at_least_one, default=64, metavar="N", help="default %(default)s")
    result.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every number to a file")
    add_loading(result)
    return result
