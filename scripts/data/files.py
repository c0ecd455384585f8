"""Local text files: `.txt`, `.jsonl` and `.parquet`, and the part that is held out for validation.

A document is a text file, a line of a jsonl file or a row of a parquet file. Text files are UTF-8: a byte order mark is
removed, and every line end (`\\r\\n`, `\\r`) becomes `\\n`. Text from jsonl and parquet files is not changed. NUL
characters are refused in all of them: they are a sign of files that are no text.
"""

import functools
import glob
import gzip
import itertools
import json
import os
import re
import sys
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.data_files import resolve_pattern

import whatwhere

from ..errors import Refused
from ..processes import is_first_process
from ..progress import without_bars
from .rows import NO_TEXT, about_conversations, check_text, texts_of
from .tokenize import PIECE, cut, text_of

OWN_TEXT = (
    "Example: --train-file mytext/*.txt [--validation-file held_out.txt], or in a recipe data: {train_file: "
    "mytext/*.txt, ...}."
)
# File endings, and the format.
_KINDS = {".txt": "text", ".raw": "text", ".jsonl": "json", ".json": "json"}
_KINDS |= {f"{ending}.gz": kind for ending, kind in _KINDS.items()} | {".parquet": "parquet"}
# Share of the training text that is held out if there are no validation files. With fewer than _FEW documents, the end
# of each document is held out; otherwise whole documents.
_HELD_OUT = 0.05
_FEW = 20
# Approximate number of pieces of a short document (fewer if its characters take several bytes).
_PIECES = 80
# Rows that are copied at once; they may be books.
_ROWS = 256
_FEATURES = datasets.Features({"text": datasets.Value("large_string"), "document": datasets.Value("int64")})
# Errors of files that are cut or have other contents.
_UNREADABLE = (EOFError, gzip.BadGzipFile, zlib.error, ValueError, pa.ArrowException)
_WHITE_SPACE = re.compile(r"(?<=\S)(?=\s)")


def find_all(option: str, entries: Sequence[str], root: Path | None = None) -> list[str]:
    """Returns the files of an option: files, folders or patterns, in `root` or the current folder.

    Folders and patterns have the files that `datasets` finds: hidden ones, folders with names such as `__pycache__` and
    a few names such as `README.md` are left out unless the entry names them, and links to folders are not followed. A
    file that is found twice, by a link or another spelling, counts once.
    """
    files: dict[str, str] = {}
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"{option}={entry!r} is not valid: it must be a file, a folder or a pattern. {OWN_TEXT}")
        path, start = os.path.expanduser(entry), os.fspath(root or "")
        here = os.path.join(start, path)
        inside = "" if root or os.path.isabs(path) else f" in {os.getcwd()!r}"
        reason = f"there is no such file or folder{inside}, and no file matches it as a pattern"
        # An existing file takes precedence over a pattern, for names with brackets.
        if os.path.isfile(here):
            found = [here]
        elif os.path.isdir(here):
            found, reason = (
                _matching(os.path.join(glob.escape(here), "**")),
                f"the folder has no {', '.join(_KINDS)} file",
            )
            others = tuple(os.path.relpath(file, here) for file in found if not _kind(file))
            found = [file for file in found if _kind(file)]
            if found and others:
                _say_left_out(entry, others)
        else:
            try:
                found = _matching(os.path.join(glob.escape(start), path))
            except ValueError as error:
                found, reason = [], f"{error}"
        if not found:
            where = f" in {str(root)!r}" if root else ""
            raise ValueError(f"{option}={entry!r} is not valid{where}: {reason}.")
        for file in found:
            files.setdefault(os.path.realpath(file), file)
    return list(files.values())


@functools.cache
def _say_left_out(folder: str, files: tuple[str, ...]) -> None:
    """Says once, on standard error, which files of a folder have another ending than those of text."""
    if is_first_process():
        names = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
        print(
            f"{folder}: {len(files)} files with other endings than {', '.join(_KINDS)} are left out ({names})",
            file=sys.stderr,
        )


def _matching(pattern: str) -> list[str]:
    """Returns the files of a pattern, sorted, and relative to the current folder as the pattern is."""
    try:
        # `datasets` does not normalise paths.
        found = resolve_pattern(os.path.normpath(os.path.join(glob.escape(os.getcwd()), pattern)), "")
    except FileNotFoundError:
        return []
    found = found if os.path.isabs(pattern) else map(os.path.relpath, found)
    return sorted(file for file in found if os.path.isfile(file))


def _kind(file: str) -> str | None:
    return next((kind for ending, kind in _KINDS.items() if file.lower().endswith(ending)), None)


