"""Tokenised text on disk: written once, by parallel processes, and read through memory maps.

`prepare` tokenises the documents of a split into a folder, named by a hash of the rows, the tokenizer and the format's
version:

| file | contents |
|---|---|
| `tokens-00000.bin`, ... | the tokens of a range of documents, uint16, or int32 for more than 65,536 entries |
| `ends-00000.bin`, ... | int64, for each document of that range the number of tokens up to its end |
| `bytes-00000.bin`, ... | int32, for each token the bytes of its text; only of held-out text |
| `shard-00000.json`, ... | numbers of tokens and documents, and of each file size, time of writing and SHA-256 |
| `prepared.json` | written last: the number of shards, and what was tokenised |

The ranges depend on the rows alone. Each shard is written atomically, so that interrupted work is continued. The tokens
do not depend on the length of sequences or on packing: all runs with the same text and tokenizer use the same folder.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
from filelock import FileLock
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ..progress import Progress
from ..writing import replacing, write_json
from .pack import batch_of
from .rows import texts_of
from .tokenize import added_tokens, byte_level, measure_pieces, single_threaded, tokenize_pieces, train_bpe

FORMAT = 1
CACHE_VARIABLE = "WHATWHERE_CACHE"
# Documents of a shard: a 64th of all, at most so many.
SHARD_DOCUMENTS, SHARDS = 8192, 64


def cache_folder() -> Path:
    """Returns the folder of prepared text: `WHATWHERE_CACHE`, by default beside the cache of `datasets`."""
    default = Path(datasets.config.HF_DATASETS_CACHE).parent / "whatwhere"
    return Path(os.environ.get(CACHE_VARIABLE) or default).expanduser()


def prepared_folder(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, *, measure: bool = False) -> Path:
    """Returns the folder of the tokens of these rows, with `measure` of their bytes too; it may not exist yet."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    parts = [FORMAT, rows._fingerprint, type(tokenizer).__name__, content, special]
    # Earlier versions did not write these tokens, and their folders are not to be used.
    if any(added := added_tokens(tokenizer)):
        parts.append(added)
    what = json.dumps([*parts, "bytes"] if measure else parts)
    return cache_folder() / hashlib.sha256(what.encode()).hexdigest()[:32]


def _file(folder: Path, kind: str, shard: int) -> Path:
    return folder / f"{kind}-{shard:05d}.{'json' if kind == 'shard' else 'bin'}"


