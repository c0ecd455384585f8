"""Text: from the Hub, from local files, or from the running Python's standard library (no download).

Every source gives the same thing, a dictionary of splits whose rows hold a document in `text`:

* `stdlib` (default): the source code of the standard library of the running Python, one file a document, split by a
  hash of the file's path inside the library, 90 % train, 5 % validation, 5 % test. A file keeps its split when other
  files come and go, but the text differs between Python versions: results of two versions are not comparable.
* `hub`: any dataset of the Hugging Face Hub, downloaded or streamed.
* `local`: `.txt`, `.jsonl` and `.parquet` files (the first two also with `.gz`), chosen for each split by glob patterns
  inside a data folder, or named one by one (`train_file`, `validation_file`).
* `corpus`: corpora known by name (`corpora.py`), from a data folder or else the Hub.

A document is a text file, a line of a jsonl file or a row of a parquet file. Text files are UTF-8: a byte order mark is
removed, and every line end (`\\r\\n`, `\\r`) becomes `\\n`. Text from jsonl and parquet files is taken as it is.
"""

import glob
import gzip
import hashlib
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import whatwhere

try:
    import datasets
    import pyarrow
except ImportError as error:
    raise ImportError('the corpora need `datasets`: pip install "whatwhere[train]"') from error

from .tokenize import text_of

SPLITS = ("train", "validation", "test")
SOURCES = ("stdlib", "hub", "local", "corpus")
DATA_DIR_VARIABLE = "WHATWHERE_DATA_DIR"

