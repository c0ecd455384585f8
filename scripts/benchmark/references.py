"""Full-matrix attention with position encodings, in any type, for some of the query rows.

In float64 these are the references of the benchmark and of the GPU check; in the timed type they give the rounding
error of PyTorch. Gradients are computed by autograd.

Axes: B batch, H query heads, G key heads (query head h uses key head h // (H // G)), Q query rows, K keys, D head dim,
R rotated channels, P positions in CoPE's table, N chosen rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from whatwhere.attention_blockwise import MASKED, compute_dtype
from whatwhere.attention_mask import dense_mask


def visible(
    query_length: int, key_length: int, rows: torch.Tensor, *, ranges: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns which keys are visible to the rows: bool (1 or B, 1, N, K).

    Args:
        query_length: Q.
        key_length: K.
        rows: int64 (N,), query rows.
        ranges: None for causal (row i sees keys j <= K - Q + i); or int32 (B, 1, Q + K, 2): row i sees the keys with
            low_i <= j < high_i whose entry Q + j is not 0.
    """
    if ranges is None:
        return torch.arange(key_length, device=rows.device) <= rows[None, None, :, None] + (key_length - query_length)
    return dense_mask(torch.cat((ranges[:, :, rows], ranges[:, :, query_length:]), 2), len(rows))


