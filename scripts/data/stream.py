"""Streams: documents that are read, tokenised and packed while training, with an exact state.

A stream is divided into parts, one for each worker process of each process that trains. A part has its own files if
they can be divided evenly, or else every n-th document. It is read in windows of `shuffle_buffer` documents, which are
shuffled one after the other. Its state is that of the documents where the window begins
(`datasets.IterableDataset.state_dict`), the tokens left over from the window before, and the number of blocks since: to
resume, one window is read again, and of the current file what is before it.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import fsspec.asyn
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from datasets.iterable_dataset import SkipExamplesIterable, TakeExamplesIterable
from torch.utils.data import DataLoader, get_worker_info
from transformers import PreTrainedTokenizerBase

from .pack import Packer, add_labels, batch_of
from .rows import on_disk, readable
from .tokenize import single_threaded, text_of


def first_rows(
    rows: datasets.IterableDataset, tokenizer: PreTrainedTokenizerBase, sequence_length: int, pack: str, blocks: int
) -> datasets.Dataset:
    """Returns a table of the first documents of a stream, as many as fill this number of blocks, or all."""
    packer = Packer(tokenizer, sequence_length, pack)

    def texts() -> Iterator[str]:
        missing = blocks
        for row in readable(rows):
            yield text_of(row)
            missing -= sum(1 for _ in packer([row]))
            if missing <= 0:
                return

    return on_disk(texts())


class StreamedBlocks:
    """The blocks of a part of a stream, again from its start after the last one; `form` is that of `Packer`.

    Attributes:
        state: where `__iter__` begins, and then is: the beginning of the window, as JSON because it is sent with every
            batch and changes with the window only, and the number of blocks since.
    """

    def __init__(
        self,
        rows: datasets.IterableDataset,
        form: tuple[PreTrainedTokenizerBase, int, str],
        seed: int,
        shuffle_buffer: int,
    ) -> None:
        self.rows, self.form, self.seed, self.shuffle_buffer = rows, form, seed, shuffle_buffer
        self.state: tuple[str, int] = json.dumps({"epoch": 0, "window": 0, "documents": None, "rest": {}}), 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        begun = json.loads(self.state[0])
        if begun["documents"] is not None:
            self.rows.load_state_dict(begun["documents"])
        while True:
            epoch, some = begun["epoch"], begun["window"] + self.state[1] > 0
            if self.shuffle_buffer > 1:
                # This decides the order of files; 0 is their order by name.
                self.rows.set_epoch(int(np.random.default_rng([self.seed, epoch]).integers(1, 1 << 31)))
            packer = Packer(*self.form, begun["rest"])
            # Unlike `iter(rows)`, `iter` does not divide the rows among workers once more.
            documents = (row["text"][0] for row in readable(self.rows.iter(batch_size=1)))
            while window := list(itertools.islice(documents, self.shuffle_buffer)):
                after, number = self.rows.state_dict(), begun["window"]
                order = np.random.default_rng([self.seed, epoch, number]).permutation(len(window))
                blocks = packer({"text": window[place]} for place in order)
                for block in itertools.islice(blocks, self.state[1], None):
                    some = True
                    self.state = self.state[0], self.state[1] + 1
                    yield block
                begun = {"epoch": epoch, "window": number + 1, "documents": after, "rest": packer.rest()}
                self.state = json.dumps(begun), 0
            if not some:
                raise ValueError(
                    f"sequence_length={self.form[1]!r} is not valid: a part of the stream, one for each worker of each "
                    "process, has fewer tokens. Give more text, fewer workers or streaming=False."
                )
            begun = {"epoch": epoch + 1, "window": 0, "documents": None, "rest": {}}
            self.state = json.dumps(begun), 0


class StreamedBatches(torch.utils.data.IterableDataset):
    """The share of a process of the batches of a stream, or of a mixture of streams with `weights`.

    The order depends on the number of processes and of workers. `batch_size` is the global one. `loader` returns the
    batches from the beginning, or from the state of `load_state_dict`.
    """

    def __init__(
        self,
        texts: Sequence[datasets.IterableDataset],
        tokenizer: PreTrainedTokenizerBase,
        *,
        sequence_length: int,
        pack: str,
        batch_size: int,
        seed: int,
        shuffle_buffer: int,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        self.texts, self.tokenizer, self.batch_size, self.seed = texts, tokenizer, batch_size, seed
        self.weights = np.array(weights) / np.sum(weights)
        self.form, self.shuffle_buffer = (tokenizer, sequence_length, pack), shuffle_buffer
        self._share: tuple[int, int] = (0, 1)
        # The state of each part of this process, and the part whose batch is next.
        self._states: list[Any] = []
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the place of this process after the last batch of `loader`; it is JSON."""
        return {"parts": list(self._states), "next": self._next}

    def load_state_dict(self, states: Sequence[dict[str, Any]], share: tuple[int, int]) -> None:
        """Sets the place of a process; `states` are those of all processes, in order, and `share` is as in `loader`."""
        if len(states) != share[1]:
            raise ValueError(
                f"streaming=True is not valid: the run's stream was read by {len(states)} processes, and cannot be "
                f"continued by {share[1]}, because the order of the text depends on their number. Continue with "
                f"{len(states)}, or train on prepared text (streaming=False, `whatwhere prepare`)."
            )
        self._states, self._next = states[share[0]]["parts"], states[share[0]]["next"]

    def loader(
        self, share: tuple[int, int] = (0, 1), *, workers: int = 0, pin_memory: bool = False
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Returns an iterator over the batches, with labels.

        `share` is (i, n) for the i-th of n processes that read different data. `workers` processes read ahead; with 0,
        this one reads.
        """
        self._share, parts = share, max(1, workers)
        self._states = self._states or [None] * parts
        if parts != len(self._states):
            raise ValueError(
                f"workers={workers!r} is not valid: the run's stream was read by {len(self._states)} in each process, "
                "and cannot be continued by another number."
            )
        # With a generator: otherwise, `DataLoader` draws a random number of the training's.
        options: dict[str, Any] = {"pin_memory": pin_memory, "generator": torch.Generator()}
        with single_threaded():
            return self._received(iter(DataLoader(self, batch_size=None, num_workers=workers, **options)))

    def _received(self, items: Iterator[Any]) -> Iterator[dict[str, torch.Tensor]]:
        for item in items:
            if isinstance(item, ValueError):
                raise item
            batch, part, self._states[part] = item
            self._next = (part + 1) % len(self._states)
            yield batch

    def __iter__(self) -> Iterator[Any]:
        """Yields batches of a part with its number and the state after each; an error is the last item."""
        worker = get_worker_info()
        workers = 1 if worker is None else worker.num_workers
        if worker is not None:
            # As `datasets` does in workers.
            fsspec.asyn.reset_lock()
        part = (self._next + (0 if worker is None else worker.id)) % workers
        place, places = self._share[0] * workers + part, self._share[1] * workers
        sources = [
            StreamedBlocks(_part(rows, place, places), self.form, self.seed, self.shuffle_buffer) for rows in self.texts
        ]
        batches = 0
        if self._states[part] is not None:
            batches, states = self._states[part]
            for source, state in zip(sources, states):
                source.state = tuple(state)
        iterators = [iter(source) for source in sources]
        first, stop = (self.batch_size * process // self._share[1] for process in (self._share[0], self._share[0] + 1))
        number = 0
        try:
            while True:
                random = np.random.default_rng([self.seed, place, batches])
                chosen = random.choice(len(sources), size=stop - first, p=self.weights)
                blocks = [next(iterators[number := int(one)]) for one in chosen]
                batches += 1
                batch = batch_of(blocks, self.form[2], self.tokenizer.pad_token_id, self.form[1])
                yield add_labels(batch), part, [batches, [one.state for one in sources]]
        except ValueError as error:
            yield ValueError(f"mixture[{number}]: {error}") if len(sources) > 1 else error


def _part(rows: datasets.IterableDataset, part: int, parts: int) -> datasets.IterableDataset:
    # skip() and take() are divided among files: documents that are held out from training would be in a part.
    inner, is_slice = rows._ex_iterable, False
    while inner is not None:
        is_slice = is_slice or isinstance(inner, (SkipExamplesIterable, TakeExamplesIterable))
        inner = getattr(inner, "ex_iterable", None)
    return split_dataset_by_node(rows, part, parts, strategy="examples" if is_slice else "auto")