# Endings of files (text and jsonl files may end in .gz too), and what `datasets` calls the kind.
_ENDINGS = {".txt": "text", ".raw": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Largest number of characters in a piece of a text file.
_PIECE = 1 << 16
# Share of the training text that is held out if there are no validation files. With fewer than _FEW documents, the end
# of each document is held out; otherwise whole documents.
_HELD_OUT = 0.05
_FEW = 20
# A short document is split into about this many pieces (fewer if its characters take several bytes).
_PIECES = 80
OWN_TEXT = (
    "Example: --train-file mytext/*.txt [--validation-file held_out.txt], or in a recipe data: {train_file: "
    "mytext/*.txt, ...}."
)

# What the embedded corpus leaves out: other people's packages; tests (as long as the library itself, and repetitive);
# files written by programs, which are no code (`pydoc_data`), nearly equal to each other and so would leak from train
# into test (`encodings`), or different on every machine (`config-*`, `_sysconfigdata*`).
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")

_WHITE_SPACE = re.compile(r"(?<=\S)(?=\s)")
_SLICE = re.compile(r"^(?P<split>[^\[\]]+?)(\[(?P<start>\d*):(?P<stop>\d*)\])?$")


def load_text(
    source: str = "stdlib",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    splits: Mapping[str, str | Sequence[str]] | None = None,
    text_field: str = "text",
    train_file: str | Sequence[str] | None = None,
    validation_file: str | Sequence[str] | None = None,
    streaming: bool = False,
    pieces: bool = False,
) -> dict[str, Any]:
    """Loads the splits of a corpus.

    Args:
        source: `stdlib`, `hub`, `local` or `corpus`.
        data_dir: the folder of `local`, and of `corpus` if there is one; by default the environment variable
            WHATWHERE_DATA_DIR.
        dataset: the id of a Hub dataset (`hub` only).
        dataset_config: the configuration of that dataset (`hub` only).
        splits: for `hub`, our split to theirs, documents chosen by an optional slice: `{"train": "train[1000:]",
            "validation": "train[:1000]"}`; by default each split under its own name. For `local`, our split to one or
            more glob patterns relative to `data_dir`: `{"train": "wikipedia_en/train-*.jsonl.gz", ...}`. For `corpus`,
            to the split of a corpus: `{"train": "wikipedia_en:train[:1000]", "test": "wikitext103:test", ...}`.
        text_field: the column or key that holds the document (`hub`, jsonl and parquet files).
        train_file: for `local` without `splits`: one or more files, folders or glob patterns, relative to the current
            folder; a folder stands for all text, jsonl and parquet files in it.
        validation_file: the same for the validation split; by default a part of `train_file` is held out: 5 % of the
            documents, drawn at random, or of fewer than 20 documents the last 5 % of each one.
        streaming: read lazily instead of downloading or copying first (not `stdlib`).
        pieces: a row of a text file holds a piece of it, for files of any size; `document` is the number of the file.
            Without effect on jsonl and parquet files, other sources and streams.

    Returns:
        A `datasets.DatasetDict` (`IterableDatasetDict` when streaming) with the rows' documents in `text`. There is
        always a `train` and a `validation` split; `test` may be missing for `hub` and `local`.

    Raises:
        ValueError: an argument or a file is not valid.
    """
    if source == "stdlib":
        return _load_stdlib()
    if source == "hub":
        return _load_hub(dataset, dataset_config, splits or {s: s for s in SPLITS}, text_field, streaming)
    if source == "local":
        files = find_files(data_dir, splits, train_file, validation_file, streaming=streaming)
        result = {
            name: _read(
                found, what, text_field=text_field, streaming=streaming, pieces=pieces or "validation" not in files
            )
            for name, (what, found) in files.items()
        }
        if "validation" not in result:
            result["train"], result["validation"] = hold_out(result["train"])
        return datasets.IterableDatasetDict(result) if streaming else datasets.DatasetDict(result)
    if source == "corpus":
        return _load_corpora(data_dir, splits, streaming)
    raise ValueError(f"source={source!r} is not valid. Allowed: {', '.join(map(repr, SOURCES))}.")


def stdlib_split(path: str) -> str:
    """Returns the split of the library file `path` (relative to the library, with forward slashes)."""
    percent = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 100
    return "train" if percent < 90 else "validation" if percent < 95 else "test"


def stdlib_files() -> Iterator[tuple[str, str]]:
    """Yields (path inside the library, text) of the embedded corpus, ordered by path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = {file.relative_to(root): file for file in root.rglob("*.py")}
    for path in sorted(paths, key=lambda path: path.as_posix()):
        if _EXCLUDED_FOLDERS & set(path.parts) or any(part.startswith(_EXCLUDED_PREFIXES) for part in path.parts):
            continue
        # `tokenize.open` honours a file's coding line and turns every line end into "\n".
        with tokenize.open(paths[path]) as file:
            text = file.read()
        if text.strip():
            yield path.as_posix(), text


def _load_stdlib() -> datasets.DatasetDict:
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for path, text in stdlib_files():
        rows[stdlib_split(path)].append({"text": text, "path": path})
    if not all(rows.values()):
        raise ValueError(
            f"the standard library of this Python ({sysconfig.get_path('stdlib')}) holds too few source files for "
            "source='stdlib'. Allowed instead: 'hub' or 'local'."
        )
    return datasets.DatasetDict({split: datasets.Dataset.from_list(rows[split]) for split in SPLITS})


def _load_hub(
    dataset: str | None, config: str | None, splits: Mapping[str, str | Sequence[str]], text_field: str, streaming: bool
) -> dict[str, Any]:
    if not dataset:
        raise ValueError(
            f"dataset={dataset!r} is not valid: source='hub' needs the id of a dataset, such as 'user/name'."
        )
    _check_split_names(splits)
    available = datasets.get_dataset_split_names(dataset, config)
    result = {}
    for name, theirs in splits.items():
        match = _SLICE.match(theirs) if isinstance(theirs, str) else None
        if match is None:
            raise ValueError(
                f"splits[{name!r}]={theirs!r} is not valid: it must be like 'train' or 'train[1000:2000]'."
            )
        if match["split"] not in available:
            if name == "test":
                continue
            raise ValueError(
                f"splits[{name!r}]={theirs!r} is not valid: {dataset!r} has the splits "
                f"{', '.join(map(repr, available))}."
            )
        result[name] = read_hub(dataset, config, match.string, text_field=text_field, streaming=streaming)
    return datasets.IterableDatasetDict(result) if streaming else datasets.DatasetDict(result)


def read_hub(
    dataset: str,
    config: str | None,
    split: str,
    *,
    text_field: str,
    streaming: bool,
    data_files: str | None = None,
) -> Any:
    """Returns the rows of a split of a Hub dataset, their documents in `text`.

    Args:
        dataset: its id.
        config: its configuration; None for the default one.
        split: its split, with the documents wanted in brackets if not all: `train[1000:2000]`.
        text_field: the column that holds the document.
        streaming: read lazily instead of downloading first. If `split` says where to stop, it is read lazily in any
            case, so that no more is downloaded than is asked for.
        data_files: the files, where `dataset` is a kind of file, such as `parquet`.
    """
    match = _SLICE.match(split)
    assert match is not None, "the caller has checked it"
    lazily = not streaming and bool(match["stop"])
    files = {"data_files": data_files} if data_files else {}
    rows = datasets.load_dataset(dataset, config, split=match["split"], streaming=streaming or lazily, **files)
    rows = choose(rows, split.removeprefix(match["split"]))
    rows = _with_text(rows, text_field, f"dataset {dataset!r}")
    return collect(rows) if lazily else rows


def choose(rows: Any, chosen: str) -> Any:
    """Returns the documents that a text such as `[10:20]`, `[:20]` or `[10:]` asks for; all for no text.

    `skip` and `take` read the same documents from a stream and from a table.
    """
    start, _, stop = chosen.strip("[]").partition(":")
    rows = rows.skip(int(start)) if start else rows
    return rows.take(int(stop) - int(start or 0)) if stop else rows


def collect(rows: Any) -> datasets.Dataset:
    """Returns the texts of a stream as a table in memory."""
    return in_memory(text_of(row) for row in rows)


def in_memory(texts: Iterable[str]) -> datasets.Dataset:
    """Returns a table of texts, however long they are together: a column of type `string` would hold 2 GiB."""
    return datasets.Dataset(pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())}))


def _load_corpora(
    data_dir: str | os.PathLike[str] | None, splits: Mapping[str, str | Sequence[str]] | None, streaming: bool
) -> dict[str, Any]:
    from .corpora import load_corpus, parse_choice

    _check_split_names(splits or {})
    result = {}
    for name, choice in (splits or {}).items():
        try:
            corpus, split, chosen = parse_choice(choice)  # type: ignore[arg-type]  # it refuses what is no string
            result[name] = load_corpus(corpus, f"{split}{chosen}", data_dir=data_dir, streaming=streaming)
        except ValueError as error:
            raise ValueError(f"splits[{name!r}]={choice!r} is not valid: {error}") from error
    return datasets.IterableDatasetDict(result) if streaming else datasets.DatasetDict(result)


def find_files(
    data_dir: str | os.PathLike[str] | None,
    splits: Mapping[str, str | Sequence[str]] | None,
    train_file: str | Sequence[str] | None,
    validation_file: str | Sequence[str] | None,
    *,
    streaming: bool = False,
) -> dict[str, tuple[str, list[str]]]:
    """Finds the files of `source="local"`, without reading them; the arguments are those of `load_text`.

    Returns:
        for each split what it was asked for by, in words for messages, and its files. There is no `validation` if a
        part of the training text is to be held out.

    Raises:
        ValueError: no files are named, or a file is missing or of an unknown kind.
    """
    own = {"train_file": train_file, "validation_file": validation_file}
    given = [name for name, value in own.items() if value]
    if given and splits:
        raise ValueError(
            f"{given[0]}={own[given[0]]!r} and splits={dict(splits)!r} exclude each other: give one of them."
        )
    if validation_file and not train_file:
        raise ValueError(f"validation_file={validation_file!r} needs train_file. {OWN_TEXT}")
    if train_file:
        if streaming and not validation_file:
            raise ValueError("streaming=True needs validation_file: no part of a stream can be held out.")
        return {
            name.removesuffix("_file"): (name, _own_files(name, [value] if isinstance(value, str) else value))
            for name, value in own.items()
            if value
        }
    data_dir = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    root = Path(data_dir).expanduser() if data_dir else None
    if root is not None and not root.is_dir():
        raise ValueError(f"data_dir={str(data_dir)!r} is not valid: it must be an existing folder.")
    if not splits:
        raise ValueError(
            f"source='local' needs files: train_file, or splits={{'train': PATTERN, 'validation': PATTERN}} inside "
            f"--data-dir. {OWN_TEXT}"
        )
    if root is None:
        raise ValueError(
            f"splits={dict(splits)!r} are patterns inside a data folder: give --data-dir, or set {DATA_DIR_VARIABLE}."
        )
    _check_split_names(splits)
    result = {}
    for name, patterns in splits.items():
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, (list, tuple)) or not all(
            isinstance(pattern, str) and pattern and not Path(pattern).is_absolute() and ".." not in Path(pattern).parts
            for pattern in patterns
        ):
            raise ValueError(
                f"splits[{name!r}]={patterns!r} is not valid: it must be a pattern, or a list of patterns, relative to "
                "the data folder and without '..'."
            )
        result[name] = f"splits[{name!r}]={patterns!r}", _matches(root, name, patterns)
    return result


def _own_files(name: str, entries: Sequence[str]) -> list[str]:
    files: list[str] = []
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"{name}={entry!r} is not valid: it must be a file, a folder or a pattern. {OWN_TEXT}")
        path = os.path.expanduser(entry)
        if os.path.isdir(path):
            found = sorted(str(file) for file in Path(path).rglob("*") if _kind_or_none(str(file)) and file.is_file())
            reason = f"the folder holds no {_allowed_endings()} file"
        else:
            # A name with brackets is a file before it is a pattern.
            found = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
            reason = "there is no such file or folder, and no file matches it as a pattern"
        if not found:
            raise ValueError(f"{name}={entry!r} is not valid: {reason}.")
        files += [file for file in found if file not in files]
    _kind_of_all(files, name)
    return files


def read_files(
    root: Path, name: str, patterns: Sequence[str], *, text_field: str = "text", streaming: bool = False
) -> Any:
    """Returns the documents of local files: a line of a jsonl file, a row of a parquet file or a whole text file, each.

    Args:
        root: the folder.
        name: of the split, for messages.
        patterns: globs relative to `root`; files are read in the order of the patterns, then of their names.
        text_field: the key or column of jsonl and parquet files that holds the document.
        streaming: read lazily instead of copying first.

    Raises:
        ValueError: a pattern matches nothing, or a file cannot be read.
    """
    files = _matches(root, name, patterns)
    return _read(files, f"splits[{name!r}]={patterns!r}", text_field=text_field, streaming=streaming)


def _matches(root: Path, name: str, patterns: Sequence[str]) -> list[str]:
    files: list[str] = []
    for pattern in patterns:
        found = sorted(str(file) for file in root.glob(pattern) if file.is_file())
        if not found:
            raise ValueError(f"splits[{name!r}]={pattern!r} matches no file in {str(root)!r}.")
        files += [file for file in found if file not in files]
    _kind_of_all(files, f"splits[{name!r}]={patterns!r}")
    return files


def _kind_of_all(files: Iterable[str], what: str) -> str:
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise ValueError(f"{what} mixes {' and '.join(sorted(kinds))} files: take one kind for a split.")
    return kinds.pop()


def _read(files: list[str], what: str, *, text_field: str, streaming: bool, pieces: bool = False) -> Any:
    """Returns the rows of files of one kind; `what` names them in messages."""
    kind = _kind_of_all(files, what)
    features = datasets.Features({"text": datasets.Value("large_string"), "document": datasets.Value("int64")})
    try:
        if kind != "text":
            for file in files if kind == "json" else ():
                _refuse_binary(file)
            rows = datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming)
            return _with_text(rows, text_field, what)
        if streaming:
            rows = datasets.IterableDataset.from_generator(_text_rows, gen_kwargs={"files": files}, features=features)
        else:
            # `datasets` reads the files again if one of these values changes.
            state = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, files)]
            # A tuple: `datasets` would split a list into shards.
            settings = {"files": tuple(files), "pieces": pieces, "state": str(state), "version": whatwhere.__version__}
            rows = datasets.Dataset.from_generator(_text_rows, gen_kwargs=settings, features=features)
        return rows if pieces and not streaming else rows.remove_columns("document")
    except (datasets.exceptions.DatasetGenerationError, StopIteration, pyarrow.ArrowInvalid) as error:
        reason = str(error.__cause__ or error) or "it holds nothing"
        raise ValueError(f"{what} cannot be read: {reason}") from error


def _refuse_binary(file: str) -> None:
    """Raises ValueError if a JSON file begins with NUL bytes; `datasets` would report an empty file."""
    try:
        with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as content:
            if b"\0" in content.read(1 << 16):
                raise ValueError(f"file {file!r} holds NUL bytes: it is no jsonl file in UTF-8.")
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"file {file!r} cannot be read: {error}") from error


def _text_rows(files: Sequence[str], pieces: bool = False, **state: str) -> Iterator[dict[str, Any]]:
    """Yields the text of files, one a row or in pieces; `state` only tells `datasets` whether they are the same."""
    for number, file in enumerate(files):
        texts = read_text(file) if pieces else ["".join(read_text(file))]
        for text in texts:
            yield {"text": text, "document": number}


def read_text(file: str) -> Iterator[str]:
    """Yields a text file in pieces, which end before white space where there is any.

    Words do not cross pieces, so a byte-level BPE trained on the pieces equals one trained on the whole text.

    Raises:
        ValueError: the file is not UTF-8 text.
    """
    # The size of a gzipped file is that of its compressed text: it gets more pieces.
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
                    raise ValueError(f"file {file!r} is not UTF-8 text: it holds NUL characters.")
                rest += more
                places = [place.start() for place in _WHITE_SPACE.finditer(rest)]
                cut = places[-1] if places else len(rest) if len(rest) >= 4 * size else 0
                if not cut:
                    continue
                if piece:
                    yield piece
                piece, rest = rest[:cut], rest[cut:]
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"file {file!r} cannot be read as UTF-8 text: {error}") from error
    # A short remainder belongs to the piece before it.
    if piece and len(rest) > size // 2:
        yield piece
        piece = ""
    yield piece + rest


def hold_out(rows: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Splits rows into a training part and a held-out part; see `load_text`.

    The choice depends only on the number of documents. `info.description` of the held-out part describes it.

    Raises:
        ValueError: there is too little text.
    """
    few = len(rows.unique("document")) if "document" in rows.column_names else len(rows)
    if few < _FEW and "document" not in rows.column_names:
        rows = _cut(rows)
    numbers = np.array(rows["document"]) if "document" in rows.column_names else np.arange(len(rows))
    if few < _FEW:
        # The last pieces of each document, at least one: the number whose share of characters is nearest to _HELD_OUT.
        held_out = np.zeros(len(numbers), dtype=bool)
        lengths = np.array([len(text) for text in rows["text"]])
        for document in range(few):
            places = np.flatnonzero(numbers == document)
            shares = lengths[places][::-1].cumsum() / max(1, lengths[places].sum())
            held_out[places[len(places) - 1 - int(abs(shares - _HELD_OUT).argmin()) :]] = True
    else:
        chosen = np.random.default_rng(0).permutation(few)[: round(_HELD_OUT * few)]
        held_out = np.isin(numbers, chosen)
    if held_out.all():
        raise ValueError(
            "train_file is too short to hold out a part of it. Give --validation-file (in a recipe: "
            "data.validation_file)."
        )
    train, validation = rows.select(np.flatnonzero(~held_out)), rows.select(np.flatnonzero(held_out))
    if few < _FEW:
        what = f"the last {_HELD_OUT:.0%} of {'the document' if few == 1 else f'each of the {few} documents'}"
    else:
        what = f"{len(chosen)} of {few} documents, drawn at random"
    validation.info.description = f"no validation file given: {what} are held out for validation"
    return train, validation


def _cut(rows: datasets.Dataset) -> datasets.Dataset:
    """Returns the documents of a few rows in pieces, as `read_text` reads files."""
    texts, numbers = [], []
    for number, row in enumerate(rows):
        text = text_of(row)
        size = len(text) // _PIECES + 1
        for start in range(0, len(text), size):
            texts.append(text[start : start + size])
            numbers.append(number)
    return datasets.Dataset(
        pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string()), "document": pyarrow.array(numbers)})
    )