def _heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    return states if states.shape[1] == heads else states.repeat_interleave(heads // states.shape[1], dim=1)


def _attend(
    logits: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax attention; `kept` is what dropout multiplies the weights with, (B, H, N, K)."""
    weights = torch.softmax(logits.masked_fill(~seen, MASKED), -1) * seen
    weights = weights if kept is None else weights * kept
    return weights.to(value.dtype) @ _heads(value, logits.shape[1])


def _logits(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    return (query @ _heads(key, query.shape[1]).transpose(2, 3)).to(compute_dtype(query.dtype)) * scaling


def _bias(
    query: torch.Tensor,
    rows: torch.Tensor,
    scaling: float,
    decay: tuple[torch.Tensor, torch.Tensor] | None,
    relative: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor | float:
    """Returns what decay and relative positions add to the logits of the rows; query (B, H, N, D)."""
    dtype = compute_dtype(query.dtype)
    bias: Any = 0.0
    if decay is not None:
        bias = (decay[0][:, :, rows, None] - decay[1][:, :, None]).clamp(max=0).to(dtype)
    if relative is not None:
        table, query_positions, key_positions = relative
        distance = (query_positions[:, rows, None] - key_positions[:, None]).clamp(0, len(table) - 1)[:, None]
        z = query.to(dtype) @ table.T.to(dtype) * scaling
        bias = bias + z.gather(-1, distance.expand(*z.shape[:3], -1))
    return bias


def plain_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: torch.Tensor,
    scaling: float,
    decay: tuple[torch.Tensor, torch.Tensor] | None = None,
    relative: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ranges: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention without positions, or with a decay or relative positions.

    Args:
        decay: numbers c, float64 (1 or B, H, Q) and (1 or B, H, K); c_i - c_j, or 0 if that is positive, is added to
            the logit of row i and key j: FoX, ALiBi.
        relative: the table (P, D), and positions (1 or B, Q) and (1 or B, K): `kernel_relative.relative_attention`.
    """
    logits = _logits(query[:, :, rows], key, scaling) + _bias(query[:, :, rows], rows, scaling, decay, relative)
    return _attend(logits, value, visible(query.shape[2], key.shape[2], rows, ranges=ranges), kept)


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
    """Returns a gradient of the output that is 0 in rows that are not compared, and how many rounding decides.

    Args:
        grad: (B, H, Q, D).
        undecided: tells of inputs and `rows` which rounding decides, bool (B, H, N), or None.
        exact_inputs: in float64.
        parts: the rows to compare.
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
    key: torch.Tensor,
    gate_key: torch.Tensor | None = None,
    *,
    rows: torch.Tensor,
    scaling: float,
    num_positions: int,
    ranges: torch.Tensor | None = None,
    knots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the rows with a contextual position within `NEAR` of an integer, or of one of the knots: bool (B, H, N).

    There the derivative of CoPE's bias is discontinuous, so rounding can select either of two valid gradients.
    The incoming gradient of these rows should be set to 0. Inputs as for `cope_reference`, in float64.
    """
    seen = visible(query.shape[2], key.shape[2], rows, ranges=ranges)
    gates = torch.sigmoid(_logits(query[:, :, rows], key if gate_key is None else gate_key, scaling)) * seen
    positions = gates.flip(-1).cumsum(-1).flip(-1)
    # Positions are not negative, and the gradient is 0 beyond the last position.
    kinks = torch.arange(1, num_positions, device=positions.device) if knots is None else knots
    kinks = kinks.to(positions.dtype)
    above = torch.bucketize(positions, kinks)
    near = [(positions - kinks[one.clamp(0, len(kinks) - 1)]).abs() < NEAR for one in (above, above - 1)]
    return ((near[0] | near[1]) & seen).any(-1)


def cope_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    gate_key: torch.Tensor | None = None,
    position_query: torch.Tensor | None = None,
    *,
    rows: torch.Tensor,
    scaling: float,
    position_scale: float = 1.0,
    decay: tuple[torch.Tensor, torch.Tensor] | None = None,
    relative: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ranges: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    knots: torch.Tensor | None = None,
    num_positions: int | None = None,
) -> torch.Tensor:
    """CoPE (Eq. 3 to 9 of 2405.18719), as in Listing 1: every step on all keys of a row; table (D, P).

    With `gate_key` (B, G, K, D) the gates come from its products with the queries; with `position_query` (B, H, Q, D)
    that is multiplied with the table. For decay and relative see `plain_reference`, for knots `cope_attention`.
    """
    seen = visible(query.shape[2], key.shape[2], rows, ranges=ranges)
    query = query[:, :, rows]
    logits = _logits(query, key, scaling)
    gates = torch.sigmoid(logits if gate_key is None else _logits(query, gate_key, scaling)) * seen
    counts = gates.flip(-1).cumsum(-1).flip(-1)
    positions = counts.clamp(max=(num_positions or table.shape[1]) - 1)
    z = (query if position_query is None else position_query[:, :, rows]).to(logits.dtype)
    z = z @ table.to(logits.dtype) * position_scale
    if knots is None:
        ceil, floor = positions.ceil().long(), positions.floor().long()
        fraction = positions - floor
        logits = logits + z.gather(-1, ceil) * fraction + z.gather(-1, floor) * (1 - fraction)
    else:
        piece, (values, slopes) = torch.bucketize(counts.detach(), knots.to(counts.dtype)), z.chunk(2, -1)
        left = F.pad(knots.clamp(min=0), (1, 0)).to(counts.dtype)[piece]
        logits = logits + values.gather(-1, piece) + slopes.gather(-1, piece) * (positions - left)
    logits = logits + _bias(query, rows, scaling, decay, relative)
    return _attend(logits, value, seen, kept)


def scan_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor | None = None,
    *,
    rows: torch.Tensor,
    scaling: float,
    ranges: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """CoPE_ALiBi with slopes (H,), else stick-breaking attention; see the functions of `kernel_scan`."""
    Q, K = query.shape[2], key.shape[2]
    seen = visible(Q, K, rows, ranges=ranges)
    logits = _logits(query[:, :, rows], key, scaling)
    if slopes is not None:
        positions = (torch.sigmoid(logits) * seen).flip(-1).cumsum(-1).flip(-1)
        return _attend(logits + slopes.to(logits.dtype)[:, None, None] * positions, value, seen, kept)
    # Rows do not see their own key.
    own = rows[None, None] + (K - Q) if ranges is None else ranges[:, :, rows, 1].long() - 1
    seen = seen & (torch.arange(K, device=rows.device) != own[..., None])
    spent = (F.softplus(logits) * seen).flip(-1).cumsum(-1).flip(-1)
    weights = torch.exp(logits - spent) * seen
    weights = weights if kept is None else weights * kept
    return weights.to(value.dtype) @ _heads(value, query.shape[1])


def token_gated_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: torch.Tensor,
    table: torch.Tensor,
    matrix: torch.Tensor,
    *,
    rows: torch.Tensor,
    scaling: float,
    ranges: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token-gated CoPE (see `position_token_gated_cope`) with gates (B, H, K), table (P, D) and W_p (D, D)."""
    seen = visible(query.shape[2], key.shape[2], rows, ranges=ranges)
    query = query[:, :, rows]
    logits = _logits(query, key, scaling)
    positions = (gates[:, :, None].to(logits.dtype) * seen).cumsum(-1).clamp(0, table.shape[0] - 1.001)
    # As in the kernel, W_p q and the table have the type of the query.
    own = (query.to(logits.dtype) @ matrix.T.to(logits.dtype)).to(query.dtype)
    z = _logits(own, table.to(query.dtype).expand(1, own.shape[1], -1, -1), scaling)
    floor = positions.detach().long()
    fraction = positions - floor
    logits = logits + z.gather(-1, floor) * (1 - fraction) + z.gather(-1, floor + 1) * fraction
    return _attend(logits, value, seen, kept)


def pope_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shift: torch.Tensor | None = None,
    *,
    tables: tuple[torch.Tensor, ...],
    rows: torch.Tensor,
    scaling: float,
    ranges: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """PoPE (Eq. 4 to 7 of 2509.10534) of magnitudes: sum over c of mu_q mu_k cos((s - t) theta_c + shift_c).

    Args:
        query: (B, H, Q, D), the first R channels magnitudes, the others plain.
        key: (B, G, K, D), likewise.
        value: (B, G, K, D).
        shift: (H, R) or None.
        tables: cos and sin of the query positions (1 or B, Q, R), then of the key positions (1 or B, K, R).
        rows: int64 (N,).
        scaling: the factor on the score.
        ranges: see `visible`.
    """
    dtype = compute_dtype(query.dtype)
    cos_q, sin_q, cos_k, sin_k = (table.to(dtype)[:, None] for table in tables)
    cos_q, sin_q = cos_q[:, :, rows], sin_q[:, :, rows]
    R = cos_q.shape[-1]
    if shift is not None:
        cos, sin = shift.to(dtype).cos()[:, None], shift.to(dtype).sin()[:, None]
        cos_q, sin_q = cos_q * cos + sin_q * sin, sin_q * cos - cos_q * sin

    def turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.to(states.dtype), sin.to(states.dtype)
        return torch.cat((states[..., :R] * cos, states[..., :R] * sin, states[..., R:]), dim=-1)

    seen = visible(query.shape[2], key.shape[2], rows, ranges=ranges)
    logits = _logits(turn(query[:, :, rows], cos_q, sin_q), turn(key, cos_k, sin_k), scaling)
    return _attend(logits, value, seen, kept)
