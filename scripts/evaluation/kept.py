"""Measurements that are kept beside prepared text, so that another results file does not need them again.

A measurement is known by its model, its text, the settings, and the code that made it.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import whatwhere

from .results import versions
from .schema import Measured


def file_of(what: Mapping[str, Any]) -> pathlib.Path:
    """Returns the file in which a measurement is kept; it may not exist yet."""
    from ..data.prepared import cache_folder

    known = json.dumps({**what, "code": _code(), "versions": versions()}, sort_keys=True)
    return cache_folder() / "length" / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.json"


def read(file: pathlib.Path) -> Measured | None:
    """Returns the measurement in a file; None if there is no file, or none that can be read."""
    try:
        return Measured.model_validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


@functools.cache
def _code() -> str:
    """Returns the SHA-256 of the files of models and evaluation."""
    root = pathlib.Path(whatwhere.__file__).parent
    files = sorted([*root.glob("*.py"), *root.glob("configuration/*.py"), *root.glob("scripts/evaluation/*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
