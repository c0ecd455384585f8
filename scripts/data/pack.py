"""Blocks for training: of a fixed length, cut from joined documents, or each of one document and padded."""

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import datasets
import numpy as np
import pyarrow
import torch
from transformers import PreTrainedTokenizerBase

from .tokenize import tokenize_pieces

IGNORED = -100

# Widths of padded batches are multiples of this: fewer shapes for kernels to be tuned and compiled for.
_MULTIPLE = 8


def iterate_blocks(
    documents: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, sequence_length: int, pack: str
) -> Iterator[dict[str, np.ndarray]]:
    """Yields blocks of `sequence_length` tokens.

    Args:
        documents: rows with a `text`, and a `document` if that is a piece of one (see `tokenize_pieces`).
        tokenizer: see `build_tokenizer`.
        sequence_length: the tokens in a block.
        pack: `concat` gives `input_ids` only: attention crosses documents. `documents` gives `position_ids` too, which
            start at 0 with each document and each block: Transformers derives from them a mask that keeps documents
            apart. Both join the documents and drop what is left at the end. `separate` cuts each document into blocks
            of its own, the last of which is shorter (int32 (T), T from 2 to `sequence_length`): nothing is joined,
            nothing is dropped but a single token at a document's end, which has no other to be predicted from.
    """
    ids = np.empty(0, dtype=np.int32)
    # Position of each token in its document; used by pack="documents" only.
    positions = np.empty(0, dtype=np.int32)
    position = 0
    for piece, last in tokenize_pieces(tokenizer, documents):
        ids = np.concatenate([ids, piece])
        if pack == "documents":
            positions = np.concatenate([positions, np.arange(position, position + len(piece), dtype=np.int32)])
            position = 0 if last else position + len(piece)
        whole = len(ids) - len(ids) % sequence_length
        for start in range(0, whole, sequence_length):
            block = {"input_ids": ids[start : start + sequence_length]}
            if pack == "documents":
                position_ids = positions[start : start + sequence_length].copy()
                # A document that began in an earlier block starts again at 0: its beginning can not be seen.
                position_ids[np.cumsum(position_ids == 0) == 0] -= position_ids[0]
                block["position_ids"] = position_ids
            yield block
        ids, positions = ids[whole:], positions[whole:]
        if pack == "separate" and last:
            if len(ids) > 1:
                yield {"input_ids": ids}
            ids = ids[:0]


def make_blocks(
    documents: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    pack: str = "concat",
    limit: int | None = None,
    name: str = "a split of the corpus",
) -> "datasets.Dataset | SeparateBlocks":
    """Returns the blocks of a split, in memory; `limit` takes only the first ones, `name` is for messages.

    Raises:
        ValueError: the split is shorter than one block.
    """
    blocks = islice(iterate_blocks(documents, tokenizer, sequence_length, pack), limit)
    short = ValueError(f"sequence_length={sequence_length!r} is not valid: {name} holds fewer tokens.")
    if pack == "separate":
        separate = [block["input_ids"].copy() for block in blocks]
        if not separate:
            raise short
        return SeparateBlocks(separate, tokenizer.pad_token_id, sequence_length)
    batches = []
    # Arrow tables of 1,024 blocks: 4 bytes a token.
    while some := list(islice(blocks, 1024)):
        arrays = {}
        for name in some[0]:
            values = pyarrow.array(np.concatenate([block[name] for block in some]))
            offsets = np.arange(0, len(values) + 1, sequence_length, dtype=np.int32)
            arrays[name] = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values)
        batches.append(pyarrow.table(arrays))
    if not batches:
        raise short
    # Without a fingerprint, `datasets` would copy all blocks to compute one.
    return datasets.Dataset(pyarrow.concat_tables(batches), fingerprint=uuid.uuid4().hex).with_format("torch")


