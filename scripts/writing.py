"""Files are replaced atomically: readers see the old content or the new one, never a part."""

import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def draft_of(file: Path) -> Iterator[Path]:
    """Yields a new path of a hidden file beside `file`; at the end, it is deleted unless it was moved."""
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}.partial")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields the path of a hidden file, which replaces `file` at the end, flushed to disk; not after an error."""
    with draft_of(file) as draft:
        yield draft
        with draft.open("r+b") as written:
            os.fsync(written.fileno())
        draft.replace(file)


def write_text(file: Path, text: str) -> None:
    with replacing(file) as draft:
        draft.write_text(text, encoding="utf-8", newline="")


def write_json(file: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Writes a JSON file, and its folder; raises ValueError if a number is not finite."""
    file = Path(file)
    try:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise ValueError(f"{file.name} is not written: a number is not finite: {error}") from error
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Raises OSError if a folder, which need not exist yet, is not writable."""
    folder = Path(folder)
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OSError(f"output={str(folder)!r} cannot be written: {error.strerror}.") from error
