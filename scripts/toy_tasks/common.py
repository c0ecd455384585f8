"""What all toy tasks share: checked parameters, samples that are a function of a seed, builders and tokenizers.

A task is described by its configuration, which draws samples; its builder makes data sets of them. A sample is a
sequence of symbols, and says which of them are answers: those that the symbols before them determine, and that are
scored.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import datasets
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from whatwhere.position_base import suggest

from ..checks import Checked, Count, NotNegative, checked_fields, parse
from ..data.tokenize import END_OF_TEXT, PADDING

UNKNOWN = "<|unknown|>"
# Part of every sample's seed: splits never share a stream of random numbers.
SPLITS = {"train": 0, "validation": 1, "test": 2}


@dataclasses.dataclass(kw_only=True, eq=False)
class SampleConfig(datasets.BuilderConfig):
    """The parameters that decide a set of samples.

    Args:
        seed: with the split and the index of a sample, decides the sample.
        train_samples: the size of the training split of the builder's data set.
        validation_samples: the size of the validation split.
        test_samples: the size of the test split.

    Raises:
        ValueError: a parameter is of the wrong type or out of range.
    """

    seed: NotNegative = 0
    train_samples: Count = 10_000
    validation_samples: Count = 1_000
    test_samples: Count = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    def check(self) -> None:
        """Checks every parameter; raises ValueError."""
        cls: Any = type(self)
        parse(_checked(cls), {field.name: getattr(self, field.name) for field in own_fields(cls)})
        self.validate()

    def validate(self) -> None:
        """Checks the parameters against each other; raises ValueError."""

    def test_sets(self) -> dict[str, dict[str, Any]]:
        """The sets on which the paper tests a model that was trained with these parameters.

        Returns:
            for each set, by name, the parameters in which it differs.
        """
        raise NotImplementedError

    def draw(self, random: np.random.Generator) -> Any:
        """Draws one sample."""
        raise NotImplementedError

    def sample(self, split: str, index: int) -> Any:
        """Returns a sample, which its split, its index, the seed and the other parameters determine.

        Args:
            split: `train`, `validation` or `test`.
            index: any integer from 0 on; no split has an end.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is not valid. {suggest(split, SPLITS)}")
        if index < 0:
            raise ValueError(f"index={index!r} is not valid: it must be at least 0.")
        return self.draw(np.random.default_rng([self.seed, SPLITS[split], index]))

    def row(self, sample: Any) -> dict[str, Any]:
        """Returns a sample as the builder's data sets hold it."""
        raise NotImplementedError

    def features(self) -> dict[str, Any]:
        """Returns the features of the builder's data sets: those of a row."""
        raise NotImplementedError


class Sample(NamedTuple):
    """One sequence: `symbols`, int64 (T), indices into the task's `symbols`; and `answers`, bool (T)."""

    symbols: np.ndarray
    answers: np.ndarray


@dataclasses.dataclass(kw_only=True, eq=False)
class TaskConfig(SampleConfig):
    """The parameters of a task whose samples are sequences of symbols, on which models are trained."""

    # Between two symbols in the text of a sample.
    separator: ClassVar[str] = ""
    # Whether samples may be longer than a training block; what does not fit is then cut off on the left.
    may_be_cut: ClassVar[bool] = False

    @property
    def symbols(self) -> tuple[str, ...]:
        """All symbols of the task with these parameters; samples hold indices into them."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """The largest number of symbols in a sample."""
        raise NotImplementedError

    def text(self, symbols: np.ndarray) -> str:
        """Returns the text of a sequence of symbols."""
        names = self.symbols
        return self.separator.join(names[symbol] for symbol in symbols.tolist())

    def row(self, sample: Sample) -> dict[str, Any]:
        """Returns a sample as the builders' data sets hold it.

        Returns:
            `text`; `tokens`, its symbols; `scored`, for each of them whether it is an answer; `answer`, the text of the
            last run of answers, and `prompt`, the text before it.
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

    def features(self) -> dict[str, Any]:
        text = datasets.Value("string")
        tokens = {"tokens": datasets.List(text), "scored": datasets.List(datasets.Value("bool"))}
        return {"text": text, "prompt": text, "answer": text, **tokens}


