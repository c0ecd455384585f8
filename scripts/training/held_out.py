"""Scores on held-out data, during training and at its end."""

import contextlib
import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ..data.pack import IGNORED, add_labels
from ..data.rows import documents_of, documents_sha256
from ..errors import TrainingError
from ..evaluation.data_description import describe_data
from ..progress import Progress
from .data import TrainingData
from .recipe import DataRecipe

# Nats per token; its exponential is a finite float.
HOPELESS = 700.0
# A prompt is the beginning of the first line with several words, shorter than the context of a small model.
PROMPT_WORDS, PROMPT_CHARACTERS = 4, 60


@torch.no_grad()
def evaluate(run: Any, split: str, limit: int | None = None) -> dict[str, float]:
    """Scores `limit` evenly spaced blocks of a held-out split; by default all.

    Args:
        split: its name in `run.data.held_out`.

    Returns:
        for a toy task, `loss` (nats per answer token) and the result of `summarise`. For text, `bits_per_byte` (all
        nats, including those of tokens around documents, over ln 2 times the bytes of the text that is predicted, as it
        was before tokenisation), `perplexity` (per token), `loss` (nats per token) and `tokens` (the number of
        predictions). Symbols that are not text have no `bits_per_byte`.
    """
    data, model, device = run.data, run.whole_model, run.accelerator.device
    per_batch = run.micro_batch_size * run.processes.data_share[1]
    model.eval()
    blocks, is_task = data.held_out[split], data.unit == "samples"
    count = min(limit or len(blocks), len(blocks))
    chosen = [i * len(blocks) // count for i in range(count)]
    index, shares = run.processes.data_share
    if is_task:
        from ..evaluation.answers import count_errors, summarise
    sums = torch.zeros(5 if is_task else 3, dtype=torch.float64)
    progress = Progress(f"{run.recipe.name}, {split} split", count, unit="sequences", shown=run.processes.is_first)
    for start in range(0, count, per_batch):
        rows = chosen[start : start + per_batch]
        progress.advance(len(rows))
        mine = rows[index * len(rows) // shares : (index + 1) * len(rows) // shares]
        # A sharded model needs all processes in each forward pass; one without a block repeats the first.
        if not mine and not run.processes.is_sharded:
            continue
        batch = add_labels(blocks[mine or chosen[:1]])
        sizes = batch.pop("bytes", None)
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        # `num_items_in_batch=1` turns the mean into the sum.
        outputs = model(**inputs, num_items_in_batch=1, use_cache=False)
        if not mine:
            continue
        sums[0] += outputs.loss.item()
        if is_task:
            sums[1:] += count_errors(outputs.logits, batch["labels"]).cpu()
            continue
        scored = batch["labels"][:, 1:] != IGNORED
        sums[1:] += torch.stack([scored.sum(), torch.tensor(0) if sizes is None else sizes[:, 1:][scored].sum()])
    progress.close()
    if isinstance(model, FSDPModule):
        # The outermost weights stay whole after a forward pass.
        model.reshard()
    nats, *counts = run.processes.summed(sums).tolist()
    loss = nats / counts[0]
    if not loss < HOPELESS:
        raise TrainingError(f"loss={loss!r} nats per token on the {split} split: training has diverged.")
    if is_task:
        return {"loss": loss, **summarise(counts)}
    scores = {"bits_per_byte": nats / (math.log(2) * counts[1])} if counts[1] else {}
    return {**scores, "perplexity": math.exp(loss), "loss": loss, "tokens": int(counts[0])}


def about_text(data: Any, split: str, scores: dict[str, float], *, local: bool) -> dict[str, Any]:
    """Returns the `data` and scores of `results.json` for text; `data` is the recipe's."""
    about: dict[str, Any] = {"source": data.source, "dataset": data.dataset, "splits": data.splits, "split": split}
    if data.train_file:
        about |= {"train_file": data.train_file, "validation_file": data.validation_file}
    for name in ("dataset_config", "text_field", "streaming"):
        if getattr(data, name) != DataRecipe.model_fields[name].default:
            about[name] = getattr(data, name)
    if data.mixture:
        about["mixture"] = [text.model_dump(exclude_defaults=True) | {"source": text.source} for text in data.mixture]
    if any(text.source == "corpus" for text in data.texts()):
        about["place"] = "local files" if local else "the Hub"
    names = ("bits_per_byte", "perplexity", "loss")
    return {
        "metrics": {name: {"value": scores[name]} for name in names if name in scores},
        "data": describe_data(about),
        "length": data.sequence_length,
        "tokens": scores["tokens"],
    }


def prompt_of(rows: Any, length: int) -> str:
    """Returns the first words of a split as a prompt for a model of sequences of `length` tokens.

    It has at most `PROMPT_CHARACTERS`, and half as many as there are tokens; it is empty if the split has no text.
    """
    text = next(filter(None, map(str.strip, documents_of(rows))), "")
    # Titles say little, and a genome is a single word.
    line = next((line.strip() for line in text.splitlines() if len(line.split()) >= PROMPT_WORDS), text)
    limit = min(PROMPT_CHARACTERS, length // 2)
    words = re.match(rf".{{1,{limit}}}(?!\S)", line, re.DOTALL)
    return words[0].rstrip() if words else line[:limit]


def held_out_text(data: TrainingData, split: str, output: Path) -> dict[str, Any]:
    """Returns the `held_out` of `results.json`, by which `evaluation.text` reads a held-out split again.

    It has the `folder` that files are relative to, itself relative to the run's, and of each text (of a mixture) the
    number of documents and their SHA-256.
    """
    folder = os.getcwd()
    # On Windows, there is no path between two drives.
    with contextlib.suppress(ValueError):
        folder = os.path.relpath(folder, output.resolve())
    found = (documents_sha256(documents_of(rows)) for rows in data.texts[split])
    return {"folder": folder, "texts": [{"documents": count, "sha256": sha256} for count, sha256 in found]}


def about_task(data: Any, tokenizer: Any, scores: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Returns the `data` and scores of `results.json` for a toy task; `scores` by the name of the test set."""
    config = data.task_config()
    # The example of the card: the shortest of a few prompts.
    rows = (config.row(config.sample("test", index)) for index in range(8))
    row = min(rows, key=lambda row: len(row["prompt"]))
    tokens = len(tokenizer(row["answer"])["input_ids"])
    example = {"prompt": row["prompt"], "answer": row["answer"], "tokens": tokens}
    return {
        "metrics": {"test_sets": scores},
        "data": describe_data(
            {"source": data.source, "task": data.task, "split": "test", "example": example, "prompt": row["prompt"]}
        ),
        "length": data.sequence_length,
    }
