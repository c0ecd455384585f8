"""Full-matrix attention by the formulas of the encodings, in any type, for some of the query rows.

In float64 it is the reference of the benchmark and of the GPU check; in the timed type it gives the rounding error of
PyTorch. Gradients are computed by autograd. The tests compare the formulas with the papers.

Axes: B batch, H query heads, G key heads (query head h uses key head h // (H // G)), Q query rows, K keys, D head dim,
N chosen rows.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from whatwhere.attention_blockwise import HIDDEN_LOGIT, compute_dtype
from whatwhere.attention_mask import dense_mask
from whatwhere.position_base import PositionContext
from whatwhere.position_modules import PositionEncodings
from whatwhere.position_stick_breaking import _without_own, break_stick


def visible(
    query_length: int, key_length: int, rows: torch.Tensor, *, key_ranges: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns which keys are visible to the rows, int64 (N,): bool (1 or B, 1, N, K).

    key_ranges: None for causal (row i sees keys j <= K - Q + i); or int32 (B, 1, Q + K, 2): row i sees the keys with
    low_i <= j < high_i whose entry Q + j is not 0.
    """
    if key_ranges is None:
        return torch.arange(key_length, device=rows.device) <= rows[None, None, :, None] + (key_length - query_length)
    return dense_mask(torch.cat((key_ranges[:, :, rows], key_ranges[:, :, query_length:]), 2), len(rows))


def _heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    return states if states.shape[1] == heads else states.repeat_interleave(heads // states.shape[1], dim=1)


def _logits(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    return (query @ _heads(key, query.shape[1]).transpose(2, 3)).to(compute_dtype(query.dtype)) * scaling


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    encodings: PositionEncodings,
    context: PositionContext,
    *,
    rows: torch.Tensor,
    scaling: float,
    key_ranges: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `eager` attention computes for some rows, (B, H, N, D).

    Args:
        query: (B, H, Q, D). key, value: (B, G, K, D), as cached. rows: int64 (N,).
        encodings: those of a layer.
        context: the context of all rows.
        kept: what dropout multiplies the weights with, (B, H, N, K), or None.
    """
    seen = visible(query.shape[2], key.shape[2], rows, key_ranges=key_ranges)
    for part in encodings.hooks["after_cache"]:
        query, key = part.after_cache(query, key, context)
    query = query[:, :, rows]
    logits = _logits(query, key, scaling).masked_fill(~seen, HIDDEN_LOGIT)
    if "stick_breaking" in encodings:
        weights, _ = break_stick(logits.masked_fill(~_without_own(seen), HIDDEN_LOGIT))
    else:
        of_rows = dataclasses.replace(
            context,
            query_positions=context.query_positions[:, rows],
            query=context.query[:, :, rows],
            _computed={"key_positions": context.key_positions},
        )
        weights = torch.softmax(logits + encodings.bias(logits, query, of_rows, scaling), -1) * seen
    weights = weights if kept is None else weights * kept
    return weights.to(value.dtype) @ _heads(value, query.shape[1])


# Up to so many rows all are compared, of more so many; and so many logits of a reference are in memory at once.
ALL_ROWS, SOME_ROWS, LOGITS = 4096, 2048, 1 << 23


def chosen_rows(length: int, device: torch.device) -> torch.Tensor:
    """Returns the rows to compare: all, or those at both ends and in the middle, and some from everywhere."""
    if length <= ALL_ROWS:
        return torch.arange(length, device=device)
    part = SOME_ROWS // 4
    near = torch.arange(part)
    spread = torch.linspace(0, length - 1, part).long()
    return torch.cat([near, length // 2 - part // 2 + near, length - part + near, spread]).unique().to(device)


def results_of(
    reference: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad: torch.Tensor,
    parts: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Returns the output of the rows in `parts` (B, H, N, D), and the gradients, summed over the parts in float64."""
    outs, sums = [], [torch.zeros(one.shape, dtype=torch.float64, device=one.device) for one in inputs]
    for rows in parts:
        out = reference(*inputs, rows=rows)
        outs.append(out.detach())
        for total, one in zip(sums, torch.autograd.grad(out, inputs, grad[:, :, rows].to(out.dtype))):
            total += one
    return [torch.cat(outs, 2), *sums]


def in_parts(rows: torch.Tensor, logits: int) -> tuple[torch.Tensor, ...]:
    """Splits rows so that the logits of a part fit; a row has so many `logits`."""
    return rows.split(max(1, LOGITS // logits))


def checked_gradient(
    grad: torch.Tensor,
    undecided: Callable[..., torch.Tensor] | None,
    exact_inputs: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, int]:
    """Returns a gradient of the output, (B, H, Q, D), that is 0 in rows that are not compared.

    And how many of the rows in `parts` rounding decides: `undecided` tells which of some `rows`, bool (B, H, N).
    """
    found, count = torch.zeros_like(grad), 0
    for rows in parts:
        found[:, :, rows] = grad[:, :, rows]
        if undecided is not None:
            with torch.no_grad():
                left_out = undecided(*exact_inputs, rows=rows)
            count += int(left_out.sum())
            found[:, :, rows] = found[:, :, rows].masked_fill(left_out[..., None], 0)
    return found, count


# Upper bound of float32 rounding errors of contextual positions (largest observed error: 3e-6).
NEAR = 5e-5


def undecided_rows(
    query: torch.Tensor,
    gate_key: torch.Tensor,
    kinks: torch.Tensor,
    *,
    rows: torch.Tensor,
    scaling: float,
    key_ranges: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the rows with a contextual position within `NEAR` of one of the kinks: bool (B, H, N).

    There the derivative of the bias is discontinuous, so rounding can select either of two valid gradients. The
    incoming gradient of these rows should be set to 0.

    Args:
        query: (B, H, Q, D). gate_key: (B, G, K, D), whose products with the queries open the gates. Both float64.
        kinks: positions in ascending order.
        rows: int64 (N,).
    """
    seen = visible(query.shape[2], gate_key.shape[2], rows, key_ranges=key_ranges)
    gates = torch.sigmoid(_logits(query[:, :, rows], gate_key, scaling)) * seen
    positions = gates.flip(-1).cumsum(-1).flip(-1)
    kinks = kinks.to(positions.dtype)
    above = torch.bucketize(positions, kinks)
    near = [(positions - kinks[one.clamp(0, len(kinks) - 1)]).abs() < NEAR for one in (above, above - 1)]
    return ((near[0] | near[1]) & seen).any(-1)
