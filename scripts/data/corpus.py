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

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from .corpora import load_corpus, parse_choice
from .files import find_files, hold_out, read_found
from .rows import DATA_DIR_VARIABLE as DATA_DIR_VARIABLE
from .rows import SLICE, SPLITS, check_split_names, read_hub
from .tokenize import text_of as text_of

SOURCES = ("stdlib", "hub", "local", "corpus")

# What the embedded corpus leaves out: other people's packages; tests (as long as the library itself, and repetitive);
# files written by programs, which are no code (`pydoc_data`), nearly equal to each other and so would leak from train
# into test (`encodings`), or different on every machine (`config-*`, `_sysconfigdata*`).
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")


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
            name: read_found(
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
    check_split_names(splits)
    available = datasets.get_dataset_split_names(dataset, config)
    result = {}
    for name, theirs in splits.items():
        match = SLICE.match(theirs) if isinstance(theirs, str) else None
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


def _load_corpora(
    data_dir: str | os.PathLike[str] | None, splits: Mapping[str, str | Sequence[str]] | None, streaming: bool
) -> dict[str, Any]:
    check_split_names(splits or {})
    result = {}
    for name, choice in (splits or {}).items():
        try:
            corpus, split, chosen = parse_choice(choice)  # type: ignore[arg-type]  # it refuses what is no string
            result[name] = load_corpus(corpus, f"{split}{chosen}", data_dir=data_dir, streaming=streaming)
        except ValueError as error:
            raise ValueError(f"splits[{name!r}]={choice!r} is not valid: {error}") from error
    return datasets.IterableDatasetDict(result) if streaming else datasets.DatasetDict(result)
