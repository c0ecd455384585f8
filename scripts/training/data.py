"""The data of a run: tokenizer, training batches and held-out data."""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..data.corpus import load_text
from ..data.pack import ShuffledBatches, StreamedBatches, blocks_sha256, make_blocks
from ..data.prepared import TextBlocks, prepare, prepare_tokenizer
from ..data.samples import TaskSamples
from ..data.tokenize import WORD_TOKENIZERS, build_tokenizer, bytes_per_token
from ..toy_tasks.common import build_tokenizer as build_task_tokenizer
from .recipe import Recipe


@dataclasses.dataclass
class TrainingData:
    """The data of a run.

    Attributes:
        tokenizer: saved with the model.
        batches: returns the batch of a step, or a process's share of it: `input_ids`, and for some data `labels` or
            `position_ids`. See `ShuffledBatches`.
        held_out: blocks or samples by the name of their split.
        splits_sha256: a fingerprint of each split, checked when a run is resumed; None for a stream.
        unit: of progress: `tokens`, `sequences` (of different lengths) or `samples` of a toy task.
        bytes_per_token: for bits per byte; None for toy tasks and for symbols that are not text.
        note: a message to the user about the data; may be empty.
    """

    tokenizer: PreTrainedTokenizerBase
    batches: Callable[..., dict[str, torch.Tensor]]
    held_out: dict[str, Any]
    splits_sha256: dict[str, str | None]
    unit: str = "tokens"
    bytes_per_token: torch.Tensor | None = None
    note: str = ""


def load_data(recipe: Recipe, data_dir: Any = None, *, processes: int | None = None) -> TrainingData:
    """Reads and tokenises the data of a recipe.

    Args:
        recipe: see `load_recipe`.
        data_dir: the folder of local data.
        processes: that tokenise, see `prepare`.
    """
    return _load_task(recipe) if recipe.data.source == "task" else _load_text(recipe, data_dir, processes)


def _load_text(recipe: Recipe, data_dir: Any, processes: int | None) -> TrainingData:
    data, evaluation, batch_size = recipe.data, recipe.evaluation, recipe.training.batch_size
    corpus = load_text(data, data_dir=data_dir, pieces=True)
    if data.tokenizer == "bpe":
        tokenizer = prepare_tokenizer(corpus["train"], data.vocab_size)
    else:
        tokenizer = build_tokenizer(data.tokenizer)
    limit = max(evaluation.blocks, evaluation.final_blocks) if evaluation.blocks and evaluation.final_blocks else None
    form: dict[str, Any] = {"sequence_length": data.sequence_length, "pack": data.pack}

    def blocks(split: str, limit: int | None) -> Any:
        name = f"the {split} split"
        if data.streaming:
            return make_blocks(corpus[split], tokenizer, **form, limit=limit, name=name)
        text = prepare(corpus[split], tokenizer, name=name, processes=processes)
        return TextBlocks(text, **form, pad_token_id=tokenizer.pad_token_id, limit=limit, name=name)

    held_out: dict[str, Any] = {split: blocks(split, limit) for split in ("validation", "test") if split in corpus}
    batches: ShuffledBatches | StreamedBatches
    digest = blocks_sha256 if data.streaming else operator.attrgetter("text.sha256")
    sha256: dict[str, str | None] = {"train": None}
    if data.streaming:
        batches = StreamedBatches(
            corpus["train"],
            tokenizer,
            **form,
            batch_size=batch_size,
            seed=recipe.seed,
            shuffle_buffer=data.shuffle_buffer,
        )
    else:
        train = blocks("train", None)
        batches = ShuffledBatches(train, batch_size, recipe.seed)
        sha256["train"] = digest(train)
    own = data.train_file and not data.validation_file
    return TrainingData(
        tokenizer=tokenizer,
        batches=batches,
        held_out=held_out,
        splits_sha256={**sha256, **{split: digest(some) for split, some in held_out.items()}},
        unit="sequences" if data.pack == "separate" else "tokens",
        bytes_per_token=None if data.tokenizer in WORD_TOKENIZERS else bytes_per_token(tokenizer),
        note=corpus["validation"].info.description if own else "",
    )


def _load_task(recipe: Recipe) -> TrainingData:
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
