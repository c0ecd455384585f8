"""The source of text, its options and its splits.

The source `stdlib` is the source code of the standard library of the running Python, one file a document, split by a
hash of the file's path inside the library, 90 % train, 5 % validation, 5 % test. A file's split does not depend on
other files, but the text differs between Python versions, and so results of two versions are not comparable.
"""

import filecmp
import functools
import hashlib
import os
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import datasets
import pydantic

from ..checks import Checked, Positive, parse
from ..processes import is_first_process
from .files import OWN_TEXT, find_all, hold_out, kind_of_all, read_found
from .folder import DATA_DIR_VARIABLE, data_folder
from .rows import SPLITS, check_text, read_hub
from .tokenize import text_of as text_of

# Left out of `stdlib`: third-party packages; tests (long and repetitive); generated files that are not code
# (`pydoc_data`), nearly identical to each other, and so would leak from train into test (`encodings`), or different on
# every machine (`config-*`, `_sysconfigdata*`).
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
SOURCES = ("stdlib", "hub", "local", "corpus")
# The sources for which an option has an effect.
_USED_BY = {
    "dataset": ("hub",),
    "dataset_config": ("hub",),
    "splits": ("hub", "local", "corpus"),
    "train_file": ("local",),
    "validation_file": ("local",),
    "text_field": ("hub", "local"),
    "streaming": ("hub", "local", "corpus", "mixture"),
}


