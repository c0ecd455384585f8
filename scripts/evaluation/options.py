"""Command-line options that the measurements share: how a checkpoint is loaded."""

import argparse
import dataclasses

from .checkpoints import Loading, choose_device


def at_least_one(text: str) -> int:
    """Returns the positive integer of an option; argparse reports the error with the option's name."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be at least 1")
    return int(text)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `Loading`."""
    group = parser.add_argument_group("model")
    group.add_argument("--device", help="default: the GPU if there is one")
    group.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    group.add_argument("--attn-implementation", metavar="NAME", help="default: the model's own choice")
    group.add_argument("--trust-remote-code", action="store_true", help="run the code in the checkpoint's folder")


def loading_of(options: argparse.Namespace) -> Loading:
    """Returns what the options of `add_loading` say; raises ValueError if the device cannot be used."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Loading)}
    return Loading(**{**given, "device": choose_device(options.device)})
