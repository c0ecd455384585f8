"""Local text files: `.txt`, `.jsonl` and `.parquet`, and the part that is held out for validation.

A document is a text file, a line of a jsonl file or a row of a parquet file. Text files are UTF-8: a byte order mark is
removed, and every line end (`\\r\\n`, `\\r`) becomes `\\n`. Text from jsonl and parquet files is not changed.
"""

import glob
import gzip
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc

import whatwhere

from ..checks import Refused
from .rows import NO_TEXT, check_text, texts_of, with_text

OWN_TEXT = (
    "Example: --train-file mytext/*.txt [--validation-file held_out.txt], or in a recipe data: {train_file: "
    "mytext/*.txt, ...}."
)
# File endings, and the format's name in `datasets`.
_KINDS = {".txt": "text", ".raw": "text", ".jsonl": "json", ".json": "json"}
_KINDS |= {f"{ending}.gz": kind for ending, kind in _KINDS.items()} | {".parquet": "parquet"}
# Maximum number of characters in a piece of a text file.
_PIECE = 1 << 16
# Share of the training text that is held out if there are no validation files. With fewer than _FEW documents, the end
# of each document is held out; otherwise whole documents.
_HELD_OUT = 0.05
_FEW = 20
# Approximate number of pieces of a short document (fewer if its characters take several bytes).
_PIECES = 80
_FEATURES = datasets.Features({"text": datasets.Value("large_string"), "document": datasets.Value("int64")})
# Errors of files that are cut or have other contents.
_UNREADABLE = (EOFError, gzip.BadGzipFile, zlib.error, ValueError)
_WHITE_SPACE = re.compile(r"(?<=\S)(?=\s)")


def find_all(option: str, entries: Sequence[str], root: Path | None = None) -> list[str]:
    """Returns the files of an option, each once: files, folders or patterns, in `root` or the current folder."""
    files: list[str] = []
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"{option}={entry!r} is not valid: it must be a file, a folder or a pattern. {OWN_TEXT}")
        path = os.path.join(root or "", os.path.expanduser(entry))
        if os.path.isdir(path):
            found = sorted(str(file) for file in Path(path).rglob("*") if _kind(str(file)) and file.is_file())
            reason = f"the folder has no {', '.join(_KINDS)} file"
        else:
            names = glob.glob(os.path.expanduser(entry), root_dir=root, recursive=True)
            # An existing file takes precedence over a pattern, for names with brackets.
            found = [path] if os.path.isfile(path) else sorted(os.path.join(root or "", name) for name in names)
            found = [file for file in found if os.path.isfile(file)]
            reason = "there is no such file or folder, and no file matches it as a pattern"
        if not found:
            where = f" in {str(root)!r}" if root else ""
            raise ValueError(f"{option}={entry!r} is not valid{where}: {reason}.")
        files += [file for file in found if file not in files]
    return files


def _kind(file: str) -> str | None:
    return next((kind for ending, kind in _KINDS.items() if file.endswith(ending)), None)


def kind_of_all(files: Sequence[str], what: str) -> str:
    """Returns the format of files; raises ValueError if there are several, or one is unknown."""
    for file in files:
        if _kind(file) is None:
            raise ValueError(f"file {Path(file).name!r} has an unknown ending. Allowed: {', '.join(_KINDS)}.")
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
    try:
        if kind != "text":
            rows = datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming)
        elif streaming:
            rows = datasets.IterableDataset.from_generator(_text_rows, gen_kwargs={"files": files}, features=_FEATURES)
        else:
            # `datasets` caches by these values.
            state = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, files)]
            # A tuple: `datasets` would split a list into shards.
            settings = {"files": tuple(files), "pieces": pieces, "state": str(state), "version": whatwhere.__version__}
            rows = datasets.Dataset.from_generator(_text_rows, gen_kwargs=settings, features=_FEATURES)
        if kind == "text" and (streaming or not pieces):
            rows = rows.remove_columns("document")
        return check_text(with_text(rows, text_field, what), what)
    except Refused:
        raise
    except (datasets.exceptions.DatasetGenerationError, StopIteration, *_UNREADABLE) as error:
        # For files without rows, `datasets` reports only that there is no data.
        if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
            raise Refused(f"{what} is not valid: {NO_TEXT}") from error
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise Refused(f"{what} cannot be read: {reason}") from error


def _text_rows(files: Sequence[str], pieces: bool = False, **state: str) -> Iterator[dict[str, Any]]:
    """Yields rows with the text of files, whole or in pieces; `state` is only used in the cache key of `datasets`."""
    for number, file in enumerate(files):
        texts = read_text(file) if pieces else ["".join(read_text(file))]
        for text in texts:
            yield {"text": text, "document": number}


def read_text(file: str) -> Iterator[str]:
    """Yields a text file in pieces that end before white space, if there is any.

    Words do not cross pieces, so a byte-level BPE trained on the pieces equals one trained on the whole text.
    """
    # A gzipped file gets more pieces, because its size is that of the compressed text.
    size = min(_PIECE, os.path.getsize(file) // _PIECES + 1)
    piece, rest = "", ""
    try:
        with (
            gzip.open(file, "rt", encoding="utf-8-sig")
            if file.endswith(".gz")
            else open(file, encoding="utf-8-sig") as text
        ):
            while more := text.read(size):
                if "\0" in more:
                    raise ValueError("it contains NUL characters.")
                rest += more
                places = [place.start() for place in _WHITE_SPACE.finditer(rest)]
                cut = places[-1] if places else len(rest) if len(rest) >= 4 * size else 0
                if not cut:
                    continue
                if piece:
                    yield piece
                piece, rest = rest[:cut], rest[cut:]
    except _UNREADABLE as error:
        raise ValueError(f"file {file!r} cannot be read as UTF-8 text: {error}") from error
    # A short remainder is joined to the last piece.
    if piece and len(rest) > size // 2:
        yield piece
        piece = ""
    yield piece + rest


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
    # Once for all processes.
    if not int(os.environ.get("RANK", "0")):
        print(f"{what} without a validation file: {part} are held out for validation", file=sys.stderr)
    return train, validation


def _pieces(rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
    """Returns the pieces of a document, as in `read_text`."""
    text = rows["text"][0]
    size = len(text) // _PIECES + 1
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return {"text": pieces, "document": numbers * len(pieces)}
