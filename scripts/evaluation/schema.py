"""What results files contain. They are checked when they are read; fields that are not listed here are allowed."""

import fnmatch
from typing import Any

import pydantic

from ..checks import Checked


class Stored(Checked):
    """Base of the contents of JSON files that this package wrote."""

    model_config = pydantic.ConfigDict(extra="allow")


class Origin(Stored):
    """The origin of measurements: see `results.provenance`."""

    command: str
    date: str
    versions: dict[str, str]


class Training(Origin):
    """`results.json` of a run: its held-out metrics, and what it was trained on.

    Attributes:
        bos: True if each document begins with a token of the tokenizer, such as BOS.
    """

    metrics: dict[str, Any]
    data: dict[str, Any]
    length: int | None = None
    recipe: dict[str, Any] | None = None
    unit: str | None = None
    bos: bool = False
    held_out: dict[str, Any] | None = None
    weights_sha256: str | None = None


class Curves(Stored):
    """`curves.json` of a card, see `curves.read_curves`."""

    training: list[dict[str, Any]]
    validation: list[dict[str, Any]]


class Sample(Stored):
    """`sample.json`, written with the first card of weights: how the model continues a prompt.

    Attributes:
        prompt: from the text that it was trained on.
        tokens: the largest number of new tokens, chosen greedily.
        text: the prompt and its continuation; for a toy task, the answer alone.
    """

    prompt: str
    tokens: int
    text: str


class Cell(Stored):
    """Results of one model in windows of one length. Measured fields are None if the model does not support the length.

    Attributes:
        multiple: length divided by the trained length.
        reached: whether the model supports sequences of this length; if not, `reason` says why.
        loss: mean negative log-likelihood per token, in nats.
        standard_error: of `loss`, a ratio estimate over `clusters` ("documents", or "windows" of a single text); None
            for fewer than two. `length_report.error` derives those of perplexity and bits per byte.
        bits_per_byte: negative log2-likelihood of the scored tokens over their bytes; None if the number of bytes per
            token is unknown.
        documents: texts with at least one window; `short_documents` are shorter than a window.
        dropped_tokens: tokens outside all windows, including those of short texts.
    """

    length: int
    multiple: float
    reached: bool
    reason: str | None = None
    bits_per_byte: float | None = None
    standard_error: float | None = None
    loss: float | None = None
    perplexity: float | None = None
    tokens: int | None = None
    bytes: int | None = None
    windows: int | None = None
    clusters: str | None = None
    documents: int | None = None
    short_documents: int | None = None
    dropped_tokens: int | None = None


class Measured(Stored):
    """One measurement: the cell, the loss by position (None if the length is not supported), and the model's size."""

    parameters: int
    cell: Cell
    by_position: dict[str, Any] | None


class LengthEntry(Stored):
    """A checkpoint, unchanged or with a variant, in windows of several lengths.

    Attributes:
        model_sha256: of the configuration, and of code that is loaded with the checkpoint; None in results of earlier
            versions.
        unit: of loss and perplexity, "byte" or "token"; None in results of earlier versions, where it is not known.
        bos: True if each document begins with a token of the tokenizer, such as BOS.
        trained_on: True if the checkpoint, or one that it was fine-tuned from, was trained on a part of the text.
    """

    name: str
    variant: str | None
    weights: str | None
    model_sha256: str | None = None
    trained_length: int
    tokens_sha256: str
    unit: str | None = None
    bos: bool = False
    trained_on: bool = False
    cells: list[Cell]
    by_position: list[dict[str, Any]]


class Lengths(Origin):
    """`length*.json`: what is scored, the measurements, and the origin of earlier ones.

    `bos_windows` in `data` is True if every window begins with BOS, else None.
    """

    data: dict[str, Any]
    checkpoints: list[LengthEntry]
    earlier: list[Origin] = []


class Score(Stored):
    """A metric of a task."""

    value: float
    standard_error: float | None


class TaskScores(Stored):
    """The scores of one lm-eval task or group."""

    metrics: dict[str, Score]
    samples: int


class ZeroShot(Origin):
    """`lm_eval.json`."""

    tasks: dict[str, TaskScores]


class Card(Stored):
    """`card.json`: where the weights of a card are, and whether a tokenizer is saved with them."""

    weights: str
    tokenizer: bool


class Table(Origin):
    """`results.json` of a table, see `reproduction.report.collect`."""

    table: str
    title: str
    small: bool
    cells: list[dict[str, Any]]


# By patterns of file names; the results files of a checkpoint come first, in the order of a card.
RESULT_FILES: dict[str, type[Stored]] = {
    "results.json": Training,
    "curves.json": Curves,
    "sample.json": Sample,
    "length.json": Lengths,
    "length_*.json": Lengths,
    "lm_eval.json": ZeroShot,
}


def schema_of(name: str, content: Any) -> type[Stored]:
    """Returns the class that describes the content of a file with this name."""
    if name == "results.json" and isinstance(content, dict) and "table" in content:
        return Table
    kinds: dict[str, type[Stored]] = {**RESULT_FILES, "card.json": Card}
    return next((kinds[pattern] for pattern in kinds if fnmatch.fnmatch(name, pattern)), Stored)
