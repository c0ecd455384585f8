"""Loss of a language model in windows of one length: per token, per byte, and by the position within the window.

A window is a sequence that is evaluated by itself; it has nothing to do with sliding-window attention.

A text of N + 1 tokens is cut into disjoint windows of exactly n tokens, the remainder is dropped, and each window is
scored separately (PoPE, Figure 2; CoPE, Figure 3). A window's inputs are tokens s .. s + n - 1, its targets tokens
s + 1 .. s + n. The loss is the mean negative log-likelihood of all targets of all windows of all texts; perplexity is
its exponential. Texts shorter than a window are left out and counted. If every length divides N, the same tokens are
scored at every length; otherwise longer windows drop more of them. A window may begin anywhere in a document. With
`begin`, the first input of every window is that token, in place of token s: the targets stay the same.

The loss by position is the mean loss of all tokens at the same position in their window. It falls as long as the model
uses more context, and rises where the model fails beyond its trained length.

Memory is linear in the length: logits are computed for a chunk of tokens at a time (`token_losses`), and the default
attention of our models, and SDPA in stock models, creates no matrix of (length, length).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..processes import ALONE, Processes
from .schema import Cell


def parse_windows(text: str, trained_length: int) -> list[int]:
    """Returns the lengths in a list such as `512,4x`, ascending; raises ValueError if one is not a positive integer."""
    lengths = set()
    for part in text.split(","):
        try:
            length = float(part.strip().removesuffix("x")) * (trained_length if part.strip().endswith("x") else 1)
            whole = int(length)
        except (ValueError, OverflowError):
            length, whole = 0.0, 0
        if whole < 1 or whole != length:
            raise ValueError(
                f"windows={text!r} is not valid: {part!r} is not a positive whole number of tokens (trained length "
                f"{trained_length}). Give a list such as 1024,2048,65536, or multiples such as 1x,2x,4x."
            )
        lengths.add(whole)
    return sorted(lengths)


def position_edges(length: int) -> list[int]:
    """Returns the edges of position buckets: 0, 16, 23, 32, 45, 64, ..., `length`, two buckets per doubling.

    Edges do not depend on the length, except for the last.
    """
    halves = (round(16 * 2 ** (step / 2)) for step in itertools.count())
    return [0, *itertools.takewhile(lambda edge: edge < length, halves), length]


def common_tokens(wanted: int, available: int, lengths: Sequence[int]) -> int:
    """Returns the number of tokens to score such that windows of all lengths score the same tokens.

    At least `wanted` of the `available` tokens, if the text is long enough. A text shorter than the common multiple of
    the lengths is scored completely.
    """
    step = math.lcm(*lengths)
    return min(-(-wanted // step), available // step) * step or available


def fillable(texts: Sequence[torch.Tensor], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Splits lengths into those that fit into the longest text and the others; raises ValueError if none fits."""
    longest = max(len(ids) - 1 for ids in texts)
    filled = [length for length in lengths if length <= longest]
    if not filled:
        raise ValueError(
            f"windows={min(lengths)!r} is not valid: the longest of {len(texts)} texts has {longest} tokens to score. "
            "Use shorter lengths, more tokens of each text (--tokens), or join documents (--join)."
        )
    return filled, [length for length in lengths if length > longest]


