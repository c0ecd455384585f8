"""Samples of toy tasks as model inputs, padded and with labels."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..data.pack import IGNORED, pad_blocks
from .common import TaskConfig


class TaskSamples:
    """Samples of one split of a task, as model inputs; see `pad_blocks`.

    Args:
        count: the number of samples; None for an endless stream.
        block: the maximum number of tokens; longer samples are truncated on the left. None for no limit.
        loss: `answer` sets labels for answers only, `all` for every token.
        keep: samples are generated once.
    """

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: PreTrainedTokenizerBase,
        split: str,
        *,
        count: int | None = None,
        block: int | None = None,
        loss: str = "answer",
        keep: bool = False,
    ) -> None:
        self.config, self.split, self.count, self.block = config, split, count, block
        self.answers_only, self.pad = loss == "answer", tokenizer.pad_token_id
        vocabulary = tokenizer.get_vocab()
        if unknown := [symbol for symbol in config.symbols if symbol not in vocabulary]:
            raise ValueError(f"the tokenizer does not know these symbols of the task: {', '.join(map(repr, unknown))}.")
        self._ids = np.array([vocabulary[symbol] for symbol in config.symbols], dtype=np.int64)
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] | None = {} if keep else None

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("a stream of samples has no length")
        return self.count

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of one sample and its labels, both int64 (T) and without padding."""
        if self._kept is not None and index in self._kept:
            return self._kept[index]
        symbols, answers = self.config.sample(self.split, index)
        if self.block is not None:
            symbols, answers = symbols[-self.block :], answers[-self.block :]
        ids = self._ids[symbols]
        row = ids, np.where(answers, ids, IGNORED) if self.answers_only else ids
        if self._kept is not None:
            self._kept[index] = row
        return row

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `labels`, int64 (B, T), of the samples with these indices."""
        ids, labels = zip(*map(self.row, indices))
        return pad_blocks(ids, self.pad, self.block, labels)