def own_fields(cls: type[SampleConfig]) -> list[dataclasses.Field]:
    """Returns the fields of a configuration without those that every builder's configuration has."""
    inherited = {field.name for field in dataclasses.fields(datasets.BuilderConfig)}
    return [field for field in dataclasses.fields(cls) if field.name not in inherited]


@functools.cache
def _checked(cls: Any) -> type[Checked]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return checked_fields(cls.__name__, {field.name: hints[field.name] for field in own_fields(cls)})


def check_names(cls: type[SampleConfig], parameters: Mapping[str, Any]) -> None:
    """Raises ValueError if a configuration does not have one of the parameters."""
    names = [field.name for field in own_fields(cls)]
    for name, value in parameters.items():
        if name not in names:
            raise ValueError(f"unknown parameter {name!r} (given: {value!r}). {suggest(name, names)}")


def shape(config: TaskConfig) -> dict[str, Any]:
    """Returns the parameters that decide what samples look like: all but the seed and the sizes of the splits."""
    others = {field.name for field in own_fields(SampleConfig)}
    return {field.name: getattr(config, field.name) for field in own_fields(type(config)) if field.name not in others}


class TaskBuilder(datasets.GeneratorBasedBuilder):
    """Base of the tasks' builders.

    Args:
        config_name: one of the task's named configurations; by default the first.
        cache_dir: where `download_and_prepare` writes; by default the cache of `datasets`.
        parameters: those in which the data set differs from the named configuration.

    Raises:
        ValueError: a parameter is unknown, of the wrong type or out of range.
    """

    # Part of the place in the cache: goes up when the same parameters and seed give other samples.
    VERSION = datasets.Version("1.0.0")
    # The named configurations: the parameters of each; by default the test sets of the paper.
    SETS: ClassVar[Mapping[str, dict[str, Any]] | None] = None
    DEFAULT_CONFIG_NAME = "in_distribution"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        make = cls.BUILDER_CONFIG_CLASS
        sets = make().test_sets() if cls.SETS is None else cls.SETS
        cls.BUILDER_CONFIGS = [make(name=name, version=cls.VERSION, **changes) for name, changes in sets.items()]

    def __init__(self, config_name: str | None = None, cache_dir: str | None = None, **parameters: Any) -> None:
        check_names(self.BUILDER_CONFIG_CLASS, parameters)
        for name, value in parameters.items():
            # `datasets` would leave it out.
            if value is None:
                raise ValueError(f"{name}={value!r} is not valid: leave it out for its default.")
        super().__init__(config_name=config_name, cache_dir=cache_dir, **parameters)
        # `datasets` sets parameters on a copy of the named configuration.
        self.config.check()

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description=(type(self.config).__doc__ or "").split("\n")[0],
            features=datasets.Features(self.config.features()),
        )

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        return [
            datasets.SplitGenerator(
                name=split, gen_kwargs={"split": split, "count": getattr(self.config, f"{split}_samples")}
            )
            for split in SPLITS
        ]

    def _generate_examples(self, split: str, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in range(count):
            yield index, self.config.row(self.config.sample(split, index))


def build_tokenizer(config: TaskConfig) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of a task: one token a symbol, then the special ones.

    Token i is symbol i of `config.symbols`. `decode(encode(text)) == text` for the text of any sample.
    """
    symbols = config.symbols
    vocabulary = {token: index for index, token in enumerate([*symbols, END_OF_TEXT, PADDING, UNKNOWN])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    if config.separator:
        # Tokens are joined with spaces where there is no decoder.
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        # The longest symbols first: one may begin with another. Anything else is unknown, character by character.
        pattern = "|".join(re.escape(symbol) for symbol in sorted(symbols, key=len, reverse=True))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{pattern}|[\s\S]"), behavior="isolated")
        backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