class SeparateBlocks:
    """Blocks of different lengths, each of one document; those of a batch are padded on the right to its longest.

    There is no attention mask: a causal model never looks to the right, so that padding changes no logit that is
    scored.
    """

    def __init__(self, blocks: Sequence[np.ndarray], pad_token_id: int, sequence_length: int) -> None:
        self.blocks, self.pad_token_id, self.sequence_length = blocks, pad_token_id, sequence_length

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `labels`, int64 (B, T), of the blocks with these indices."""
        return pad_blocks([self.blocks[index] for index in indices], self.pad_token_id, self.sequence_length)


def pad_blocks(
    blocks: Sequence[np.ndarray], pad_token_id: int, longest: int | None, labels: Sequence[np.ndarray] | None = None
) -> dict[str, torch.Tensor]:
    """Returns `input_ids` and `labels`, int64 (B, T), of blocks padded on the right: labels of padding are ignored.

    T is the length of the longest block, rounded up to a multiple of 8 but not beyond `longest`. Without `labels`,
    every token has one.
    """
    width = max(len(block) for block in blocks)
    width += -width % _MULTIPLE
    shape = (len(blocks), width if longest is None else min(width, longest))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    targets = torch.full(shape, IGNORED, dtype=torch.int64)
    for row, (block, labelled) in enumerate(zip(blocks, blocks if labels is None else labels)):
        input_ids[row, : len(block)] = torch.from_numpy(block)
        targets[row, : len(block)] = torch.from_numpy(labelled)
    return {"input_ids": input_ids, "labels": targets}


def blocks_sha256(blocks: "datasets.Dataset | SeparateBlocks") -> str:
    """Returns a fingerprint of the tokens of blocks, in order."""
    digest = hashlib.sha256()
    if isinstance(blocks, SeparateBlocks):
        for block in blocks.blocks:
            # Its length too: joined, other blocks could be the same.
            digest.update(len(block).to_bytes(8, "little") + block.tobytes())
    else:
        for part in blocks.with_format("numpy").iter(batch_size=1024):
            digest.update(part["input_ids"].tobytes())
    return digest.hexdigest()


class ShuffledBatches:
    """The global batch of every training step: a function of the seed and the step alone.

    Each epoch visits every block once, in its own order. The order depends neither on the number of processes nor on
    accumulation, so that any split of the same global batch trains the same model, and a resumed run continues exactly.
    """

    def __init__(self, blocks: Any, batch_size: int, seed: int) -> None:
        self.blocks, self.batch_size, self.seed = blocks, batch_size, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        """Returns the rows of step `step`, counted from 0."""
        first = step * self.batch_size
        return self.blocks[[self._index(place) for place in range(first, first + self.batch_size)]]

    def _index(self, place: int) -> int:
        epoch, offset = divmod(place, len(self.blocks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))
        return int(self._order[offset])


def endless_blocks(
    documents: Any, tokenizer: PreTrainedTokenizerBase, sequence_length: int, pack: str = "concat"
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the blocks of a stream, from its beginning again when it ends; raises ValueError if it holds none."""
    for epoch in count():
        documents.set_epoch(epoch)
        block = None
        for block in iterate_blocks(documents, tokenizer, sequence_length, pack):
            yield block
        if block is None:
            raise ValueError(f"sequence_length={sequence_length!r} is not valid: the stream holds fewer tokens.")


class StreamedBatches:
    """The global batch of every training step, read from a stream; documents are shuffled in a buffer.

    Steps are asked for in order. A resumed run reads the stream again from its start up to where it was: exact, at the
    price of reading. Every process reads the whole stream and keeps its share.
    """

    def __init__(
        self,
        documents: datasets.IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sequence_length: int,
        pack: str,
        batch_size: int,
        seed: int,
        shuffle_buffer: int,
    ) -> None:
        self.batch_size, self._step = batch_size, 0
        self._pad = (tokenizer.pad_token_id, sequence_length) if pack == "separate" else None
        shuffled = documents.shuffle(seed=seed, buffer_size=shuffle_buffer) if shuffle_buffer > 1 else documents
        self._blocks = endless_blocks(shuffled, tokenizer, sequence_length, pack)

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        """Returns the rows of step `step`, counted from 0; steps before it are skipped."""
        if step < self._step:
            raise ValueError(f"step={step!r} is not valid: the stream is already at step {self._step}.")
        for _ in islice(self._blocks, (step - self._step) * self.batch_size):
            pass
        self._step = step + 1
        blocks = list(islice(self._blocks, self.batch_size))
        if self._pad is not None:
            return pad_blocks([block["input_ids"] for block in blocks], *self._pad)
        return {name: torch.from_numpy(np.stack([block[name] for block in blocks])).long() for name in blocks[0]}


def add_labels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adds `labels` (the model shifts them): the tokens, without a packed document's first, which nothing precedes.

    A batch that has labels keeps them.
    """
    if "labels" in batch:
        return batch
    labels = batch["input_ids"]
    if "position_ids" in batch:
        labels = labels.masked_fill(batch["position_ids"] == 0, IGNORED)
    return {**batch, "labels": labels}