def kind_of_all(files: Sequence[str], what: str) -> str:
    """Returns the format of files; raises ValueError if there are several, or one is unknown."""
    for file in files:
        if _kind(file) is None:
            raise ValueError(
                f"{what} is not valid: file {Path(file).name!r} has an unknown ending. Allowed: {', '.join(_KINDS)}."
            )
    examples = {str(_kind(file)): repr(Path(file).name) for file in files}
    if len(examples) > 1:
        raise ValueError(
            f"{what} is not valid: it has files of several formats, such as {' and '.join(examples.values())}. Give "
            "files of one format, or a `mixture` of texts with one format each."
        )
    return next(iter(examples))


def read_found(files: list[str], what: str, *, text_field: str, streaming: bool, pieces: bool = False) -> Any:
    """Returns the rows of files of one format; `what` is their name in messages."""
    kind = kind_of_all(files, what)
    # Not a field of text files.
    field = "" if kind == "text" else text_field
    try:
        if streaming:
            form = {"files": files, "text_field": field}
            rows = datasets.IterableDataset.from_generator(_rows, gen_kwargs=form, features=_FEATURES)
        else:
            # `datasets` caches by these values.
            state = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, files)]
            # A tuple: `datasets` would split a list into shards.
            settings: dict[str, Any] = {
                "files": tuple(files),
                "text_field": field,
                "pieces": pieces,
                "state": str(state),
            }
            settings |= {"version": whatwhere.__version__}
            with without_bars():
                rows = datasets.Dataset.from_generator(
                    _rows, gen_kwargs=settings, features=_FEATURES, writer_batch_size=_ROWS
                )
        if kind != "text" or streaming or not pieces:
            rows = rows.remove_columns("document")
        return check_text(rows, what)
    except Refused:
        raise
    except (datasets.exceptions.DatasetGenerationError, StopIteration, *_UNREADABLE) as error:
        # For files without rows, `datasets` reports only that there is no data.
        if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
            raise Refused(f"{what} is not valid: {NO_TEXT}") from error
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise Refused(f"{what} is not valid: {reason}") from error


def _rows(files: Sequence[str], text_field: str, pieces: bool = False, **state: str) -> Iterator[dict[str, Any]]:
    """Yields rows with the text of files: text files whole or in pieces, or the documents of jsonl and parquet files.

    `state` is only used in the cache key of `datasets`.
    """
    for number, file in enumerate(files):
        texts = _documents(file, text_field) if text_field else read_text(file)
        for text in texts if text_field or pieces else ["".join(texts)]:
            yield {"text": text, "document": number}


def _documents(file: str, text_field: str) -> Iterator[str]:
    """Yields the documents of a jsonl or parquet file; raises Refused if one is not text."""
    try:
        kind = _kind(file)
        for place, row in _parquet_rows(file, text_field) if kind == "parquet" else _json_rows(file):
            if text_field not in row:
                others = ", ".join(map(repr, row)) or "nothing"
                hint = about_conversations(row, f"{kind!r}, data_files={file!r}")
                raise Refused(f"{place} of {file!r} has no text_field={text_field!r}, but {others}.{hint}")
            if isinstance(row[text_field], list) and (
                hint := about_conversations(row, f"{kind!r}, data_files={file!r}")
            ):
                raise Refused(f"{place} of {file!r} has a list in text_field={text_field!r}.{hint}")
            try:
                text = text_of({"text": row[text_field]})
                if "\0" in text:
                    raise ValueError("a document contains NUL characters.")
                # JSON can have lone surrogates.
                text.encode()
            except ValueError as error:
                raise Refused(f"{place} of {file!r}: {error}") from error
            yield text
    except Refused:
        raise
    except (OSError, *_UNREADABLE) as error:
        # Of the file system.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"file {file!r} cannot be read: {error}") from error


