"""The source of text: its options, and its local files, checked before anything is read."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic

from ..checks import Checked, Positive
from .corpora import parse_choice
from .files import OWN_TEXT, find_all, kind_of_all
from .rows import DATA_DIR_VARIABLE, SPLITS, data_folder

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
        source: `stdlib` (see `corpus.py`), `hub`, `local` or `corpus` (see `corpora.yaml`).
        dataset, dataset_config: the id of a Hub dataset, and its configuration (`hub` only).
        splits: for each of our splits, with `hub` the dataset's split with an optional slice of documents:
            `{"train": "train[1000:]", "validation": "train[:1000]"}`; by default the split of the same name. With
            `local` one or more glob patterns relative to the data folder: `{"train": "wikipedia_en/train-*.jsonl.gz",
            ...}`. With `corpus` the split of a corpus: `{"train": "wikipedia_en:train[:1000]", "test":
            "wikitext103:test"}`.
        train_file: for `local` without `splits`: one or more files, folders or glob patterns, relative to the current
            folder; a folder means all text, jsonl and parquet files in it.
        validation_file: the same for the validation split. By default, 5 % of the documents of `train_file` are held
            out at random, or with fewer than 20 documents the last 5 % of each.
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
        """Yields (field, reason) for problems across fields."""
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
        for name, choice in (self.splits or {}).items() if self.source == "corpus" else ():
            try:
                parse_choice(choice)
            except ValueError as error:
                yield "splits", f"{name!r}: {str(error).rstrip('.')}"


class MixedText(TextSource):
    """A text of a mixture."""

    weight: Positive

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields (field, reason) for problems across fields."""
        yield from super().problems()
        if self.streaming:
            yield "streaming", "it is set for all texts of a mixture at once, as data.streaming"


def find_files(text: TextSource, data_dir: str | os.PathLike[str] | None) -> dict[str, tuple[str, list[str]]]:
    """Finds the files of `source="local"` without reading them; `splits` are in `data_dir` or WHATWHERE_DATA_DIR.

    Returns:
        for each split its option and value, for messages, and its files. There is no `validation` if a part of the
        training text is to be held out.
    """
    root = None
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
        if root and any(Path(str(entry)).is_absolute() or ".." in Path(str(entry)).parts for entry in entries):
            raise ValueError(
                f"{option}={value!r} is not valid: patterns must be relative to the data folder and without '..'."
            )
        if entries:
            result[name] = f"{option}={value!r}", find_all(option, entries, root)
    kinds = {kind_of_all(files, what) for what, files in result.values()}
    if kinds == {"text"} and text.text_field != TextSource.model_fields["text_field"].default:
        raise ValueError(f"text_field={text.text_field!r} has no effect: all files are text files.")
    return result
