"""Files are replaced atomically: readers see the old content or the new one, never a part."""

import contextlib
import errno
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Of a full disk, a quota, a limit of the size of files, and a file system that only allows to read.
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


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


def why_not_written(error: BaseException) -> str | None:
    """Returns the reason if the operating system refused to write a file, as on a full disk; None for other errors."""
    if isinstance(error, OSError):
        return error.strerror if error.errno in _REFUSED else None
    # The libraries `safetensors` and `tokenizers` raise exceptions of their own.
    if found := re.search(r"([^:]+) \(os error \d+\)", str(error)):
        return found[1].strip()
    return why_not_written(error.__cause__) if error.__cause__ else None


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises an OSError with the path if the operating system refuses to write a file there, as on a full disk."""
    try:
        yield
    except Exception as error:
        if (reason := why_not_written(error)) is None:
            raise
        raise OSError(f"{str(path)!r} cannot be written: {reason}.") from error


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Raises OSError if a folder, which need not exist yet, is not writable."""
    folder = Path(folder)
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OSError(f"output={str(folder)!r} cannot be written: {error.strerror}.") from error