def _json_rows(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the object of each line, or of each entry of an array that is the whole file."""
    with gzip.open(file) if file.lower().endswith(".gz") else open(file, "rb") as lines:
        first = lines.readline()
        is_whole = first.removeprefix(b"\xef\xbb\xbf").strip()[:1] == b"[" or first.strip() == b"{"
        for number, line in enumerate([first + lines.read()] if is_whole else itertools.chain([first], lines), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig").rstrip(), object_pairs_hook=_object)
            except json.JSONDecodeError as error:
                place = f"line {number + error.lineno - 1} is not valid JSON"
                raise ValueError(f"{place}: {error.msg.removesuffix(' at')}, character {error.colno}.") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number}: {error}.") from error
            is_array = is_whole and isinstance(value, list)
            for entry, row in enumerate(value if is_array else [value], 1):
                place = f"entry {entry}" if is_array else f"line {number}"
                if is_array and isinstance(row, str):
                    row = {"text": row}
                if not isinstance(row, dict):
                    raise Refused(f"{place} of {file!r} is {json.dumps(row)[:40]}; it must be an object with the text.")
                if isinstance(row, _Ambiguous):
                    raise Refused(f"{place} of {file!r} has the key {row.key!r} more than once.")
                yield place, row


class _Ambiguous(dict):
    """An object of JSON with a key that it has more than once, `key`."""

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found = _Ambiguous(found)
        found.key = next(name for name in names if names.count(name) > 1)
    return found


def _parquet_rows(file: str, text_field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the value of each row; the first row has all columns if there is none for text."""
    with open(file, "rb") as content:
        table = pq.ParquetFile(content)
        names = table.schema_arrow.names
        if text_field not in names:
            yield "row 1", dict.fromkeys(names)
        rows = (
            value for batch in table.iter_batches(_ROWS, columns=[text_field]) for value in batch.column(0).to_pylist()
        )
        for number, value in enumerate(rows, 1):
            yield f"row {number}", {text_field: value}


def read_text(file: str) -> Iterator[str]:
    """Yields a text file in pieces that end before white space, if there is any.

    Words do not cross pieces, so a byte-level BPE trained on the pieces equals one trained on the whole text.
    """
    # A gzipped file gets more pieces, because its size is that of the compressed text.
    size = min(PIECE, os.path.getsize(file) // _PIECES + 1)

    def parts(text: TextIO) -> Iterator[str]:
        while more := text.read(size):
            if "\0" in more:
                raise ValueError("it contains NUL characters.")
            yield more

    def place(rest: str) -> int | None:
        places = [place.start() for place in _WHITE_SPACE.finditer(rest)]
        return places[-1] if places else len(rest) if len(rest) >= 4 * size else None

    before = ""
    try:
        with (
            gzip.open(file, "rt", encoding="utf-8-sig")
            if file.lower().endswith(".gz")
            else open(file, encoding="utf-8-sig") as text
        ):
            for piece, last in cut(parts(text), place):
                # A short remainder is joined to the piece before.
                if last and len(piece) <= size // 2:
                    before, piece = "", before + piece
                if before:
                    yield before
                before = piece
    except _UNREADABLE as error:
        raise ValueError(f"file {file!r} cannot be read as UTF-8 text: {error}") from error
    yield before


def hold_out(rows: datasets.Dataset, what: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Splits rows, named `what` in messages, into a training part and a held-out part, and says how on standard error.

    The choice depends only on the number of documents.
    """
    # Empty documents do not count.
    sizes = pc.binary_length(rows.data["text"]).to_numpy()
    rows = rows if sizes.all() else rows.select(np.flatnonzero(sizes))
    few = len(rows.unique("document")) if "document" in rows.column_names else len(rows)
    if few < _FEW and "document" not in rows.column_names:
        form = {"remove_columns": rows.column_names, "features": _FEATURES}
        with without_bars():
            rows = rows.map(_pieces, with_indices=True, batched=True, batch_size=1, **form)
    numbers = np.arange(len(rows))
    if "document" in rows.column_names:
        numbers = np.unique(rows["document"], return_inverse=True)[1]
    if few < _FEW:
        # The last pieces of each document: at least one, with a share of characters as close as possible to _HELD_OUT.
        held_out = np.zeros(len(numbers), dtype=bool)
        lengths = np.array([len(text) for text in texts_of(rows)])
        for document in range(few):
            places = np.flatnonzero(numbers == document)
            shares = lengths[places][::-1].cumsum() / max(1, lengths[places].sum())
            held_out[places[len(places) - 1 - int(abs(shares - _HELD_OUT).argmin()) :]] = True
    else:
        chosen = np.random.default_rng(0).permutation(few)[: round(_HELD_OUT * few)]
        held_out = np.isin(numbers, chosen)
    if held_out.all():
        raise ValueError(f"{what} is too short to hold out a part for validation. Give more text.")
    train, validation = rows.select(np.flatnonzero(~held_out)), rows.select(np.flatnonzero(held_out))
    if few < _FEW:
        part = f"the last {_HELD_OUT:.0%} of {'the document' if few == 1 else f'each of the {few} documents'}"
    else:
        part = f"{len(chosen)} of {few} documents, drawn at random,"
    if is_first_process():
        verb = "is" if few == 1 else "are"
        what = textwrap.shorten(what, 100, placeholder=" ...]" if what.endswith("]") else " ...")
        print(f"{what} without a validation file: {part} {verb} held out for validation", file=sys.stderr)
    return train, validation


def _pieces(rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
    """Returns the pieces of a document, as in `read_text`."""
    text = rows["text"][0]
    size = len(text) // _PIECES + 1
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return {"text": pieces, "document": numbers * len(pieces)}