class TextSource(Checked):
    """A source of text.

    Attributes:
        source: `stdlib`, `hub`, `local` or `corpus` (see `corpora.yaml`).
        dataset, dataset_config: the id of a Hub dataset, and its configuration (`hub` only).
        splits: for each of our splits, with `hub` the dataset's split with an optional slice of documents:
            `{"train": "train[1000:]", "validation": "train[:1000]"}`; by default the split of the same name. With
            `local` one or more glob patterns relative to the data folder: `{"train": "wikipedia_en/train-*.jsonl.gz",
            ...}`. With `corpus` the split of a corpus: `{"train": "wikipedia_en:train[:1000]", "test":
            "wikitext103:test"}`.
        train_file: for `local` without `splits`: one or more files, folders or glob patterns, relative to the current
            folder; a folder means all text, jsonl and parquet files in it (see `find_all`).
        validation_file: the same for the validation split; its files are not trained on. By default, 5 % of the
            documents of `train_file` are held out at random, or with fewer than 20 documents the last 5 % of each.
        text_field: the column or key of the document (`hub`, jsonl and parquet files).
        streaming: read lazily instead of downloading or copying first (not `stdlib`).
    """

    source: Literal["stdlib", "hub", "local", "corpus"] = "stdlib"
    dataset: str | None = None
    dataset_config: str | None = None
    splits: dict | None = None
    train_file: str | list[str] | None = None
    validation_file: str | list[str] | None = None
    text_field: str = "text"
    streaming: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _own_text(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("train_file") and "source" not in values:
            return {**values, "source": "local"}
        return values

    def problems(self) -> Iterator[tuple[str, str]]:
        for name, sources in _USED_BY.items():
            if self.source not in sources and getattr(self, name) != TextSource.model_fields[name].default:
                yield name, f"it has no effect with source={self.source!r}"
        if self.source == "hub" and not self.dataset:
            yield "dataset", "source='hub' needs the id of a dataset"
        if self.source == "local" and not self.splits and not self.train_file:
            yield "splits", f"source='local' needs train_file, or splits inside --data-dir. {OWN_TEXT.rstrip('.')}"
        if self.train_file and self.splits:
            yield "splits", f"it has no effect with train_file={self.train_file!r}"
        if self.validation_file and not self.train_file:
            yield "validation_file", "it needs train_file"
        if self.train_file and self.streaming and not self.validation_file:
            yield "streaming", "it needs validation_file: no part of a stream can be held out"
        if self.splits and not {"train", "validation"} <= set(self.splits) <= set(SPLITS):
            yield "splits", "it must have 'train' and 'validation', and may have 'test'"
        if self.source == "corpus" and not self.splits:
            yield "splits", "source='corpus' needs a split of a corpus for each split, such as 'pg19:train'"
        if self.source != "corpus":
            return
        from .corpora import parse_choice

        for name, choice in (self.splits or {}).items():
            try:
                parse_choice(choice)
            except ValueError as error:
                yield "splits", f"{name!r}: {str(error).rstrip('.')}"


class MixedText(TextSource):
    """A text of a mixture."""

    weight: Positive

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.streaming:
            yield "streaming", "it is set for all texts of a mixture at once, as data.streaming"


def find_files(
    text: TextSource, data_dir: str | os.PathLike[str] | None, folder: Path | None = None
) -> dict[str, tuple[str, list[str]]]:
    """Finds the files of `source="local"` without reading them; `splits` are in `data_dir` or WHATWHERE_DATA_DIR.

    Args:
        folder: that `train_file` and `validation_file` are relative to; by default the current folder.

    Returns:
        for each split its option and value, for messages, and its files. There is no `validation` if a part of the
        training text is to be held out.
    """
    root = folder
    if text.train_file:
        given = {"train": ("train_file", text.train_file), "validation": ("validation_file", text.validation_file)}
    else:
        root, splits = data_folder(data_dir), text.splits or {}
        if root is None:
            raise ValueError(
                f"splits={splits!r} are patterns inside a data folder: give --data-dir, or set {DATA_DIR_VARIABLE}."
            )
        given = {name: (f"splits[{name!r}]", patterns) for name, patterns in splits.items()}
    result = {}
    for name, (option, value) in given.items():
        entries = value if isinstance(value, list) else [] if value is None else [value]
        paths = [] if text.train_file else [Path(str(entry)) for entry in entries]
        if any(path.is_absolute() or ".." in path.parts for path in paths):
            raise ValueError(
                f"{option}={value!r} is not valid: patterns must be relative to the data folder and without '..'."
            )
        if entries:
            result[name] = f"{option}={value!r}", find_all(option, entries, root)
    check_text_field(text.text_field, {kind_of_all(files, what) for what, files in result.values()})
    return result


def held_out_files(files: Mapping[str, tuple[str, list[str]]]) -> list[str]:
    """Returns the files of all splits of `find_files` but `train`."""
    return [file for name, (_, found) in files.items() if name != "train" for file in found]


def trained_files(
    files: Mapping[str, tuple[str, list[str]]], held_out: Iterable[str] = (), *, say: bool = False
) -> list[str]:
    """Returns the training files of `find_files` that are not held out, or all of them if all are held out.

    A copy of a file that is held out counts as that file.

    Args:
        held_out: more files than those of the other splits.
        say: say on standard error if some, or all, are held out.
    """
    what, found = files["train"]
    by_size: dict[int, list[str]] = {}
    for file in (*held_out_files(files), *held_out):
        by_size.setdefault(os.path.getsize(file), []).append(file)
    same = functools.partial(filecmp.cmp, shallow=False)
    kept = [file for file in found if not any(same(file, other) for other in by_size.get(os.path.getsize(file), ()))]
    note = f"{len(found) - len(kept)} of {len(found)} files are held out, and not trained on"
    if not kept:
        note = "WARNING: all of it is held out as well: scores on held-out text say nothing about other text"
    if say and len(kept) < len(found) and is_first_process():
        print(f"{what}: {note}", file=sys.stderr)
    return kept or found


def load_text(
    text: str | TextSource = "stdlib",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    folder: Path | None = None,
    held_out: Iterable[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Returns the splits of a source, tables or streams of `datasets` with documents in `text`; `test` may be missing.

    In a table, a text file of `local` has several rows, with pieces of it and the number of the file in `document`.

    Args:
        text: the source, or its name.
        data_dir: the folder of local files; by default the environment variable WHATWHERE_DATA_DIR.
        folder: as in `find_files`.
        held_out: files that `local` does not train on; files of its own other splits are left out in any case.
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
        files = find_files(text, data_dir, folder)
        files["train"] = files["train"][0], trained_files(files, held_out, say=True)
        form: dict[str, Any] = {"text_field": text.text_field, "streaming": streaming, "pieces": True}
        result = {name: read_found(found, what, **form) for name, (what, found) in files.items()}
        if "validation" not in result:
            result["train"], result["validation"] = hold_out(result["train"], files["train"][0])
    return datasets.IterableDatasetDict(result) if streaming else datasets.DatasetDict(result)


def read_files(option: str, entries: list[str], *, text_field: str = "text") -> tuple[list[str], datasets.Dataset]:
    """Returns the files of an option, as those of `train_file`, and their rows, for commands without training."""
    files = find_all(option, entries)
    what = f"{option}={entries!r}"
    check_text_field(text_field, {kind_of_all(files, what)})
    return files, read_found(files, what, text_field=text_field, streaming=False)


def check_text_field(text_field: str, kinds: set[str]) -> None:
    """Raises ValueError if a column of documents is named for text files, which have none; `kinds` are all formats."""
    if kinds == {"text"} and text_field != TextSource.model_fields["text_field"].default:
        raise ValueError(f"text_field={text_field!r} has no effect: all files are text files.")


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
    from .corpora import load_corpus

    result = {}
    for name, choice in (text.splits or {}).items():
        corpus, _, split = choice.partition(":")
        try:
            result[name] = load_corpus(corpus, split, data_dir=data_dir, streaming=text.streaming)
        except ValueError as error:
            raise ValueError(f"splits[{name!r}]={choice!r} is not valid: {error}") from error
    return result
