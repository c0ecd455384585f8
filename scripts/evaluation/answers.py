"""Errors in the answers of toy tasks (teacher-forced)."""

from collections.abc import Sequence
from typing import Any

import torch

from ..data.pack import IGNORED
from ..processes import ALONE, Processes
from ..progress import Progress
from ..toy_tasks.samples import TaskSamples


def count_errors(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Counts answer tokens that do not have the highest logit.

    Args:
        logits: (B, T, V); position t predicts the token at t + 1.
        labels: int64 (B, T), -100 where there is no answer.

    Returns:
        float64 (4), on the device of the logits: answer tokens, wrong answer tokens, sequences with an answer, and
        sequences with a wrong answer token.
    """
    labels = labels[:, 1:].to(logits.device)
    scored = labels != IGNORED
    wrong = scored & (logits[:, :-1].argmax(-1) != labels)
    counts = [scored.sum(), wrong.sum(), scored.any(1).sum(), wrong.any(1).sum()]
    return torch.stack(counts).double()


def summarise(counts: Sequence[float]) -> dict[str, Any]:
    """Returns the errors (between 0 and 1) and the scored tokens and sequences of summed `count_errors`."""
    tokens, wrong_tokens, sequences, wrong_sequences = counts
    return {
        "token_error": wrong_tokens / tokens,
        "sequence_error": wrong_sequences / sequences,
        "tokens": int(tokens),
        "sequences": int(sequences),
    }


@torch.no_grad()
def score_samples(
    model: Any, samples: TaskSamples, *, name: str, batch_size: int = 64, processes: Processes = ALONE
) -> dict[str, Any]:
    """Returns the errors (see `summarise`) of a causal language model, in evaluation mode, on all of the samples.

    The processes divide the batches, and all return the same. `name` is that of the progress.
    """
    total = torch.zeros(4, dtype=torch.float64)
    starts = processes.share(range(0, len(samples), batch_size))
    with Progress(name, len(starts), unit="batches", shown=processes.is_first) as progress:
        for start in starts:
            batch = samples[range(start, min(start + batch_size, len(samples)))]
            logits = model(input_ids=batch["input_ids"].to(model.device), use_cache=False).logits
            total += count_errors(logits, batch["labels"]).cpu()
            progress.advance()
    return summarise(processes.summed(total).tolist())
