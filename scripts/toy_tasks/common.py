"""Base classes of toy tasks: validated parameters, samples determined by a seed, data sets and tokenizers.

A task's configuration draws samples. A sample is a sequence of symbols, some of which are answers: they are determined
by the symbols before them, and are scored.
"""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import datasets
import numpy as np
from transformers import PreTrainedTokenizerFast

from ..checks import Checked, Count, NotNegative
from ..data.tokenize import END_OF_TEXT, PADDING, word_tokenizer
from ..progress import without_bars

UNKNOWN = "<|unknown|>"
# Part of every sample's seed, so that splits have independent random numbers.
SPLITS = {"train": 0, "validation": 1, "test": 2}


class SampleConfig(Checked):
    """The parameters of a set of samples.

    Attributes:
        seed: with the split and the index, determines a sample.
    """

    seed: NotNegative = 0
    train_samples: Count = 10_000
    validation_samples: Count = 1_000
    test_samples: Count = 1_000

    def test_sets(self) -> dict[str, dict[str, Any]]:
        """Returns the paper's test sets for a model trained with these parameters: by name, the changed parameters."""
        raise NotImplementedError

    def draw(self, random: np.random.Generator) -> Any:
        """Draws one sample."""
        raise NotImplementedError

    def sample(self, split: str, index: int) -> Any:
        """Returns a sample, determined by split, index, seed and the other parameters."""
        return self.draw(np.random.default_rng([self.seed, SPLITS[split], index]))

    def row(self, sample: Any) -> dict[str, Any]:
        """Returns a sample as a row of a data set."""
        raise NotImplementedError

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yields the rows of a split."""
        for index in range(getattr(self, f"{split}_samples")):
            yield self.row(self.sample(split, index))


class Sample(NamedTuple):
    """One sequence: `symbols`, int64 (T), indices into the task's `symbols`; and `answers`, bool (T)."""

    symbols: np.ndarray
    answers: np.ndarray


class TaskConfig(SampleConfig):
    """The parameters of a task whose samples are sequences of symbols, on which models are trained."""

    # Separator of symbols in the text of a sample.
    separator: ClassVar[str] = ""
    # Whether samples may be longer than a training block, and are then truncated on the left.
    may_be_cut: ClassVar[bool] = False

    @property
    def symbols(self) -> tuple[str, ...]:
        """All symbols of the task with these parameters; samples contain indices into them."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """The maximum number of symbols in a sample."""
        raise NotImplementedError

    def text(self, symbols: np.ndarray) -> str:
        """Returns the text of a sequence of symbols."""
        names = self.symbols
        return self.separator.join(names[symbol] for symbol in symbols.tolist())

    def row(self, sample: Sample) -> dict[str, Any]:
        """Returns a sample as a row of a data set.

        Returns:
            `text`; `tokens` (its symbols); `scored` (whether each symbol is an answer); `answer` (the text of the last
            run of answers) and `prompt` (the text before it).
        """
        symbols, answers = sample
        end = int(np.flatnonzero(answers)[-1]) + 1
        start = int(np.flatnonzero(~answers[:end])[-1]) + 1
        names = self.symbols
        return {
            "text": self.text(symbols),
            "prompt": self.text(symbols[:start]),
            "answer": self.text(symbols[start:end]),
            "tokens": [names[symbol] for symbol in symbols.tolist()],
            "scored": answers.tolist(),
        }


def shape(config: TaskConfig) -> dict[str, Any]:
    """Returns the parameters of the samples: all except the seed and the sizes of the splits."""
    return config.model_dump(exclude=set(SampleConfig.model_fields))


def build_dataset(
    config: SampleConfig, split: str, *, streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """Returns a split of a task as a data set of `datasets`, generated on the fly with `streaming`."""
    cls = datasets.IterableDataset if streaming else datasets.Dataset
    with without_bars():
        return cls.from_generator(config.rows, gen_kwargs={"split": split})


def build_tokenizer(config: TaskConfig) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of a task: a token per symbol, then the special tokens.

    Token i is symbol i of `config.symbols`. `decode(encode(text)) == text` for the text of any sample.
    """
    # Longest symbols first, since one may be the beginning of another. Other characters are unknown tokens.
    symbols = map(re.escape, sorted(config.symbols, key=len, reverse=True))
    pattern = None if config.separator else "|".join([*symbols, r"[\s\S]"])
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING, "unk_token": UNKNOWN}
    return word_tokenizer([*config.symbols, END_OF_TEXT, PADDING, UNKNOWN], pattern, **special)
