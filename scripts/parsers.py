"""Parsers of the command line, and options that several commands have."""

import argparse
import json
from typing import Any

import yaml


def command_parser(name: str, usage: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Returns the parser of `whatwhere NAME`, whose help is at most 120 characters wide."""
    return argparse.ArgumentParser(
        prog=f"whatwhere {name}",
        usage=f"whatwhere {name} {usage}",
        description=description,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=40, width=120),
        **options,
    )


def add_validation_file(parser: Any, default: str) -> None:
    """Adds the option for own text to evaluate on; `default` says what is read without it."""
    parser.add_argument("--validation-file", nargs="+", metavar="FILE", help=f"text to evaluate on; {default}")


def add_own_text(parser: Any, default: str) -> None:
    """Adds the options for own text of commands that do not train."""
    add_validation_file(parser, default)
    parser.add_argument("--text-field", metavar="NAME", help="column of the documents; default text")


def json_value(text: str) -> Any:
    """Returns the value of an option in JSON; an `argparse` type."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if value is None:
        raise argparse.ArgumentTypeError("null is not valid: leave the option out for its default")
    return value


def name_or_list(text: str) -> Any:
    """Returns a name, or the list in a text such as `[rope, cope]` (YAML or JSON); an `argparse` type."""
    try:
        return yaml.safe_load(text) if text.lstrip().startswith("[") else text
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid list: it must be like [rope, cope]") from error
