"""Batches of toy tasks' samples: padded, labelled, and a function of the seed and the step alone."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..tasks.common import TaskConfig
from .pack import IGNORED

# Widths of batches are multiples of this: fewer shapes for kernels to be tuned and compiled for.
_MULTIPLE = 8


class TaskSamples:
    """Samples of one split of a task, as a model takes them.

    Samples are padded on the right to the longest one of a batch. There is no attention mask: a causal model never
    looks to the right, so that padding cannot change a logit that is scored.

    Args:
        config: the task.
        tokenizer: that of the model, which knows every symbol of the task.
        split: `train`, `validation` or `test`.
        count: the number of samples; None for a stream without an end.
        block: the largest number of tokens, of which the last ones stay; None for all.
        loss: `answer` gives labels to answers only, `all` to every token.
        keep: whether samples are kept in memory once they have been drawn.

    Raises:
        ValueError: the tokenizer does not know a symbol of the task.
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
        rows = [self.row(index) for index in indices]
        width = max(len(ids) for ids, _ in rows)
        width += -width % _MULTIPLE
        if self.block is not None:
            width = min(width, self.block)
        input_ids = np.full((len(rows), width), self.pad, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
        for place, (ids, targets) in enumerate(rows):
            input_ids[place, : len(ids)] = ids
            labels[place, : len(ids)] = targets
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


class TaskBatches:
    """The global batch of every training step.

    From a stream, each step takes the samples that follow those of the step before. Of a number of samples, each epoch
    visits all of them, in its own order.
    """

    def __init__(self, samples: TaskSamples, batch_size: int, seed: int) -> None:
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        """Returns the rows of step `step`, counted from 0."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        if self.samples.count is None:
            return self.samples[places]
        return self.samples[[self._index(place, self.samples.count) for place in places]]

    def _index(self, place: int, count: int) -> int:
        epoch, offset = divmod(place, count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(count)
        return int(self._order[offset])
