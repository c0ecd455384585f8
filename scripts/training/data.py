"""The data of a run: tokenizer, training batches and held-out data."""

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.pack import MixedBatches, ShuffledBatches
from ..data.prepared import MixedBlocks, TextBlocks, prepare, prepare_tokenizer
from ..data.source import TextSource, find_files, held_out_files, load_text
from ..data.stream import StreamedBatches, first_rows
from ..data.tokenize import WORD_TOKENIZERS, about_changes, build_tokenizer, check_bytes
from ..processes import is_first_process
from ..toy_tasks.common import build_tokenizer as build_task_tokenizer
from ..toy_tasks.samples import TaskSamples
from .recipe import RunSettings


@dataclasses.dataclass
class TrainingData:
    """The data of a run.

    Attributes:
        batches: see `ShuffledBatches`, and for a stream `StreamedBatches`.
        held_out: blocks or samples by the name of their split.
        splits_sha256: a fingerprint of each split, checked when a run is resumed; None for a stream.
        unit: of progress: `tokens`, `sequences` (of different lengths) or `samples` of a toy task.
        texts: the rows of each held-out split, of each text of a mixture; of a stream, those that are in `held_out`.
    """

    tokenizer: PreTrainedTokenizerBase
    batches: Any
    held_out: dict[str, Any]
    splits_sha256: dict[str, str | None]
    unit: str = "tokens"
    texts: dict[str, list[Any]] = dataclasses.field(default_factory=dict)


def load_data(recipe: RunSettings, data_dir: Any = None, *, processes: int | None = None) -> TrainingData:
    """Reads and tokenises the data of a recipe."""
    return _load_task(recipe) if recipe.data.source == "task" else _load_text(recipe, data_dir, processes)


def _load_text(recipe: RunSettings, data_dir: Any, processes: int | None) -> TrainingData:
    data, evaluation = recipe.data, recipe.evaluation

    def each(read: Callable[[TextSource], Any]) -> Iterator[Any]:
        for index, text in enumerate(data.texts()):
            try:
                yield read(text)
            except ValueError as error:
                raise ValueError(f"mixture[{index}].{error}" if data.mixture else str(error)) from error

    # What is held out of one text of a mixture is not in the training part of another.
    files = each(lambda text: find_files(text, data_dir) if text.source == "local" else {})
    not_trained = [file for found in files for file in held_out_files(found)]
    texts = list(each(lambda text: load_text(text, data_dir=data_dir, held_out=not_trained)))
    # The tokenizer is `bpe`.
    if data.vocab_size is not None:
        tokenizer = prepare_tokenizer([text["train"] for text in texts], data.vocab_size)
    else:
        tokenizer = build_tokenizer(data.tokenizer)
    measure = data.tokenizer not in WORD_TOKENIZERS
    if measure:
        try:
            check_bytes(tokenizer)
        except ValueError as error:
            measure = False
            _say(str(error))
    limit = max(evaluation.blocks, evaluation.final_blocks) if evaluation.blocks and evaluation.final_blocks else None
    form: dict[str, Any] = {"sequence_length": data.sequence_length, "pack": data.pack}
    weights = data.weights()
    rows_of: dict[str, list[Any]] = {}

    def blocks(split: str, limit: int | None) -> TextBlocks:
        """Returns the blocks of all texts; of a limited number, each text has its share."""
        parts = []
        for index, (text, weight) in enumerate(zip(texts, weights)):
            name = f"the {split} split" + (f" of mixture[{index}]" if data.mixture else "")
            some = None if limit is None else math.ceil(limit * weight)
            rows = text[split]
            if data.streaming and some is not None:
                rows = first_rows(rows, tokenizer, **form, blocks=some)
            rows_of.setdefault(split, []).append(rows)
            prepared = prepare(rows, tokenizer, name=name, processes=processes, measure=measure and split != "train")
            if prepared.changed:
                _say(f"{name}: {about_changes(prepared.changed, prepared.documents)}")
            parts.append(TextBlocks(prepared, **form, pad_token_id=tokenizer.pad_token_id, limit=some, name=name))
        return MixedBlocks(parts) if data.mixture else parts[0]

    common = [split for split in texts[0] if split != "train" and all(split in text for text in texts)]
    held_out = {split: blocks(split, limit) for split in common}
    batches: ShuffledBatches | StreamedBatches
    sha256: dict[str, str | None] = {"train": None}
    options: dict[str, Any] = {"batch_size": recipe.training.batch_size, "seed": recipe.seed}
    if data.streaming:
        options |= {"shuffle_buffer": data.shuffle_buffer, "weights": weights}
        batches = StreamedBatches([text["train"] for text in texts], tokenizer, **form, **options)
    else:
        train = blocks("train", None)
        batches = MixedBatches(train, **options, weights=weights) if data.mixture else ShuffledBatches(train, **options)
        sha256["train"] = train.sha256
    return TrainingData(
        tokenizer=tokenizer,
        batches=batches,
        held_out=held_out,
        splits_sha256={**sha256, **{split: some.sha256 for split, some in held_out.items()}},
        unit="sequences" if data.pack == "separate" else "tokens",
        texts=rows_of,
    )


def _say(text: str) -> None:
    if is_first_process():
        print(text, file=sys.stderr)


def _load_task(recipe: RunSettings) -> TrainingData:
    data = recipe.data
    config = data.task_config(seed=recipe.seed)
    tokenizer = build_task_tokenizer(config)
    block = data.sequence_length if config.may_be_cut else None
    loss, keep = data.loss or "answer", data.train_samples is not None
    train = TaskSamples(config, tokenizer, "train", count=data.train_samples, block=block, loss=loss, keep=keep)
    # Validation and test samples do not depend on the seed of the run.
    same = data.task_config()
    validation = TaskSamples(same, tokenizer, "validation", count=same.validation_samples, block=block, keep=True)
    held_out = {"validation": validation}
    for name in data.test_sets or {}:
        tested = data.task_config(test_set=name)
        held_out[f"test set {name}"] = TaskSamples(tested, tokenizer, "test", count=tested.test_samples, block=block)
    sha256: dict[str, str | None] = {}
    # Samples are generated on the fly. The first ones are the fingerprint for resuming.
    for split, drawn in {"train": train, **held_out}.items():
        digest = hashlib.sha256(json.dumps(drawn.config.symbols).encode())
        for index in range(8 if drawn.count is None else min(8, drawn.count)):
            digest.update(drawn.row(index)[0].tobytes())
        sha256[split] = digest.hexdigest()
    batches = ShuffledBatches(train, recipe.training.batch_size, None if data.train_samples is None else recipe.seed)
    return TrainingData(tokenizer=tokenizer, batches=batches, held_out=held_out, splits_sha256=sha256, unit="samples")