def _shard_bounds(rows: datasets.Dataset) -> list[int]:
    """Returns the first row of each shard, and the end; a document in several pieces is in one shard."""
    firsts: Sequence[int] = range(len(rows) + 1)
    if "document" in rows.column_names:
        numbers = np.asarray(rows.with_format("numpy")["document"])
        firsts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
    count = len(firsts) - 1
    return [*firsts[: count : max(1, min(SHARD_DOCUMENTS, count // SHARDS))], len(rows)]


# What the processes of a pool have, without a copy: they are forked.
_work: dict[str, Any] = {}


def _write_shard(shard: int) -> tuple[int, int]:
    """Tokenises one shard; returns its tokens and documents."""
    # Mapped anew, see `texts_of`.
    rows, folder, bounds = pickle.loads(_work["rows"]), _work["folder"], _work["bounds"]
    rows, tokenizer, measure = (
        rows.select(range(bounds[shard], bounds[shard + 1])),
        _work["tokenizer"],
        _work["measure"],
    )
    total = 0
    ends: list[int] = []
    changed: set[int] = set()
    files = {kind: _file(folder, kind, shard) for kind in ("tokens", "ends", *(["bytes"] if measure else []))}
    with contextlib.ExitStack() as stack:
        drafts = {kind: stack.enter_context(replacing(file)) for kind, file in files.items()}
        written = {kind: stack.enter_context(draft.open("wb")) for kind, draft in drafts.items()}
        pieces: Iterator[Any] = measure_pieces(tokenizer, rows) if measure else tokenize_pieces(tokenizer, rows)
        for ids, last, *measured in pieces:
            written["tokens"].write(ids.astype(_work["dtype"]).tobytes())
            total += len(ids)
            if measured:
                sizes, differs = measured
                written["bytes"].write(sizes.tobytes())
                changed |= {len(ends)} if differs else set()
            if last:
                ends.append(total)
        written["ends"].write(np.array(ends, dtype=np.int64).tobytes())
    stamps = {kind: _stamp(file) | {"sha256": file_sha256(file)} for kind, file in files.items()}
    counts = {"tokens": total, "documents": len(ends), "changed": len(changed)}
    write_json(_file(folder, "shard", shard), {**counts, "files": stamps})
    return total, len(ends)


def prepare(
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "the text",
    processes: int | None = None,
    measure: bool = False,
) -> "PreparedText":
    """Tokenises rows, or the part of them that is not tokenised yet, and returns the tokens.

    Args:
        rows: with `text`, and `document` if the text is a piece (see `tokenize_pieces`).
        processes: that tokenise, in one thread each; by default one for each core. Little text is tokenised by this
            process alone, in several threads unless `processes` is 1.
        measure: also write the bytes of the text of each token, for bits per byte; see `measure_pieces`.
    """
    folder = prepared_folder(rows, tokenizer, measure=measure)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{CACHE_VARIABLE}={str(folder.parent)!r} is not valid: no folder can be made there ({error.strerror})."
        ) from error
    # Other processes, and other runs with the same text, wait for the one that tokenises.
    with FileLock(f"{folder}.lock"):
        if not (folder / "prepared.json").exists():
            dtype, bounds = "uint16" if len(tokenizer) <= 1 << 16 else "int32", _shard_bounds(rows)
            _work.update(rows=pickle.dumps(rows), tokenizer=tokenizer, measure=measure)
            _work.update(folder=folder, dtype=dtype, bounds=bounds)
            try:
                _write_all(folder, len(bounds) - 1, name, processes)
            except ValueError as error:
                raise ValueError(f"{name} cannot be tokenised: {error}") from error
            finally:
                _work.clear()
            about = {"format": FORMAT, "shards": len(bounds) - 1, "dtype": dtype, "name": name}
            write_json(folder / "prepared.json", about)
    return PreparedText(folder)


def _write_all(folder: Path, count: int, name: str, processes: int | None) -> None:
    missing = [shard for shard in range(count) if not _file(folder, "shard", shard).exists()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    single = single_threaded() if processes == 1 else contextlib.nullcontext()
    processes = min(processes or cores, len(missing))
    begun = time.monotonic()
    tokens = documents = 0
    with single, Progress(f"tokenising {name}", count, unit="shards", done=count - len(missing)) as progress:
        for some_tokens, some_documents in _done_in(missing, processes):
            tokens, documents = tokens + some_tokens, documents + some_documents
            progress.advance()
    if tokens:
        seconds = time.monotonic() - begun
        print(
            f"tokenised {name}: {tokens:,} tokens of {documents:,} documents in {seconds:.0f} s "
            f"({tokens / max(1e-9, seconds):,.0f} tokens/s, {processes} processes)",
            file=sys.stderr,
        )


def _done_in(shards: Sequence[int], processes: int) -> Iterator[tuple[int, int]]:
    """Yields the results of `_write_shard` as they are done."""
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(_write_shard, shards)
        return
    with single_threaded(), ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            for done in as_completed([pool.submit(_write_shard, shard) for shard in shards]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def prepare_tokenizer(texts: Sequence[datasets.Dataset], vocab_size: int) -> PreTrainedTokenizerBase:
    """Returns the tokenizer `bpe` trained on the rows of these texts; it is trained once, and then read from a file."""
    what = json.dumps([FORMAT, [rows._fingerprint for rows in texts], vocab_size, tokenizers.__version__])
    file = cache_folder() / f"bpe-{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        if not file.exists():
            tokenizer = train_bpe(vocab_size, itertools.chain.from_iterable(map(texts_of, texts)))
            with replacing(file) as draft:
                tokenizer.backend_tokenizer.save(str(draft))
        return byte_level(Tokenizer.from_file(str(file)))


class PreparedText:
    """The tokens of a split, in a folder of `prepare`, read as far as they are used.

    The sizes of the files are checked, and the SHA-256 of those with another time of writing, or with `verify` of all.

    Attributes:
        changed: the number of documents whose text the tokenizer changes; 0 if the text was not measured.
        is_measured: whether there are the bytes of each token.
    """

    def __init__(self, folder: Path, *, verify: bool = False) -> None:
        about = _read_json(folder / "prepared.json")
        self.folder, self._dtype = folder, np.dtype(about["dtype"])
        records = [_read_json(_file(folder, "shard", shard)) for shard in range(about["shards"])]
        for shard, record in enumerate(records):
            for kind, stamp in record["files"].items():
                _check(_file(folder, kind, shard), stamp, verify)
        self.is_measured = any("bytes" in record["files"] for record in records)
        self.changed = sum(record.get("changed", 0) for record in records)
        # First token of each shard.
        self._starts = np.cumsum([0, *(record["tokens"] for record in records)], dtype=np.int64)
        self._ends = [
            _memory(_file(folder, "ends", shard), np.dtype(np.int64)) if record["documents"] else np.empty(0, np.int64)
            for shard, record in enumerate(records)
        ]
        self.tokens, self.documents = int(self._starts[-1]), sum(record["documents"] for record in records)
        digests = "".join(record["files"]["tokens"]["sha256"] for record in records)
        self.sha256 = hashlib.sha256(digests.encode()).hexdigest()

    def __reduce__(self) -> Any:
        return PreparedText, (self.folder,)

    def _shards(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the shards that have tokens of start..stop, and their first tokens."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while shard < len(self._ends) and (first := int(self._starts[shard])) < stop:
            if first < self._starts[shard + 1]:
                yield shard, first
            shard += 1

    def read(self, start: int, stop: int, kind: str = "tokens") -> np.ndarray:
        """Returns tokens start..stop, or with kind="bytes" the bytes of the text of each, int32."""
        dtype = self._dtype if kind == "tokens" else np.dtype(np.int32)
        parts = [
            _memory(_file(self.folder, kind, shard), dtype)[max(0, start - first) : stop - first]
            for shard, first in self._shards(start, stop)
        ]
        return np.concatenate(parts, dtype=np.int32)

    def ends(self, start: int, stop: int) -> np.ndarray:
        """Returns the ends of documents in start < end < stop, int64, ascending: there the next document begins."""
        found = []
        for shard, first in self._shards(start, stop):
            low, high = np.searchsorted(self._ends[shard], [start - first, stop - 1 - first], side="right")
            found.append(self._ends[shard][low:high] + first)
        return np.concatenate(found)


class TextBlocks:
    """Blocks of `sequence_length` tokens of prepared text, read when they are asked for; `pack` as in `Packer`.

    There are at most `limit`; `pad_token_id` is needed for pack="separate", and `name` is for messages.
    """

    def __init__(
        self,
        text: PreparedText,
        sequence_length: int,
        pack: str = "concat",
        *,
        pad_token_id: int | None = None,
        limit: int | None = None,
        name: str = "the text",
    ) -> None:
        self.text, self.sequence_length, self.pack, self.pad_token_id = text, sequence_length, pack, pad_token_id
        # A fingerprint of the tokens, and the number of documents that the tokenizer changes.
        self.sha256, self.changed = text.sha256, text.changed
        if pack == "separate":
            ends = np.concatenate([ends + first for ends, first in zip(text._ends, text._starts)])
            lengths = np.diff(ends, prepend=0)
            counts = lengths // sequence_length + (lengths % sequence_length > 1)
            self._document_starts, self._last_blocks = ends - lengths, np.cumsum(counts)
            self._document_ends = ends
            self.count = int(self._last_blocks[-1])
        else:
            self.count = text.tokens // sequence_length
        self.count = min(self.count, self.count if limit is None else limit)
        if not self.count:
            raise ValueError(
                f"sequence_length={sequence_length!r} is not valid: {name} has {text.tokens} tokens. Give more text, "
                "or a smaller sequence_length."
            )

    def __len__(self) -> int:
        return self.count

    def block(self, index: int) -> dict[str, np.ndarray]:
        """Returns a block as `Packer` yields it."""
        start, stop = index * self.sequence_length, (index + 1) * self.sequence_length
        if self.pack == "separate":
            document = int(np.searchsorted(self._last_blocks, index, side="right"))
            before = int(self._last_blocks[document - 1]) if document else 0
            start = int(self._document_starts[document]) + (index - before) * self.sequence_length
            stop = min(start + self.sequence_length, int(self._document_ends[document]))
        result = {"input_ids": self.text.read(start, stop)}
        if self.text.is_measured:
            result["bytes"] = self.text.read(start, stop, "bytes")
        if self.pack == "documents":
            begins = np.concatenate([[start], self.text.ends(start, stop)])
            slots = np.arange(start, stop)
            result["position_ids"] = slots - begins[np.searchsorted(begins, slots, side="right") - 1]
        return result

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns `input_ids`, int64 (B, T), of some blocks, with `position_ids` or `labels` (see `pack`).

        Measured text also has `bytes`, of the text of each token.
        """
        blocks = [part.block(within) for part, within in map(self._find, indices)]
        return batch_of(blocks, self.pack, self.pad_token_id, self.sequence_length)

    def _find(self, index: int) -> tuple["TextBlocks", int]:
        return self, index


class MixedBlocks(TextBlocks):
    """The blocks of several texts, one text after the other."""

    def __init__(self, parts: Sequence[TextBlocks]) -> None:
        self.parts, self.sequence_length, self.pack = parts, parts[0].sequence_length, parts[0].pack
        self.pad_token_id = parts[0].pad_token_id
        *starts, self.count = itertools.accumulate(map(len, parts), initial=0)
        self.starts = np.array(starts)
        self.sha256 = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
        self.changed = sum(part.changed for part in parts)

    def _find(self, index: int) -> tuple[TextBlocks, int]:
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[part], index - int(self.starts[part])


@functools.lru_cache(maxsize=64)
def _memory(file: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(file, dtype=dtype, mode="r")


def _stamp(file: Path) -> dict[str, int]:
    stat = file.stat()
    return {"bytes": stat.st_size, "written_ns": stat.st_mtime_ns}


def _damaged(file: Path, reason: object) -> ValueError:
    advice = f"Remove its folder {str(file.parent)!r}: the text is then tokenised again."
    return ValueError(f"{str(file)!r} is damaged: {reason}. {advice}")


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error


def _check(file: Path, record: Mapping[str, Any], verify: bool) -> None:
    try:
        stamp = _stamp(file)
    except OSError as error:
        raise _damaged(file, error.strerror) from error
    if stamp["bytes"] != record["bytes"] or (
        (verify or stamp["written_ns"] != record["written_ns"]) and file_sha256(file) != record["sha256"]
    ):
        raise _damaged(file, "its size or SHA-256 differs from that in its record")


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