def _check_split_names(splits: Mapping[str, Any]) -> None:
    unknown = sorted(set(splits) - set(SPLITS))
    missing = sorted({"train", "validation"} - set(splits))
    if unknown or missing:
        raise ValueError(
            f"splits={dict(splits)!r} is not valid: "
            + (f"{unknown[0]!r} is no split; " if unknown else f"{missing[0]!r} is missing; ")
            + "it must have 'train' and 'validation', and may have 'test'."
        )


def _kind_or_none(file: str) -> str | None:
    ending = Path(file.removesuffix(".gz")).suffix
    return None if ending == ".parquet" and file.endswith(".gz") else _ENDINGS.get(ending)


def _allowed_endings() -> str:
    return ", ".join(_ENDINGS) + " (or .txt.gz, .raw.gz, .jsonl.gz, .json.gz)"


def _kind(file: str) -> str:
    if kind := _kind_or_none(file):
        return kind
    raise ValueError(f"file {Path(file).name!r} has an unknown kind. Allowed: {_allowed_endings()}.")


def _with_text(rows: Any, text_field: str, what: str) -> Any:
    columns = rows.column_names or list(next(iter(rows)))
    if text_field not in columns:
        raise ValueError(
            f"text_field={text_field!r} is not valid: {what} has the columns {', '.join(map(repr, columns))}."
        )
    return rows if text_field == "text" else rows.rename_column(text_field, "text")
