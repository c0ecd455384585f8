"""Text from the Hub, from local files, or from the running Python's standard library (without download).

The source `stdlib` is the source code of the standard library of the running Python, one file a document, split by a
hash of the file's path inside the library, 90 % train, 5 % validation, 5 % test. A file's split does not depend on
other files, but the text differs between Python versions, and so results of two versions are not comparable.
"""

import hashlib
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from ..checks import parse
from .corpora import load_corpus
from .files import hold_out, read_found
from .rows import DATA_DIR_VARIABLE as DATA_DIR_VARIABLE
from .rows import SPLITS, check_text, read_hub
from .source import TextSource, find_files
from .tokenize import text_of as text_of

# Left out of `stdlib`: third-party packages; tests (long and repetitive); generated files that are not code
# (`pydoc_data`), nearly identical to each other, and so would leak from train into test (`encodings`), or different on
# every machine (`config-*`, `_sysconfigdata*`).
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")


def load_text(
    text: str | TextSource = "stdlib",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    pieces: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Returns the splits of a source, tables or streams of `datasets` with documents in `text`; `test` may be missing.

    Args:
        text: the source, or its name.
        data_dir: the folder of local files; by default the environment variable WHATWHERE_DATA_DIR.
        pieces: split text files of any size into rows with pieces, where `document` is the number of the file. No
            effect on jsonl and parquet files, other sources and streams.
        options: the other fields of `TextSource`, if `text` is a name.
    """
    if isinstance(text, str):
        text = parse(TextSource, {"source": text, **options})
    streaming = text.streaming
    if text.source == "stdlib":
        return _load_stdlib()
    if text.source == "hub":
        result = _load_hub(text)
    elif text.source == "corpus":
        result = _load_corpora(text, data_dir)
    else:
        files = find_files(text, data_dir)
        pieces = pieces or "validation" not in files
        form: dict[str, Any] = {"text_field": text.text_field, "streaming": streaming, "pieces": pieces}
        result = {name: read_found(found, what, **form) for name, (what, found) in files.items()}
        if "validation" not in result:
            result["train"], result["validation"] = hold_out(result["train"], files["train"][0])
    return datasets.IterableDatasetDict(result) if streaming else datasets.DatasetDict(result)


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
        # `tokenize.open` respects a file's coding line and converts line ends to "\n".
        with tokenize.open(paths[path]) as file:
            text = file.read()
        if text.strip():
            yield path.as_posix(), text


def _load_stdlib() -> datasets.DatasetDict:
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for path, text in stdlib_files():
        rows[stdlib_split(path)].append({"text": text, "path": path})
    if not all(rows.values()):
        raise ValueError(f"source='stdlib' is not valid: {sysconfig.get_path('stdlib')} has too few source files.")
    return datasets.DatasetDict({split: datasets.Dataset.from_list(rows[split]) for split in SPLITS})


def _load_hub(text: TextSource) -> dict[str, Any]:
    dataset, config = str(text.dataset), text.dataset_config
    splits = text.splits or {split: split for split in SPLITS}
    available = datasets.get_dataset_split_names(dataset, config)
    result = {}
    for name, theirs in splits.items():
        match = re.fullmatch(r"([^\[\]]+)(\[\d*:\d*\])?", str(theirs))
        if name == "test" and match and match[1] not in available:
            continue
        if not match or match[1] not in available:
            raise ValueError(
                f"splits[{name!r}]={theirs!r} is not valid: it must be like 'train' or 'train[1000:2000]', and "
                f"{dataset!r} has the splits {', '.join(map(repr, available))}."
            )
        rows = read_hub(dataset, config, theirs, text_field=text.text_field, streaming=text.streaming)
        result[name] = check_text(rows, f"splits[{name!r}]={theirs!r}")
    return result


def _load_corpora(text: TextSource, data_dir: str | os.PathLike[str] | None) -> dict[str, Any]:
    result = {}
    for name, choice in (text.splits or {}).items():
        corpus, _, split = choice.partition(":")
        try:
            result[name] = load_corpus(corpus, split, data_dir=data_dir, streaming=text.streaming)
        except ValueError as error:
            raise ValueError(f"splits[{name!r}]={choice!r} is not valid: {error}") from error
    return result
