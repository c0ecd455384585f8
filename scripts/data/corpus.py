"""Text: from the Hub, from local files, or from the running Python's standard library (no download).

Every source gives the same thing, a dictionary of splits whose rows hold a document in `text`:

* `stdlib` (default): the source code of the standard library of the running Python, one file a document, split by a
  hash of the file's path inside the library, 90 % train, 5 % validation, 5 % test. A file keeps its split when other
  files come and go, but the text differs between Python versions: results of two versions are not comparable.
* `hub`: any dataset of the Hugging Face Hub, downloaded or streamed.
* `local`: `.jsonl`, `.jsonl.gz`, `.txt` and `.txt.gz` files in a folder, chosen for each split by glob patterns.
"""

import hashlib
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import datasets
except ImportError as error:
    raise ImportError('the corpora need `datasets`: pip install "whatwhere[train]"') from error

SPLITS = ("train", "validation", "test")
SOURCES = ("stdlib", "hub", "local")
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
        source: `stdlib`, `hub` or `local`.
        data_dir: the folder of `local`; by default the environment variable WHATWHERE_DATA_DIR.
        dataset: the id of a Hub dataset (`hub` only).
        dataset_config: the configuration of that dataset (`hub` only).
        splits: for `hub`, our split to theirs, documents chosen by an optional slice: `{"train": "train[1000:]",
            "validation": "train[:1000]"}`; by default each split under its own name. For `local`, our split to one or
            more glob patterns relative to `data_dir`: `{"train": "wikipedia_en/train-*.jsonl.gz", ...}`.
        text_field: the column or key that holds the document (`hub` and jsonl files).
        streaming: read lazily instead of downloading or copying first (`hub` and `local`).

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
        rows = datasets.load_dataset(dataset, config, split=match["split"], streaming=streaming)
        start, stop = int(match["start"] or 0), int(match["stop"]) if match["stop"] else None
        # `skip` and `take` read the same documents from a stream and from a table.
        rows = rows.skip(start) if start else rows
        rows = rows.take(stop - start) if stop is not None else rows
        result[name] = _with_text(rows, text_field, f"dataset {dataset!r}")
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
        files: list[str] = []
        for pattern in patterns:
            found = sorted(str(file) for file in root.glob(pattern) if file.is_file())
            if not found:
                raise ValueError(f"splits[{name!r}]={pattern!r} matches no file in {str(data_dir)!r}.")
            files += [file for file in found if file not in files]
        kinds = {_kind(file) for file in files}
        if len(kinds) > 1:
            raise ValueError(f"splits[{name!r}]={patterns!r} mixes text and jsonl files: take one kind for a split.")
        options = {"sample_by": "document"} if kinds == {"text"} else {}
        try:
            rows = datasets.load_dataset(kinds.pop(), data_files=files, split="train", streaming=streaming, **options)
            result[name] = _with_text(rows, "text" if options else text_field, f"splits[{name!r}]")
        except (datasets.exceptions.DatasetGenerationError, StopIteration) as error:
            reason = error.__cause__ or error or "it holds nothing"
            raise ValueError(f"splits[{name!r}]={patterns!r} cannot be read: {reason}") from error
    return datasets.IterableDatasetDict(result) if streaming else datasets.DatasetDict(result)


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
    if name.endswith(".txt"):
        return "text"
    raise ValueError(f"file {Path(file).name!r} is of no known kind. Allowed: .jsonl, .jsonl.gz, .txt, .txt.gz.")


def _with_text(rows: Any, text_field: str, what: str) -> Any:
    columns = rows.column_names or list(next(iter(rows)))
    if text_field not in columns:
        raise ValueError(
            f"text_field={text_field!r} is not valid: {what} has the columns {', '.join(map(repr, columns))}."
        )
    return rows if text_field == "text" else rows.rename_column(text_field, "text")
