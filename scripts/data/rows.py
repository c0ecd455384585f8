"""Rows of text: tables and streams of `datasets`, from the Hub and from texts in memory, and their checks."""

import hashlib
import itertools
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets.arrow_writer import ArrowWriter
from datasets.table import MemoryMappedTable

from ..errors import Refused
from ..writing import draft_of
from .tokenize import text_of

SPLITS = ("train", "validation", "test")
R = TypeVar("R")
# The trainer of TRL for rows with these columns.
_CONVERSATIONS = {
    ("messages",): "SFTTrainer",
    ("conversations",): "SFTTrainer",
    ("prompt", "completion"): "SFTTrainer",
    ("chosen", "rejected"): "DPOTrainer",
}
NO_TEXT = "it has no text, and so no tokens. Choose another text."


def read_hub(
    dataset: str,
    config: str | None,
    split: str,
    chosen: str = "",
    *,
    text_field: str,
    streaming: bool,
    data_files: str | None = None,
) -> Any:
    """Returns the documents of a split of a Hub dataset (`train[1000:2000]`), and of a slice of them.

    `data_files` are the files if `dataset` is a file format, such as `parquet`.
    """
    name, _, own = split.partition("[")
    # For a slice with an end, only its documents are downloaded.
    lazily = not streaming and re.search(r":\d", own + chosen) is not None
    files = {"data_files": data_files} if data_files else {}
    rows = datasets.load_dataset(dataset, config, split=name, streaming=streaming or lazily, **files)
    rows = with_text(choose(choose(rows, own), chosen), text_field, dataset)
    return on_disk(map(text_of, rows)) if lazily else rows


def choose(rows: Any, chosen: str) -> Any:
    """Returns the documents of a slice such as `[10:20]`, `[:20]` or `[10:]`; all for an empty text."""
    start, _, stop = chosen.strip("[]").partition(":")
    rows = rows.skip(int(start)) if start else rows
    return rows.take(int(stop) - int(start or 0)) if stop else rows


def on_disk(texts: Iterable[str]) -> datasets.Dataset:
    """Returns a table of texts in the cache of `datasets`; the file's name and fingerprint depend on the texts alone.

    The column has the type `large_string`, since `string` is limited to 2 GiB.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "whatwhere"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    features = datasets.Features({"text": datasets.Value("large_string")})
    with draft_of(folder / "texts.arrow") as draft:
        # Few at a time: they may be books.
        with ArrowWriter(path=str(draft), features=features, writer_batch_size=64) as writer:
            for text in texts:
                content = text.encode()
                digest.update(len(content).to_bytes(8, "little") + content)
                writer.write({"text": text})
            writer.finalize()
        file = draft.replace(folder / f"{digest.hexdigest()}.arrow")
    return datasets.Dataset(MemoryMappedTable.from_file(str(file)), fingerprint=digest.hexdigest()[:16])


def texts_of(rows: datasets.Dataset) -> Iterator[str]:
    """Yields the texts of a table.

    What was read of a mapped file counts as memory of this process while it is mapped: each part is mapped anew.
    """
    mapped, size = pickle.dumps(rows), len(rows) // 64 + 1
    for start in range(0, len(rows), size):
        yield from pickle.loads(mapped).select(range(start, min(start + size, len(rows))))["text"]


def documents_of(rows: Any) -> Iterator[str]:
    """Yields the documents of a table or stream; rows with the same `document` are pieces of one."""
    if not isinstance(rows, datasets.Dataset):
        yield from map(text_of, rows)
    elif "document" not in rows.column_names:
        yield from texts_of(rows)
    else:
        for _, pieces in itertools.groupby(zip(rows["document"], texts_of(rows)), key=lambda piece: piece[0]):
            yield "".join(text for _, text in pieces)


def documents_sha256(documents: Iterable[str]) -> tuple[int, str]:
    """Returns the number of documents, and the SHA-256 of their texts."""
    digest, count = hashlib.sha256(), 0
    for text in documents:
        count += 1
        # At the end of a run, nothing may fail that training accepted.
        content = text.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return count, digest.hexdigest()


def readable(rows: Iterable[R]) -> Iterator[R]:
    """Yields rows of a stream; an error of `datasets` while it reads them becomes a ValueError with one sentence."""
    try:
        yield from rows
    except (TypeError, ValueError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        if type(error) in (ValueError, Refused):
            raise
        raise ValueError(f"the text cannot be read: {' '.join(str(error).split())}") from error


def about_conversations(columns: Iterable[str], rows: str) -> str:
    """Returns how to train on rows with these columns if they are conversations, for the end of a message, or nothing.

    `rows` are the arguments of `datasets.load_dataset`.
    """
    trainer = next((_CONVERSATIONS[names] for names in _CONVERSATIONS if {*names} <= {*columns}), None)
    if trainer is None:
        return ""
    return (
        f" These rows are conversations: train on them with TRL's {trainer} (docs/chat.md):\n"
        "    import datasets, transformers, trl, whatwhere\n"
        "    model = transformers.AutoModelForCausalLM.from_pretrained('CHECKPOINT')\n"
        f"    trl.{trainer}(model, train_dataset=datasets.load_dataset({rows})['train']).train()"
    )


def with_text(rows: Any, text_field: str, dataset: str) -> Any:
    """Renames the column of the documents to `text`; raises Refused if there is none."""
    columns = rows.column_names or list(next(iter(rows), {"text": ""}))
    hint = about_conversations(columns, repr(dataset))
    if text_field not in columns:
        raise Refused(
            f"text_field={text_field!r} is not valid: dataset {dataset!r} has the columns "
            f"{', '.join(map(repr, columns))}.{hint}"
        )
    if hint and isinstance(next(iter(rows), {text_field: ""})[text_field], list):
        raise Refused(f"text_field={text_field!r} is not valid: in dataset {dataset!r} it is a list.{hint}")
    return rows if text_field == "text" else rows.rename_column(text_field, "text")


def check_text(rows: Any, what: str) -> Any:
    """Raises Refused if all documents are empty, or one is not a string (in a stream, one before the first text)."""
    if isinstance(rows, datasets.Dataset) and (nulls := rows.data["text"].null_count):
        first = pc.index(pc.is_null(rows.data["text"]), True).as_py() + 1
        raise Refused(
            f"{what} is not valid: {nulls} documents have no text (null), the first one in row {first}; it must be a "
            "string."
        )
    try:
        has_text = any(text_of(row) for row in readable(rows))
    except ValueError as error:
        raise Refused(f"{what} is not valid: {error}") from error
    if not has_text:
        raise Refused(f"{what} is not valid: {NO_TEXT}")
    return rows
