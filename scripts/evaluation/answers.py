"""Errors in the answers of toy tasks, teacher-forced: every answer is predicted from the right tokens before it.

And the likelihoods of answers to a question in words, for models that were trained on none of the tasks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..data.pack import IGNORED
from ..data.samples import TaskSamples


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


@torch.no_grad()
def score_samples(model: Any, samples: TaskSamples, *, batch_size: int = 64) -> dict[str, Any]:
    """Returns the errors (see `summarise`) of a model on all of the samples.

    Args:
        model: a causal language model, in evaluation mode.
        samples: a fixed number of them, with labels for answers only.
        batch_size: samples in a batch.
    """
    total = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(samples), batch_size):
        batch = samples[range(start, min(start + batch_size, len(samples)))]
        logits = model(input_ids=batch["input_ids"].to(model.device), use_cache=False).logits
        total += count_errors(logits, batch["labels"]).cpu()
    return summarise(total.tolist())


@torch.no_grad()
def choice_likelihoods(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, choices: Sequence[str]
) -> torch.Tensor:
    """Returns the log-likelihood (nats) of each choice after the prompt, float32 (choices), on the CPU.

    A choice is what a text of prompt and choice has after as many tokens as the prompt alone.

    Args:
        model: a causal language model, in evaluation mode.
        tokenizer: that of the model.
        prompt: what is given.
        choices: what may follow; each must add a token at least.

    Raises:
        ValueError: the tokenizer does not know a word.
    """
    start = len(tokenizer(prompt)["input_ids"])
    texts = [tokenizer(prompt + choice)["input_ids"] for choice in choices]
    if any(tokenizer.unk_token_id in text for text in texts if tokenizer.unk_token_id is not None):
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} does not know every word of {prompt[:60]!r}.")
    # Choices that differ in their last token alone share what comes before it.
    contexts = list(dict.fromkeys(tuple(text[:-1]) for text in texts))
    width = max(map(len, contexts))
    # Padded on the right, where a causal model does not look.
    ids = torch.tensor([context + context[-1:] * (width - len(context)) for context in contexts])
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits[:, start - 1 :].float().cpu()
    chances = logits.log_softmax(-1)
    found = []
    for text in texts:
        added = torch.tensor(text[start:])
        found.append(chances[contexts.index(tuple(text[:-1])), torch.arange(len(added)), added].sum())
    return torch.stack(found)
