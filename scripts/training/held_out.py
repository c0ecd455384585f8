"""Scores on held-out data: in evaluations during training, and at the end."""

import math
from typing import Any

import torch
from accelerate import Accelerator

from ..data.pack import IGNORED, add_labels
from ..evaluation.answers import count_errors, summarise
from ..evaluation.data_description import describe_data
from .data import TrainingData
from .errors import TrainingError

# Nats a token; its exponential still fits a float.
HOPELESS = 700.0


@torch.no_grad()
def evaluate(
    model: Any, data: TrainingData, split: str, accelerator: Accelerator, *, batch_size: int, limit: int | None
) -> dict[str, float]:
    """Scores `limit` blocks of a held-out split, spread evenly over it; by default all.

    Args:
        model: without its data-parallel wrapper, which would wait for processes that have no block left.
        batch_size: blocks that a process takes at a time.

    Returns:
        for a toy task, `loss` (nats per answer token) and what `summarise` returns. For text, `bits_per_byte`: all
        nats, end-of-text tokens included, over ln 2 times the bytes of the predicted text; `perplexity` per token,
        `loss` (nats per token) and `tokens`, the number of predictions. Words that are not text have no
        `bits_per_byte`.

    Raises:
        TrainingError: the loss shows that training has diverged.
    """
    model.eval()
    blocks, is_task = data.held_out[split], data.unit == "samples"
    count = min(limit or len(blocks), len(blocks))
    chosen = [i * len(blocks) // count for i in range(count)]
    size = batch_size * accelerator.num_processes
    sums = torch.zeros(5 if is_task else 3, dtype=torch.float64)
    for start in range(0, count, size):
        with accelerator.split_between_processes(chosen[start : start + size]) as mine:
            if not mine:
                continue
            batch = add_labels(blocks[mine])
            inputs = {name: rows.to(accelerator.device) for name, rows in batch.items()}
            # `num_items_in_batch=1` turns the mean into the sum.
            outputs = model(**inputs, num_items_in_batch=1, use_cache=False)
            sums[0] += outputs.loss.item()
            if is_task:
                sums[1:] += count_errors(outputs.logits, batch["labels"]).cpu()
                continue
            labels = batch["labels"][:, 1:]
            labels = labels[labels != IGNORED]
            size_of = 0 if data.bytes_per_token is None else data.bytes_per_token[labels].sum().item()
            sums[1:] += torch.tensor([labels.numel(), size_of])
    nats, *counts = accelerator.reduce(sums.to(accelerator.device), reduction="sum").tolist()
    loss = nats / counts[0]
    if not loss < HOPELESS:
        raise TrainingError(f"a loss of {loss!r} nats a token on the {split} split: training has diverged.")
    if is_task:
        return {"loss": loss, **summarise(counts)}
    scores = {} if data.bytes_per_token is None else {"bits_per_byte": nats / (math.log(2) * counts[1])}
    return {**scores, "perplexity": math.exp(loss), "loss": loss, "tokens": int(counts[0])}


def about_text(data: Any, split: str, scores: dict[str, float], *, local: bool) -> dict[str, Any]:
    """Returns what `results.json` says about a model of text; `data` is that of the recipe."""
    about: dict[str, Any] = {"source": data.source, "dataset": data.dataset, "splits": data.splits, "split": split}
    if data.train_file:
        about |= {"train_file": data.train_file, "validation_file": data.validation_file}
    if data.source == "corpus":
        about["place"] = "local files" if local else "the Hub"
    names = ("bits_per_byte", "perplexity", "loss")
    return {
        "metrics": {name: {"value": scores[name]} for name in names if name in scores},
        "data": describe_data(about),
        "length": data.sequence_length,
        "tokens": scores["tokens"],
    }


def about_task(data: Any, tokenizer: Any, scores: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Returns what `results.json` says about a model of a toy task; `scores` by the name of the test set."""
    config = data.task_config()
    # For the card: the shortest prompt of a few.
    rows = (config.row(config.sample("test", index)) for index in range(8))
    row = min(rows, key=lambda row: len(row["prompt"]))
    tokens = len(tokenizer(row["answer"])["input_ids"])
    example = {"prompt": row["prompt"], "answer": row["answer"], "tokens": tokens}
    return {
        "metrics": {"test_sets": scores},
        "data": describe_data({"source": data.source, "task": data.task, "split": "test", "example": example}),
        "length": data.sequence_length,
    }
