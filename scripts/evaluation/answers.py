"""Errors in the answers of toy tasks, teacher-forced: every answer is predicted from the right tokens before it."""

from collections.abc import Sequence
from typing import Any

import torch

from ..data.pack import IGNORED


def count_errors(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Counts the answers that are not the most likely token.

    Args:
        logits: (B, T, V); those at position t predict the token at t + 1.
        labels: int64 (B, T), -100 where there is no answer.

    Returns:
        float64 (4), on the device of the logits: answer tokens, wrong ones, sequences with an answer, and sequences
        with a wrong one.
    """
    labels = labels[:, 1:].to(logits.device)
    scored = labels != IGNORED
    wrong = scored & (logits[:, :-1].argmax(-1) != labels)
    counts = [scored.sum(), wrong.sum(), scored.any(1).sum(), wrong.any(1).sum()]
    return torch.stack(counts).double()


def summarise(counts: Sequence[float]) -> dict[str, Any]:
    """Returns `token_error` and `sequence_error`, between 0 and 1, with `tokens` and `sequences`, how many were scored.

    Args:
        counts: sums of what `count_errors` returns.
    """
    tokens, wrong_tokens, sequences, wrong_sequences = counts
    return {
        "token_error": wrong_tokens / tokens,
        "sequence_error": wrong_sequences / sequences,
        "tokens": int(tokens),
        "sequences": int(sequences),
    }
