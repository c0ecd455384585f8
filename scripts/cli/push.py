"""Push a model to the Hub: weights, code, tokenizer, card, figures and results.

    whatwhere push demo/pope you/pope-on-code
    whatwhere push runs/finetuned you/finetuned --private --licence apache-2.0

The card's example of loading names the repository. An edited card is pushed as it is; an empty template, as PEFT
writes, is replaced, and cards of the Trainer and TRL get the metadata that they lack. Checkpoints, states of trainers
and hidden files are not pushed, and absolute paths in results are shortened to their last part. A later push uploads
what has changed, and deletes weights, code, JSON files and chat templates in the repository that the run does not have.
Log in first: `hf auth login`, or the variable HF_TOKEN.
"""

import argparse
import pathlib

from .options import command_parser


def parser() -> argparse.ArgumentParser:
    result = command_parser("push", "RUN REPO [OPTIONS]", str(__doc__))
    result.add_argument("run", metavar="RUN", type=pathlib.Path, help="folder of a model or an adapter")
    result.add_argument("repo", metavar="REPO", help="repository on the Hub, like you/your-model; made if needed")
    result.add_argument("--private", action="store_true", help="make a new repository private")
    result.add_argument("--licence", metavar="ID", help="licence in the card, an identifier of the Hub like apache-2.0")
    return result
