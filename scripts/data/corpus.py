"""Text: from the Hub, from local files, or from the running Python's standard library (no download).

Every source gives the same thing, a dictionary of splits whose rows hold a document in `text`:

* `stdlib` (default): the source code of the standard library of the running Python, one file a document, split by a
  hash of the file's path inside the library, 90 % train, 5 % validation, 5 % test. A file keeps its split when other
  files come and go, but the text differs between Python versions: results of two versions are not comparable.
* `hub`: any dataset of the Hugging Face Hub, downloaded or streamed.
* `local`: `.jsonl`, `.jsonl.gz`, `.txt` and `.txt.gz` files in a folder, chosen for each split by glob patterns.
* `corpus`: corpora known by name (`corpora.py`), from a data folder or else the Hub.
"""

import hashlib
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import datasets
    import pyarrow
except ImportError as error:
    raise ImportError('the corpora need `datasets`: pip install "whatwhere[train]"') from error

SPLITS = ("train", "validation", "test")
SOURCES = ("stdlib", "hub", "local", "corpus")
DATA_DIR_VARIABLE = "WHATWHERE_DATA_DIR"

# What the embedded corpus leaves out: other people's packages; tests (as long as the library itself, and repetitive);
# files written by programs, which are no code (`pydoc_data`), nearly equal to each other and so would leak from train
# into test (`encodings`), or different on every machine (`config-*`, `_sysconfigdata*`).
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")

_SLICE = re.compile(r"^(?P<split>[^\[\]]+?)(\[(?P<start>\d*):(?P<stop>\d*)\])?$")


def load_text(
    source: str = "stdlib",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    splits: Mapping[str, str | Sequence[str]] | None = None,
    text_field: str = "text",
    streaming: bool = False,
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
        text_field: the column or key that holds the document (`hub` and jsonl files).
        streaming: read lazily instead of downloading or copying first (not `stdlib`).

    Returns:
        A `datasets.DatasetDict` (`IterableDatasetDict` when streaming) with the rows' documents in `text`. There is
        always a `train` and a `validation` split; `test` may be missing for `hub` and `local`.
    """
    if source == "stdlib":
        return _load_stdlib()
    if source == "hub":
        return _load_hub(dataset, dataset_config, splits or {s: s for s in SPLITS}, text_field, streaming)
    if source == "local":
        return _load_local(data_dir or os.environ.get(DATA_DIR_VARIABLE), splits, text_field, streaming)
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


def _load_local(
    data_dir: str | os.PathLike[str] | None,
    splits: Mapping[str, str | Sequence[str]] | None,
    text_field: str,
    streaming: bool,
) -> dict[str, Any]:
    if not data_dir:
        raise ValueError(f"source='local' needs a folder: give --data-dir, or set {DATA_DIR_VARIABLE}.")
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise ValueError(f"data_dir={str(data_dir)!r} is not valid: it must be an existing folder.")
    _check_split_names(splits or {})
    result = {}
    for name, patterns in (splits or {}).items():
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, (list, tuple)) or not all(
            isinstance(pattern, str) and pattern and not Path(pattern).is_absolute() for pattern in patterns
        ):
            raise ValueError(
                f"splits[{name!r}]={patterns!r} is not valid: it must be a pattern, or a list of patterns, relative to "
                "the data folder."
            )
        result[name] = read_files(root, name, patterns, text_field=text_field, streaming=streaming)
    return datasets.IterableDatasetDict(result) if streaming else datasets.DatasetDict(result)


def read_files(
    root: Path, name: str, patterns: Sequence[str], *, text_field: str = "text", streaming: bool = False
) -> Any:
    """Returns the documents of local files: a line of a jsonl file, or a whole text file, each.

    Args:
        root: the folder.
        name: of the split, for messages.
        patterns: globs relative to `root`; files are read in the order of the patterns, then of their names.
        text_field: the key of jsonl files that holds the document.
        streaming: read lazily instead of copying first.

    Raises:
        ValueError: a pattern matches nothing, or a file cannot be read.
    """
    files: list[str] = []
    for pattern in patterns:
        found = sorted(str(file) for file in root.glob(pattern) if file.is_file())
        if not found:
            raise ValueError(f"splits[{name!r}]={pattern!r} matches no file in {str(root)!r}.")
        files += [file for file in found if file not in files]
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise ValueError(f"splits[{name!r}]={patterns!r} mixes text and jsonl files: take one kind for a split.")
    options = {"sample_by": "document"} if kinds == {"text"} else {}
    try:
        rows = datasets.load_dataset(kinds.pop(), data_files=files, split="train", streaming=streaming, **options)
        return _with_text(rows, "text" if options else text_field, f"splits[{name!r}]")
    except (datasets.exceptions.DatasetGenerationError, StopIteration) as error:
        reason = error.__cause__ or error or "it holds nothing"
        raise ValueError(f"splits[{name!r}]={patterns!r} cannot be read: {reason}") from error


def _check_split_names(splits: Mapping[str, Any]) -> None:
    unknown = sorted(set(splits) - set(SPLITS))
    missing = sorted({"train", "validation"} - set(splits))
    if unknown or missing:
        raise ValueError(
            f"splits={dict(splits)!r} is not valid: "
            + (f"{unknown[0]!r} is no split; " if unknown else f"{missing[0]!r} is missing; ")
            + "it must have 'train' and 'validation', and may have 'test'."
        )


def text_of(row: Mapping[str, Any]) -> str:
    """Returns the text of a document; raises ValueError if it has none."""
    text = row.get("text")
    if not isinstance(text, str):
        raise ValueError(f"A document has text={text!r}; it must be a string. Its other fields: {sorted(row)}.")
    return text


def _kind(file: str) -> str:
    name = file.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return "json"
    if name.endswith((".txt", ".raw")):
        return "text"
    raise ValueError(f"file {Path(file).name!r} is of no known kind. Allowed: .jsonl, .txt, .raw, and each with .gz.")


def _with_text(rows: Any, text_field: str, what: str) -> Any:
    columns = rows.column_names or list(next(iter(rows)))
    if text_field not in columns:
        raise ValueError(
            f"text_field={text_field!r} is not valid: {what} has the columns {', '.join(map(repr, columns))}."
        )
    return rows if text_field == "text" else rows.rename_column(text_field, "text")