def has_plain_head(model: Any, inputs: torch.Tensor) -> bool:
    """Whether the logits are output embedding x last hidden state without cap or factor, checked on `inputs`."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
    logits = model(input_ids=inputs, use_cache=False).logits
    return torch.allclose(head(hidden).float(), logits.float(), rtol=1e-3, atol=1e-3)


def token_losses(
    model: Any, inputs: torch.Tensor, targets: torch.Tensor, *, plain_head: bool, chunk: int = 1024
) -> torch.Tensor:
    """Returns the negative log-likelihood in nats, float32 (B, T), of `targets` given `inputs`, both int64 (B, T).

    With `plain_head`, float32 logits are computed for `chunk` tokens at a time, otherwise for all at once.
    """
    if not plain_head:
        logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), targets.flatten(), reduction="none").view_as(targets)
    head = model.get_output_embeddings()
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    losses = [
        nn.functional.cross_entropy(head(rows).float(), labels, reduction="none")
        for rows, labels in zip(hidden.split(chunk), targets.flatten().split(chunk))
    ]
    return torch.cat(losses).view_as(targets)


@torch.inference_mode()
def measure_windows(
    model: Any,
    texts: Sequence[torch.Tensor],
    sizes: Sequence[torch.Tensor] | None,
    length: int,
    *,
    trained_length: int,
    begin: int | None = None,
    batch_tokens: int = 4096,
    done: Callable[[int], None] = lambda tokens: None,
    processes: Processes = ALONE,
) -> tuple[Cell, dict[str, Any]]:
    """Scores all windows of one length.

    Args:
        model: a causal language model of Transformers; it is put into eval mode.
        texts: token ids of each text, integers (tokens), on any device; at least one has a window (see `fillable`).
        sizes: for each text the bytes of each token, integers (tokens); None if unknown.
        begin: the token with which every window begins; by default that of the text.
        batch_tokens: windows of one text are batched up to this many tokens (at least one window).
        done: called after each batch with the number of tokens that all processes have scored since.

    Returns:
        the cell; and the losses by position: `length`, `edges` (buckets + 1), `loss` (mean nats per token) and
        `tokens` of each bucket.
    """
    # The first token is never a target.
    counts = [max(0, len(ids) - 1) // length for ids in texts]
    model.eval()
    plain_head = has_plain_head(model, texts[0][None, : min(16, length)].to(model.device, torch.int64))
    # Nats and bytes of each window, and nats at each position; the processes add them up.
    parts = [sum(counts), sum(counts), length]
    sums = torch.zeros(sum(parts), dtype=torch.float64)
    nats, bytes_, by_position = sums.split(parts)
    step = max(1, batch_tokens // length)
    batches = processes.share(
        [
            (number, before, start, min(start + step, count))
            for number, (count, before) in enumerate(zip(counts, itertools.accumulate(counts, initial=0)))
            for start in range(0, count, step)
        ]
    )
    for text, before, start, stop in batches:
        some = texts[text][start * length : stop * length + 1].to(torch.int64)
        inputs, targets = some[:-1].view(-1, length), some[1:].view(-1, length)
        if begin is not None:
            inputs = inputs.clone()
            inputs[:, 0] = begin
        losses = token_losses(model, inputs.to(model.device), targets.to(model.device), plain_head=plain_head).to(
            "cpu", torch.float64
        )
        by_position += losses.sum(0)
        nats[before + start : before + stop] = losses.sum(1)
        if sizes is not None:
            some = sizes[text][start * length + 1 : stop * length + 1]
            bytes_[before + start : before + stop] = some.view(-1, length).sum(1)
        done((stop - start) * length * processes.count)
    nats, bytes_, by_position = processes.summed(sums).split(parts)
    number, documents = len(nats), [count for count in counts if count]
    clusters, windows = ("documents", documents) if len(documents) > 1 else ("windows", [1] * number)
    nats, bytes_ = (torch.stack([part.sum() for part in each.split(windows)]) for each in (nats, bytes_))
    tokens = torch.tensor(windows, dtype=torch.float64) * length
    loss = (nats.sum() / tokens.sum()).item()
    error = None
    if len(windows) > 1:
        spread = (nats - loss * tokens).square().sum() * len(windows) / (len(windows) - 1)
        error = (spread.sqrt() / tokens.sum()).item()
    total = number * length
    cell = Cell(
        length=length,
        multiple=length / trained_length,
        reached=True,
        bits_per_byte=(nats.sum() / math.log(2) / bytes_.sum()).item() if bytes_.sum() > 0 else None,
        standard_error=error,
        loss=loss,
        perplexity=math.exp(loss),
        tokens=total,
        bytes=int(bytes_.sum().item()) if sizes is not None else None,
        windows=number,
        clusters=clusters,
        documents=len(documents),
        short_documents=counts.count(0),
        dropped_tokens=sum(len(ids) - 1 for ids in texts) - total,
    )
    edges = position_edges(length)
    nats_of = [by_position[start:stop].sum().item() for start, stop in itertools.pairwise(edges)]
    tokens_at = [(stop - start) * number for start, stop in itertools.pairwise(edges)]
    means = [nats_at / size for nats_at, size in zip(nats_of, tokens_at)]
    return cell, {"length": length, "edges": edges, "loss": means, "tokens": tokens_at}
