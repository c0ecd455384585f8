"""Estimates the duration of a run on this machine, by timing a few steps on random tokens."""

import time

import torch
from transformers import PreTrainedTokenizerBase

from ..data.tokenize import WORD_TOKENIZERS, build_tokenizer
from ..toy_tasks.common import build_tokenizer as build_task_tokenizer
from .model import build_config, build_model, build_optimizer
from .recipe import Recipe

# Maximum number of floating-point operations in a timed step on a CPU (about a second).
_LARGEST = 3e10


def estimate_seconds(recipe: Recipe) -> float | None:
    """Estimates the seconds that training a recipe takes on this machine, in one process.

    The estimate includes steps and evaluations, but not reading and tokenising the text, and is too high if other
    processes use the machine. None if the model is too large to time a step on a CPU.
    """
    data, training, evaluation = recipe.data, recipe.training, recipe.evaluation
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    tokenizer: PreTrainedTokenizerBase | None = None
    if data.source == "task":
        tokenizer = build_task_tokenizer(data.task_config())
    elif data.tokenizer == "bytes" or data.tokenizer in WORD_TOKENIZERS:
        tokenizer = build_tokenizer(data.tokenizer)
    config = build_config(recipe, tokenizer)
    if data.tokenizer == "bpe" and data.vocab_size:
        config.vocab_size = data.vocab_size
        # The defaults are tokens of a larger vocabulary.
        config.bos_token_id = config.eos_token_id = None
    rows, length = training.micro_batch_size or training.batch_size, data.sequence_length
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(recipe, config).parameters())
    if device.type == "cpu":
        rows = min(rows, int(_LARGEST / (6 * parameters * length)))
        if not rows:
            return None
    # Leaves the random state unchanged.
    with torch.random.fork_rng(devices=[]):
        model = build_model(recipe, config).to(device)
        optimizer, _ = build_optimizer(model, training)
        tokens = torch.randint(config.vocab_size, (rows, length)).to(device)
        forward, update = float("inf"), float("inf")
        for _ in range(2):
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=training.mixed_precision == "bf16"):
                loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=tokens.numel(), use_cache=False).loss
            loss.backward()
            loss.item()
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            # The first step is slower.
            forward, update = min(forward, middle - start), min(update, time.perf_counter() - middle)
    held_out = (training.steps // evaluation.every if evaluation.every else 0) * (evaluation.blocks or 0)
    held_out += evaluation.final_blocks or 0
    # A forward pass is about a third of a training step.
    passes = training.steps * training.batch_size + held_out / 3
    return forward / rows * passes + update * training.steps


def describe_seconds(seconds: float) -> str:
    """Returns a rounded duration: `40 s`, `12 min`, `3.5 h`, `4.2 days`."""
    for unit, size in (("days", 86_400), ("h", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
