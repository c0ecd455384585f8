"""Shared code of the command line parsers."""

import argparse
from typing import Any


def command_parser(name: str, usage: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Returns the parser of `whatwhere NAME`, whose help is at most 120 characters wide."""
    return argparse.ArgumentParser(
        prog=f"whatwhere {name}",
        usage=f"whatwhere {name} {usage}",
        description=description,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=40, width=120),
        **options,
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--resume`, with the values False, True and "auto"."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=["auto"],
        help="continue from the newest checkpoint; auto: or begin, or end if finished",
    )
