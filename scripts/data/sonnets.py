"""A short text that every installation has: the first ten sonnets of Shakespeare (1609, public domain)."""

import pathlib

SONNETS = pathlib.Path(__file__).with_name("sonnets.txt")


def sonnets() -> list[str]:
    """Returns the ten texts."""
    return SONNETS.read_text(encoding="utf-8").strip().split("\n\n")
