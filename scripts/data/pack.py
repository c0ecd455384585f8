"""Blocks for training: of fixed length from joined documents, or padded blocks of single documents."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from .tokenize import tokenize_pieces

IGNORED = -100

# Widths of padded batches are multiples of this, to limit the number of shapes that kernels are tuned for.
_MULTIPLE = 8


class Packer:
    """Cuts the tokens of documents into blocks; the rest is kept for the next documents.

    Args:
        pack: `concat` yields only `input_ids`, and attention crosses documents. `documents` also yields `position_ids`
            that restart at 0 with each document and each block; Transformers derives a mask from them that separates
            documents. Both join all documents. `separate` cuts each document into blocks, the last of which may be
            shorter (int32 (T), T from 2 to `sequence_length`); a remainder of one token is dropped, because it cannot
            be predicted from another token.
        rest: of another packer, to continue its work.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        pack: str,
        rest: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.tokenizer, self.sequence_length, self.pack = tokenizer, sequence_length, pack
        rest = rest or {}
        self._ids = np.array(rest.get("input_ids", ()), dtype=np.int32)
        # Position of each token in its document, for pack="documents" only.
        self._positions = np.array(rest.get("position_ids", ()), dtype=np.int32)

    def rest(self) -> dict[str, list[int]]:
        """Returns the tokens that are not in a block yet."""
        return {"input_ids": self._ids.tolist(), "position_ids": self._positions.tolist()}

    def __call__(self, documents: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, np.ndarray]]:
        """Yields the blocks up to the end of these documents; rows as in `tokenize_pieces`."""
        position, length = 0, self.sequence_length
        for piece, last in tokenize_pieces(self.tokenizer, documents):
            ids, positions = np.concatenate([self._ids, piece]), self._positions
            if self.pack == "documents":
                positions = np.concatenate([positions, np.arange(position, position + len(piece), dtype=np.int32)])
                position = 0 if last else position + len(piece)
            whole = len(ids) - len(ids) % length
            self._ids, self._positions = ids[whole:], positions[whole:]
            for start in range(0, whole, length):
                block = {"input_ids": ids[start : start + length]}
                if self.pack == "documents":
                    position_ids = positions[start : start + length].copy()
                    # The rest of a document from the previous block restarts at 0.
                    position_ids[np.cumsum(position_ids == 0) == 0] -= position_ids[0]
                    block["position_ids"] = position_ids
                yield block
            if self.pack == "separate" and last:
                ids, self._ids = self._ids, self._ids[:0]
                if len(ids) > 1:
                    yield {"input_ids": ids}


def pad_blocks(
    blocks: Sequence[np.ndarray], pad_token_id: int, longest: int | None, labels: Sequence[np.ndarray] | None = None
) -> dict[str, torch.Tensor]:
    """Returns `input_ids` and `labels`, int64 (B, T), of blocks padded on the right; labels of padding are ignored.

    T is the length of the longest block, rounded up to a multiple of 8, at most `longest`. The default of `labels` is
    all tokens. There is no attention mask, since padding on the right does not affect the scored logits of a causal
    model.
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


def batch_of(
    blocks: Sequence[Mapping[str, np.ndarray]], pack: str, pad_token_id: int | None, longest: int
) -> dict[str, torch.Tensor]:
    """Returns blocks as int64 (B, T); those of pack="separate" are padded and have labels."""
    if pack == "separate":
        batch = pad_blocks([block["input_ids"] for block in blocks], pad_token_id or 0, longest)
        if "bytes" in blocks[0]:
            batch["bytes"] = pad_blocks([block["bytes"] for block in blocks], 0, longest)["input_ids"]
        return batch
    return {name: torch.from_numpy(np.stack([block[name] for block in blocks])).long() for name in blocks[0]}


class ShuffledBatches:
    """The global batch of every training step, determined by the seed and the step.

    Each epoch visits every block once, in a new order; with seed None, the blocks are endless and are visited in order.
    The order does not depend on the number of processes or on accumulation, so that any division of the global batch
    trains the same model, and a resumed run continues exactly.
    """

    def __init__(self, blocks: Any, batch_size: int, seed: int | None) -> None:
        self.blocks, self.batch_size, self.seed = blocks, batch_size, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __call__(self, step: int, share: tuple[int, int] = (0, 1)) -> dict[str, torch.Tensor]:
        """Returns the batch of a step, counted from 0, with labels; with `share` (i, n) the i-th of n equal parts."""
        first, stop = (step * self.batch_size + part * self.batch_size // share[1] for part in (share[0], share[0] + 1))
        return add_labels(self.blocks[[self._index(place) for place in range(first, stop)]])

    def loader(
        self, share: tuple[int, int], steps: range, *, workers: int = 0, pin_memory: bool = False
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Returns an iterator over a process's share of the batches of `steps`, read ahead of time."""
        dataset: Any = steps
        # With a generator: otherwise, `DataLoader` draws a random number of the training's.
        options: dict[str, Any] = {"pin_memory": pin_memory, "generator": torch.Generator()}
        options["collate_fn"] = functools.partial(self, share=share)
        return iter(DataLoader(dataset, batch_size=None, num_workers=workers, **options))

    def _index(self, place: int) -> int:
        if self.seed is None:
            return place
        epoch, offset = divmod(place, len(self.blocks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))
        return int(self._order[offset])


class MixedBatches(ShuffledBatches):
    """The global batch of every training step of a mixture of texts, determined by the seed and the step.

    Of every `PAGE` blocks, each text has its share, in an order that is drawn for these blocks. The blocks of each text
    are visited as in `ShuffledBatches`, again and again.
    """

    PAGE = 1 << 16

    def __init__(self, blocks: Any, batch_size: int, seed: int, weights: Sequence[float]) -> None:
        """Takes `MixedBlocks`, and the share of each of its parts; every part has at least one block of a page."""
        super().__init__(blocks, batch_size, seed)
        self._parts = [ShuffledBatches(part, batch_size, seed) for part in blocks.parts]
        bounds = np.round(np.cumsum(weights) / np.sum(weights) * self.PAGE).astype(np.int64)
        self._counts = np.maximum(1, np.diff(bounds, prepend=0))
        self._page, self._drawn, self._ranks = -1, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)

    def _index(self, place: int) -> int:
        page, slot = divmod(place, int(self._counts.sum()))
        if page != self._page:
            drawn = np.random.default_rng([int(self.seed or 0), page, 1]).permutation(
                np.repeat(np.arange(len(self._counts)), self._counts)
            )
            # The number of blocks of the same part before each one.
            ranks = np.empty_like(drawn)
            for part, count in enumerate(self._counts):
                ranks[drawn == part] = np.arange(count)
            self._page, self._drawn, self._ranks = page, drawn, ranks
        part = int(self._drawn[slot])
        within = self._parts[part]._index(page * int(self._counts[part]) + int(self._ranks[slot]))
        return int(self.blocks.starts[part]) + within


def add_labels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adds `labels` (unshifted), if there are none: the tokens, except the first token of each packed document."""
    if "labels" in batch:
        return batch
    labels = batch["input_ids"]
    if "position_ids" in batch:
        labels = labels.masked_fill(batch["position_ids"] == 0, IGNORED)
    return {**batch, "labels": labels}
