"""CoPE attention in Triton: outputs and all gradients in memory linear in the length.

Contextual positions grow to the left, and are clamped to P - 1. So each row has a window of keys at its right end in
which positions vary; left of it the bias is a constant of the row, z[P - 1], and attention is plain. The two parts are
separate kernels, each with its own tiles:

1. `_position_values`: z[i, n] = position_scale * r_i.e[n], for a chunk of rows; r is the query, or one of its own.
2. `_window_forward` walks key blocks right to left with a running sum of gates per row, until every row of its block
   has reached P - 1 or has no keys left. It leaves the output and log-sum-exp over the window, the first key of the
   window of each row block (`start`), and per row: where it stopped counting (`stop`), its count there (`total`), and
   z[P - 1] (`constant`).
3. `kernel_flash` attends to the keys before `start`, beginning from what the window left.

Backward, with dL_ij the gradient of logit ij:

4. `_window_rows` walks left to right: positions are `total` minus a running sum of gates, in fixed point. That is exact
   if the gates are those of the forward pass. Other tiles or matrix instructions can round them differently: positions
   are then a few units of the last place off, so they are clamped on both sides. The gradient of a gate is the running
   sum of the gradients of the positions left of it. The kernel writes dq, and for every key block what
   `_window_columns` needs to begin there: the count and the running gradient at its left edge ("carries").
5. The gradient of z needs no atomics. Along a row, floor(p) falls by at most 1 from key to key, so each level n is
   one run of keys, and prefix sums of dL and of dL * fraction, stored where a run ends, give the sums over runs as
   differences. `_table_rows` forms dz from them, and adds its part to dq; the gradient of the table is a product.
6. `_window_columns` gives dk and dv of the window, block by block, in a fixed order: the result is deterministic.
7. `kernel_flash` adds the gradients of the plain part.

Steps 1, 4, 5 and 6 run over chunks of rows, so that z, the prefix sums and the carries (one pair per row and key block,
which would be quadratic) stay within a budget proportional to the size of the query.

All programs are along the first axis of a grid: the others have at most 65,535.

Closed gates never reach P - 1: then the window is the whole row, correct and slower.

Axes: B batch, H query heads, G key heads (query head h uses key head h // (H // G)), Q query rows, K keys, D head dim,
P positions.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from .kernel_flash import (
    aligned,
    check_inputs,
    flash_backward_columns,
    flash_backward_rows,
    flash_decode,
    flash_forward,
    row_products,
)
from .kernel_launch import Tiles, block_width, dot, launch, precision

try:
    import triton
    import triton.language as tl
except ImportError:  # Transformers checks the imports of every file of a checkpoint, but not those in a `try`.
    raise

# Far below every logit; -inf would give NaN in rows that see nothing of a block.
MASKED = tl.constexpr(-1e30)
# The log-sum-exp of a row that saw nothing: exp(logit - lse) is 0.
NOTHING = tl.constexpr(1e30)
# Query rows of a window program; `start` has one entry for so many rows.
WINDOW_ROWS = 64
# Columns of a window program, at most.
MOST_COLUMNS = 64
# Scratch memory of the backward pass, as a multiple of the query's, and at least so many bytes.
SCRATCH_FACTOR, SCRATCH_BYTES = 4, 32 << 20

_NAMESPACE = "whatwhere_" + hashlib.sha256(__name__.encode()).hexdigest()[:16]


@triton.jit
def _row_ranges(ranges, batch, rows, Q, K, RANGES: tl.constexpr, SHARED: tl.constexpr):
    """The keys low <= j < high of the rows. Rows past the end see nothing. SHARED: all see what row 0 sees."""
    if SHARED:
        index = rows * 0
        inside = rows >= 0
    else:
        index = rows
        inside = rows < Q
    if RANGES:
        base = ranges + (batch * (Q + K) + index) * 2
        low = tl.load(base, mask=inside, other=0)
        high = tl.load(base + 1, mask=inside, other=0)
    else:
        low = index * 0
        high = tl.where(inside, index + (K - Q + 1), 0)
    return low, high


@triton.jit
def _visible(ranges, batch, columns, low, high, Q, K, RANGES: tl.constexpr):
    """Returns which rows see which of the columns: (BLOCK_M, BLOCK_N)."""
    seen = (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
    if RANGES:
        valid = tl.load(ranges + (batch * (Q + K) + Q + columns) * 2, mask=columns < K, other=0)
        seen = seen & (valid != 0)[None, :]
    return seen


@triton.jit
def _tile(base, index, stride, count, channels, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads rows `index` of a (count, D) matrix, zeros outside: (len(index), BLOCK_D)."""
    mask = (index < count)[:, None]
    if D != BLOCK_D:
        mask = mask & (channels < D)[None, :]
    return tl.load(base + index.to(tl.int64)[:, None] * stride + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _counts(gates, counted, BITS: tl.constexpr):
    """Gates as fixed-point numbers with BITS fractional bits, 0 where not counted or NaN: int32.

    Sums of integers are exact in any order: forward and backward pass find the same positions, and counts can be taken
    apart again. A gate is at most 1, so a level is never skipped.
    """
    known = tl.where(gates >= 0, gates, 0.0)
    return tl.where(counted, (known * (1 << BITS) + 0.5).to(tl.int32), 0)


@triton.jit
def _triangle(like, BLOCK_N: tl.constexpr, NEWER: tl.constexpr):
    """Ones where a sum over a block of keys includes a key: those up to it, or, with NEWER, those from it on.

    Products with it are running sums that stay in the layout of the logits.
    """
    keys = tl.arange(0, BLOCK_N)
    if NEWER:
        included = keys[:, None] >= keys[None, :]
    else:
        included = keys[:, None] <= keys[None, :]
    # By way of float32: the interpreter takes a bool for the bits of a bfloat16.
    return included.to(tl.float32).to(like)


@triton.jit
def _running_counts(counts, triangle):
    """Exact sums of fixed-point counts along a row; `triangle` in float16, which has 11 bits and so takes two parts."""
    upper = dot((counts >> 11).to(tl.float16), triangle, None, "ieee")
    lower = dot((counts & 2047).to(tl.float16), triangle, None, "ieee")
    return (upper.to(tl.int32) << 11) + lower.to(tl.int32)


@triton.jit
def _running_sums(terms, triangle):
    """Sums of float32 terms along a row: in float32 with such a triangle, with 16 bits of each term with bfloat16."""
    if triangle.dtype == tl.float32:
        return dot(terms, triangle, None, "ieee")
    else:
        leading = terms.to(tl.bfloat16)
        rest = (terms - leading.to(tl.float32)).to(tl.bfloat16)
        return dot(rest, triangle, dot(leading, triangle, None, "ieee"), "ieee")


@triton.jit
def _pack(first, second):
    """Two float32 as one int64: scattered pairs are read and written at once."""
    low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return low | (second.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _unpack(pair):
    """The two float32 of `_pack`."""
    first = (pair & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return first, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _interpolate(values, position, seen, BITS: tl.constexpr):
    """Returns floor, fraction, z[floor] and z[floor + 1] - z[floor] at fixed-point positions 0 to P - 1.

    At P - 1 the step is 0.
    """
    floor = position >> BITS
    fraction = (position & ((1 << BITS) - 1)).to(tl.float32) * (1.0 / (1 << BITS))
    below, step = _unpack(tl.load(values + floor, mask=seen, other=0))
    return floor, fraction, below, step


@triton.jit
def _position_values(
    query,
    table,
    values,
    stride_qb,
    stride_qh,
    stride_qm,
    scale,
    H,
    P,
    first_row,
    chunk_rows,
    row_count,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """values (B * H, chunk_rows, P): pairs of z = scale * q.e and its step to the next position, from first_row on.

    query: what is multiplied with the table.

    If the query is not float32, the table is used as a sum of two numbers of the query's type.
    """
    row_blocks = tl.cdiv(chunk_rows, BLOCK_M)
    member = (tl.program_id(0) // row_blocks).to(tl.int64)
    local = tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    base = query + (member // H) * stride_qb + (member % H) * stride_qh
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    step = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, D, BLOCK_K):
        channels = first + tl.arange(0, BLOCK_K)
        q = _tile(base, first_row + local, stride_qm, row_count, channels, D, 0)
        mask = (channels < D)[:, None] & (columns < P)[None, :]
        e = tl.load(table + channels[:, None] * P + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        following = tl.minimum(columns + 1, P - 1)
        rise = tl.load(table + channels[:, None] * P + following[None, :], mask=mask, other=0.0).to(tl.float32) - e
        leading, leading_rise = e.to(q.dtype), rise.to(q.dtype)
        z = dot(q, leading, z, PRECISION)
        step = dot(q, leading_rise, step, PRECISION)
        if q.dtype != tl.float32:
            z = dot(q, (e - leading.to(tl.float32)).to(q.dtype), z, PRECISION)
            step = dot(q, (rise - leading_rise.to(tl.float32)).to(q.dtype), step, PRECISION)
    to = values + (member * chunk_rows + local.to(tl.int64))[:, None] * P + columns[None, :]
    tl.store(to, _pack(z * scale, step * scale), mask=(local < chunk_rows)[:, None] & (columns < P)[None, :])


@triton.jit
def _window_forward(
    query,
    key,
    gate_key,
    value,
    values,
    ranges,
    out,
    lse,
    start,
    end,
    stop,
    total,
    constant,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_gb,
    stride_gh,
    stride_gn,
    stride_vb,
    stride_vh,
    stride_vn,
    scaling,
    H,
    G,
    Q,
    K,
    P,
    first_row,
    chunk_rows,
    row_count,
    blocks,
    RANGES: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
    BITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The window of one block of rows, of `row_count` a head: Q, or with SHARED as many as see what row 0 sees."""
    row_blocks = tl.cdiv(tl.minimum(chunk_rows, row_count - first_row), BLOCK_M)
    row_block = tl.program_id(0) % row_blocks
    member = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch = member // H
    head = member % H
    local = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first_row + local
    inside = rows < row_count
    channels = tl.arange(0, BLOCK_D)
    low, high = _row_ranges(ranges, batch, rows, Q, K, RANGES, SHARED)
    high = tl.where(inside, high, 0)
    q = _tile(query + batch * stride_qb + head * stride_qh, rows, stride_qm, row_count, channels, D, BLOCK_D)
    group = head // (H // G)
    key += batch * stride_kb + group * stride_kh
    value += batch * stride_vb + group * stride_vh
    if GATE:
        gate_key += batch * stride_gb + group * stride_gh
    z = values + (member * chunk_rows + local.to(tl.int64)) * P
    last = (P - 1) << BITS

    sees = high > low
    bottom = tl.min(tl.where(sees, low, K))
    block = (tl.max(high) + BLOCK_N - 1) // BLOCK_N - 1
    count = tl.zeros([BLOCK_M], tl.int32)
    stopped = tl.where(sees, high, 0)
    maximum = tl.full([BLOCK_M], MASKED, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pending = tl.max(sees.to(tl.int32))
    newer = _triangle(tl.float16, BLOCK_N, True)
    while (pending > 0) & (block * BLOCK_N + BLOCK_N > bottom):
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k = _tile(key, columns, stride_kn, K, channels, D, BLOCK_D)
        logits = dot(q, tl.trans(k), None, PRECISION) * scaling
        seen = _visible(ranges, batch, columns, low, high, Q, K, RANGES)
        if GATE:
            opening = dot(q, tl.trans(_tile(gate_key, columns, stride_gn, K, channels, D, BLOCK_D)), None, PRECISION)
            gates = tl.sigmoid(opening * scaling)
            # Counts have no NaN: a row with such a gate gets it here, and by its log-sum-exp in the backward pass.
            logits = tl.where(gates == gates, logits, float("nan"))
        else:
            gates = tl.sigmoid(logits)
        # A row stops counting where it has reached the last position: fixed-point numbers do not overflow.
        counting = count < last
        stopped = tl.where(counting & sees, block * BLOCK_N, stopped)
        counts = _counts(gates, seen & counting[:, None], BITS)
        position = tl.minimum(_running_counts(counts, newer) + count[:, None], last)
        _, fraction, below, step = _interpolate(z[:, None], position, seen, BITS)
        logits = tl.where(seen, logits + below + fraction * step, MASKED)
        top = tl.maximum(maximum, tl.max(logits, 1))
        shrink = tl.exp(maximum - top)
        weights = tl.where(seen, tl.exp(logits - top[:, None]), 0.0)
        weight = weight * shrink + tl.sum(weights, 1)
        v = _tile(value, columns, stride_vn, K, channels, D, BLOCK_D)
        sums = dot(weights.to(v.dtype), v, sums * shrink[:, None], PRECISION)
        maximum = top
        count += tl.sum(counts, 1)
        unfinished = sees & (low < block * BLOCK_N) & (count < last)
        pending = tl.max(unfinished.to(tl.int32))
        block -= 1

    # Or NaN.
    some = weight != 0
    flat = member * row_count + rows.to(tl.int64)
    result = sums / tl.where(some, weight, 1.0)[:, None]
    to = out + flat[:, None] * D + channels[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=inside[:, None] & (channels < D)[None, :])
    tl.store(lse + flat, tl.where(some, maximum + tl.log(tl.where(some, weight, 1.0)), NOTHING), mask=inside)
    tl.store(total + flat, count, mask=inside)
    tl.store(stop + flat, stopped, mask=inside)
    at_last, _ = _unpack(tl.load(z + P - 1, mask=inside, other=0))
    tl.store(constant + flat, at_last, mask=inside)
    this = member * blocks + first_row // BLOCK_M + row_block
    tl.store(start + this, (block + 1) * BLOCK_N)
    tl.store(end + this, tl.max(high))


@triton.jit
def _window_rows(
    grad,
    query,
    key,
    gate_key,
    value,
    values,
    ranges,
    lse,
    delta,
    start,
    end,
    stop,
    total,
    grad_query,
    levels,
    carried_count,
    carried_slope,
    stride_ob,
    stride_oh,
    stride_om,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_gb,
    stride_gh,
    stride_gn,
    stride_vb,
    stride_vh,
    stride_vn,
    scaling,
    H,
    G,
    Q,
    K,
    P,
    first_row,
    chunk_rows,
    blocks,
    RANGES: tl.constexpr,
    GATE: tl.constexpr,
    BITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq of the window of one block of rows, prefix sums of dL per level, carries per key block; all float32.

    grad_query (B * H, chunk_rows, D); levels (B * H, chunk_rows, P), zero where nothing is written, pairs of
    the sums of dL and of dL * fraction; carries (B * H, key blocks, chunk_rows).
    """
    row_blocks = tl.cdiv(tl.minimum(chunk_rows, Q - first_row), BLOCK_M)
    row_block = tl.program_id(0) % row_blocks
    member = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch = member // H
    head = member % H
    local = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first_row + local
    inside = rows < Q
    channels = tl.arange(0, BLOCK_D)
    low, high = _row_ranges(ranges, batch, rows, Q, K, RANGES, False)
    q = _tile(query + batch * stride_qb + head * stride_qh, rows, stride_qm, Q, channels, D, BLOCK_D)
    do = _tile(grad + batch * stride_ob + head * stride_oh, rows, stride_om, Q, channels, D, BLOCK_D)
    group = head // (H // G)
    key += batch * stride_kb + group * stride_kh
    value += batch * stride_vb + group * stride_vh
    if GATE:
        gate_key += batch * stride_gb + group * stride_gh
    flat = member * Q + rows.to(tl.int64)
    row_lse = tl.load(lse + flat, mask=inside, other=NOTHING)
    row_delta = tl.load(delta + flat, mask=inside, other=0.0)
    row_stop = tl.load(stop + flat, mask=inside, other=0)
    here = member * chunk_rows + local.to(tl.int64)
    z = values + here * P
    key_blocks = (K + BLOCK_N - 1) // BLOCK_N
    carries = member * key_blocks * chunk_rows + local
    last = (P - 1) << BITS

    # The count of the keys that are still ahead, the one at the left edge of the block included.
    count = tl.load(total + flat, mask=inside, other=0)
    slope = tl.zeros([BLOCK_M], tl.float32)
    sum_before = tl.zeros([BLOCK_M], tl.float32)
    fraction_before = tl.zeros([BLOCK_M], tl.float32)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    older = _triangle(tl.float16, BLOCK_N, False)
    older_terms = _triangle(tl.float32 if query.dtype.element_ty == tl.float32 else tl.bfloat16, BLOCK_N, False)
    this = member * blocks + first_row // BLOCK_M + row_block
    first = tl.load(start + this)
    for block in range(first // BLOCK_N, (tl.load(end + this) + BLOCK_N - 1) // BLOCK_N):
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = _visible(ranges, batch, columns, low, high, Q, K, RANGES) & (columns >= first)[None, :]
        tl.store(carried_count + carries + block * chunk_rows, count, mask=inside)
        tl.store(carried_slope + carries + block * chunk_rows, slope, mask=inside)
        k = _tile(key, columns, stride_kn, K, channels, D, BLOCK_D)
        v = _tile(value, columns, stride_vn, K, channels, D, BLOCK_D)
        logits = dot(q, tl.trans(k), None, PRECISION) * scaling
        if GATE:
            gk = _tile(gate_key, columns, stride_gn, K, channels, D, BLOCK_D)
            gates = tl.sigmoid(dot(q, tl.trans(gk), None, PRECISION) * scaling)
        else:
            gates = tl.sigmoid(logits)
        counted = seen & (columns[None, :] >= row_stop[:, None])
        counts = _counts(gates, counted, BITS)
        after = count[:, None] - _running_counts(counts, older)
        position = tl.minimum(tl.maximum(after + counts, 0), last)
        floor, fraction, below, step = _interpolate(z[:, None], position, seen, BITS)
        weights = tl.where(seen, tl.exp(logits + below + fraction * step - row_lse[:, None]), 0.0)
        dlogits = weights * (dot(do, tl.trans(v), None, PRECISION) - row_delta[:, None])
        dposition = dlogits * step
        dgates = slope[:, None] + _running_sums(dposition, older_terms)
        dgates = tl.where(counted, dgates * gates * (1.0 - gates), 0.0)
        if GATE:
            dq = dot(dgates.to(gk.dtype), gk, dq, PRECISION)
            dq = dot(dlogits.to(k.dtype), k, dq, PRECISION)
        else:
            dq = dot((dlogits + dgates).to(k.dtype), k, dq, PRECISION)
        # The last key of a level, going right, leaves the sums up to it; those of level 0 come after the loop.
        leaving = seen & ((tl.minimum(tl.maximum(after, 0), last) >> BITS) < floor)
        part = dlogits * fraction
        sums = sum_before[:, None] + _running_sums(dlogits, older_terms)
        fractions = fraction_before[:, None] + _running_sums(part, older_terms)
        tl.store(levels + here[:, None] * P + floor, _pack(sums, fractions), mask=leaving)
        sum_before += tl.sum(dlogits, 1)
        fraction_before += tl.sum(part, 1)
        slope += tl.sum(dposition, 1)
        count -= tl.sum(counts, 1)
    # Every row ends in level 0.
    tl.store(levels + here * P, _pack(sum_before, fraction_before), mask=inside)
    to = grad_query + here[:, None] * D + channels[None, :]
    tl.store(to, dq * scaling, mask=inside[:, None] & (channels < D)[None, :])


@triton.jit
def _level(base, index, P, inside):
    """Returns the sums up to and including levels `index` of each row, 0 outside 0..P - 1: two (BLOCK_M, BLOCK_N)."""
    mask = inside[:, None] & ((index >= 0) & (index < P))[None, :]
    return _unpack(tl.load(base[:, None] + index[None, :], mask=mask, other=0))


@triton.jit
def _table_rows(
    table,
    ranges,
    start,
    window_query,
    levels,
    grad_values,
    grad_query,
    grad_position_query,
    scale,
    H,
    Q,
    K,
    P,
    first_row,
    chunk_rows,
    blocks,
    RANGES: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_values (B * H, chunk_rows, P): the gradient of z; grad_query (B, H, Q, D): window_query + its part of dq.

    grad_position_query (B, H, Q, D): that part, if a query of its own is multiplied with the table, else None.
    z enters by z[floor] (1 - fraction) + z[floor + 1] fraction, so with sums S of dL and F of dL * fraction over level
    n, dz[n] = S[n] - F[n] + F[n - 1]. The plain part belongs to the last level; all dL of a row sum to 0.
    """
    row_blocks = tl.cdiv(chunk_rows, BLOCK_M)
    member = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch = member // H
    local = tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first_row + local
    inside = (rows < Q) & (local < chunk_rows)
    channels = tl.arange(0, BLOCK_D)
    here = member * chunk_rows + local.to(tl.int64)
    base = levels + here * P
    low, _high = _row_ranges(ranges, batch, rows, Q, K, RANGES, False)
    first = tl.load(start + member * blocks + rows // WINDOW, mask=inside, other=0)
    of_window, _of_fractions = _unpack(tl.load(base, mask=inside, other=0))
    plain = tl.where(first > low, -of_window, 0.0)
    mask = inside[:, None] & (channels < D)[None, :]
    flat = member * Q + rows.to(tl.int64)
    to = flat[:, None] * D + channels[None, :]
    dq = tl.load(window_query + here[:, None] * D + channels[None, :], mask=mask, other=0.0)
    if grad_position_query is not None:
        tl.store(grad_query + to, dq.to(grad_query.dtype.element_ty), mask=mask)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(0, (P + BLOCK_N - 1) // BLOCK_N):
        level = block * BLOCK_N + tl.arange(0, BLOCK_N)
        sums, fractions = _level(base, level, P, inside)
        sums_above, fractions_above = _level(base, level + 1, P, inside)
        _sums_below, fractions_below = _level(base, level - 1, P, inside)
        dz = (
            (sums - sums_above)
            - (fractions - fractions_above)
            + tl.where((level > 0)[None, :], fractions_below - fractions, 0.0)
        )
        dz += tl.where((level == P - 1)[None, :], plain[:, None], 0.0)
        dz *= scale
        known = (level < P)[None, :]
        rounded = dz.to(grad_values.dtype.element_ty)
        tl.store(grad_values + here[:, None] * P + level[None, :], rounded, mask=inside[:, None] & known)
        e = tl.load(table + channels[:, None] * P + level[None, :], mask=(channels < D)[:, None] & known, other=0.0)
        dq = dot(rounded, tl.trans(e.to(rounded.dtype)), dq, PRECISION)
    if grad_position_query is not None:
        grad_query = grad_position_query
    tl.store(grad_query + to, dq.to(grad_query.dtype.element_ty), mask=mask)


@triton.jit
def _window_columns(
    grad,
    query,
    key,
    gate_key,
    value,
    values,
    ranges,
    lse,
    delta,
    start,
    end,
    stop,
    carried_count,
    carried_slope,
    grad_key,
    grad_gate_key,
    grad_value,
    stride_ob,
    stride_oh,
    stride_om,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_gb,
    stride_gh,
    stride_gn,
    stride_vb,
    stride_vh,
    stride_vn,
    scaling,
    H,
    G,
    Q,
    K,
    P,
    first_row,
    chunk_rows,
    blocks,
    RANGES: tl.constexpr,
    GATE: tl.constexpr,
    BITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the chunk's part of dk, dv (and of the gate keys) to float32 (B, G, K, D), for one block of keys.

    ROW_BLOCKS: a power of two, at least the row blocks of a chunk.
    """
    # Keys that no row of the chunk sees are not visited.
    ahead = K
    if not RANGES:
        ahead = K - Q + tl.minimum(first_row + chunk_rows, Q)
    column_blocks = tl.cdiv(ahead, BLOCK_N)
    block = tl.program_id(0) % column_blocks
    member = (tl.program_id(0) // column_blocks).to(tl.int64)
    batch = member // G
    group = member % G
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_D)
    k = _tile(key + batch * stride_kb + group * stride_kh, columns, stride_kn, K, channels, D, BLOCK_D)
    v = _tile(value + batch * stride_vb + group * stride_vh, columns, stride_vn, K, channels, D, BLOCK_D)
    if GATE:
        gk = _tile(gate_key + batch * stride_gb + group * stride_gh, columns, stride_gn, K, channels, D, BLOCK_D)
        dgk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    key_blocks = (K + BLOCK_N - 1) // BLOCK_N
    last = (P - 1) << BITS
    older = _triangle(tl.float16, BLOCK_N, False)
    older_terms = _triangle(tl.float32 if query.dtype.element_ty == tl.float32 else tl.bfloat16, BLOCK_N, False)
    touched = 0
    candidates = tl.arange(0, ROW_BLOCKS)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        of_head = batch * H + head
        index = of_head * blocks + first_row // BLOCK_M + candidates
        known = (candidates * BLOCK_M < chunk_rows) & (first_row // BLOCK_M + candidates < blocks)
        starts = tl.load(start + index, mask=known, other=0)
        ends = tl.load(end + index, mask=known, other=0)
        needed = known & (starts < (block + 1) * BLOCK_N) & (ends > block * BLOCK_N)
        touched = tl.maximum(touched, tl.max(needed.to(tl.int32)))
        begin = tl.min(tl.where(needed, candidates, ROW_BLOCKS))
        finish = tl.max(tl.where(needed, candidates + 1, 0))
        for row_block in range(begin, finish):
            this = of_head * blocks + first_row // BLOCK_M + row_block
            first = tl.load(start + this)
            if first < (block + 1) * BLOCK_N:
                local = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
                rows = first_row + local
                inside = rows < Q
                low, high = _row_ranges(ranges, batch, rows, Q, K, RANGES, False)
                seen = _visible(ranges, batch, columns, low, high, Q, K, RANGES) & (columns >= first)[None, :]
                q = _tile(query + batch * stride_qb + head * stride_qh, rows, stride_qm, Q, channels, D, BLOCK_D)
                do = _tile(grad + batch * stride_ob + head * stride_oh, rows, stride_om, Q, channels, D, BLOCK_D)
                flat = of_head * Q + rows.to(tl.int64)
                row_lse = tl.load(lse + flat, mask=inside, other=NOTHING)
                row_delta = tl.load(delta + flat, mask=inside, other=0.0)
                row_stop = tl.load(stop + flat, mask=inside, other=0)
                carry = (of_head * key_blocks + block) * chunk_rows + local
                count = tl.load(carried_count + carry, mask=inside, other=0)
                slope = tl.load(carried_slope + carry, mask=inside, other=0.0)
                logits = dot(q, tl.trans(k), None, PRECISION) * scaling
                if GATE:
                    gates = tl.sigmoid(dot(q, tl.trans(gk), None, PRECISION) * scaling)
                else:
                    gates = tl.sigmoid(logits)
                counted = seen & (columns[None, :] >= row_stop[:, None])
                counts = _counts(gates, counted, BITS)
                position = count[:, None] - _running_counts(counts, older) + counts
                position = tl.minimum(tl.maximum(position, 0), last)
                z = values + (of_head * chunk_rows + local.to(tl.int64)) * P
                _, fraction, below, step = _interpolate(z[:, None], position, seen, BITS)
                weights = tl.where(seen, tl.exp(logits + below + fraction * step - row_lse[:, None]), 0.0)
                dlogits = weights * (dot(do, tl.trans(v), None, PRECISION) - row_delta[:, None])
                dgates = slope[:, None] + _running_sums(dlogits * step, older_terms)
                dgates = tl.where(counted, dgates * gates * (1.0 - gates), 0.0)
                dv = dot(tl.trans(weights.to(do.dtype)), do, dv, PRECISION)
                if GATE:
                    dgk = dot(tl.trans(dgates.to(q.dtype)), q, dgk, PRECISION)
                    dk = dot(tl.trans(dlogits.to(q.dtype)), q, dk, PRECISION)
                else:
                    dk = dot(tl.trans((dlogits + dgates).to(q.dtype)), q, dk, PRECISION)
    if touched > 0:
        mask = (columns < K)[:, None] & (channels < D)[None, :]
        to = (member * K + columns.to(tl.int64))[:, None] * D + channels[None, :]
        tl.store(grad_key + to, tl.load(grad_key + to, mask=mask) + dk * scaling, mask=mask)
        tl.store(grad_value + to, tl.load(grad_value + to, mask=mask) + dv, mask=mask)
        if GATE:
            tl.store(grad_gate_key + to, tl.load(grad_gate_key + to, mask=mask) + dgk * scaling, mask=mask)


def _window_tiles(head_dim: int, dtype: torch.dtype) -> tuple[list[Tiles], list[Tiles]]:
    """The tiles of the forward and of the backward kernels, the preferred first.

    Registers are the limit (`scripts.compile_kernels` prints them). On Hopper a matrix instruction has 64 rows for 4
    warps, and 8 warps do some work twice. Those of the backward pass have the same columns: carries depend on it.
    """
    if dtype == torch.float32:
        tiles = [Tiles(WINDOW_ROWS, 16, warps=8), Tiles(WINDOW_ROWS, 16)]
        return tiles, tiles
    narrow = [Tiles(WINDOW_ROWS, 16), Tiles(WINDOW_ROWS, 16, warps=8)]
    wide = [Tiles(WINDOW_ROWS, 32), Tiles(WINDOW_ROWS, 32, warps=8)]
    return wide + narrow[:1], wide if head_dim <= 64 else narrow


def _chunk_rows(query: torch.Tensor, key_length: int, num_positions: int, columns: int) -> int:
    """Returns how many query rows a pass over a chunk takes: whole row blocks, within the budget."""
    B, H, Q, D = query.shape
    per_row = B * H * (4 * D + (16 + query.element_size()) * num_positions + 8 * triton.cdiv(key_length, columns))
    budget = max(SCRATCH_BYTES, SCRATCH_FACTOR * query.numel() * query.element_size())
    fitting, all_blocks = max(1, budget // (per_row * WINDOW_ROWS)), triton.cdiv(Q, WINDOW_ROWS)
    # A power of two, of which a kernel has a constant.
    return WINDOW_ROWS * (all_blocks if all_blocks <= fitting else 1 << (fitting.bit_length() - 1))


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


class _Pass:
    """What the forward and the backward pass share: shapes, constants, chunks, positions."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: torch.Tensor,
        gate_key: torch.Tensor | None,
        position_query: torch.Tensor | None,
        ranges: torch.Tensor | None,
        scaling: float,
        position_scale: float,
    ) -> None:
        self.query, self.key, self.value = aligned(query), aligned(key), aligned(value)
        # What is multiplied with the table.
        self.position_query = self.query if position_query is None else aligned(position_query)
        self.own_position_query = position_query is not None
        self.gate_key = aligned(gate_key) if gate_key is not None else None
        self.table = table.contiguous()
        self.ranges = ranges.contiguous() if ranges is not None else None
        self.scaling, self.position_scale = scaling, position_scale
        self.B, self.H, self.Q, self.D = query.shape
        self.G, self.K = key.shape[1], key.shape[2]
        self.P = table.shape[1]
        self.forward_tiles, self.backward_tiles = _window_tiles(self.D, query.dtype)
        self.blocks = triton.cdiv(self.Q, WINDOW_ROWS)
        self.chunk = _chunk_rows(query, self.K, self.P, self.backward_tiles[0].columns)
        gate = self.gate_key if self.gate_key is not None else self.key
        self.strides = (*_strides(self.key), *_strides(gate), *_strides(self.value))
        self.constants: dict[str, Any] = {
            "RANGES": ranges is not None,
            "GATE": gate_key is not None,
            # Fractional bits of counts: a gate has two parts of 11 bits, and counts stay below P + MOST_COLUMNS.
            "BITS": min(21, 30 - (self.P + MOST_COLUMNS - 1).bit_length()),
            "D": self.D,
            "BLOCK_D": block_width(self.D),
            "PRECISION": precision(query.dtype),
        }
        self.tune = (self.D, query.dtype, ranges is not None, gate_key is not None)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.query.device)

    def chunks(self) -> range:
        """The first rows of the chunks."""
        return range(0, self.Q, self.chunk)

    def position_values(self, first: int, into: torch.Tensor) -> None:
        """Computes z of the chunk that begins at row `first`."""
        launch(
            _position_values,
            lambda tiles: (triton.cdiv(into.shape[1], tiles.rows) * into.shape[0], triton.cdiv(self.P, tiles.columns)),
            [Tiles(64, 64) if self.query.dtype != torch.float32 else Tiles(32, 32)],
            (),
            (
                self.position_query,
                self.table,
                into,
                *_strides(self.position_query),
                self.position_scale,
                self.H,
                self.P,
                first,
                into.shape[1],
                self.Q,
            ),
            {
                "D": self.D,
                "BLOCK_K": min(self.constants["BLOCK_D"], 64 if self.query.dtype != torch.float32 else 16),
                "PRECISION": self.constants["PRECISION"],
            },
        )

    def window_forward(self, *, shared_rows: bool = False) -> dict[str, torch.Tensor]:
        """Attention over the windows. See the text of this file for what it returns.

        shared_rows: all rows see what row 0 of the ranges, or the last row of causal attention, sees (decoding).
        """
        B, H, Q = self.B, self.H, self.Q
        rows = max(16, triton.next_power_of_2(Q)) if shared_rows else WINDOW_ROWS
        chunk = Q if shared_rows else self.chunk
        blocks = triton.cdiv(Q, rows)
        found = {
            "out": self.empty(B, H, Q, self.D, dtype=self.query.dtype),
            "lse": self.empty(B, H, Q),
            "start": self.empty(B, H, blocks, dtype=torch.int32),
            "end": self.empty(B, H, blocks, dtype=torch.int32),
            "stop": self.empty(B, H, Q, dtype=torch.int32),
            "total": self.empty(B, H, Q, dtype=torch.int32),
            "constant": self.empty(B, H, Q),
        }
        values = self.empty(B * H, chunk, self.P, dtype=torch.int64)
        tiles = [Tiles(rows, 32)] if shared_rows else self.forward_tiles
        for first in range(0, Q, chunk):
            self.position_values(first, values)
            launch(
                _window_forward,
                (triton.cdiv(min(chunk, Q - first), rows) * B * H,),
                tiles,
                (*self.tune, rows, shared_rows),
                (
                    self.query,
                    self.key,
                    self.gate_key,
                    self.value,
                    values,
                    self.ranges,
                    *found.values(),
                    *_strides(self.query),
                    *self.strides,
                    self.scaling,
                    H,
                    self.G,
                    1 if shared_rows else Q,
                    self.K,
                    self.P,
                    first,
                    chunk,
                    Q,
                    blocks,
                ),
                {**self.constants, "SHARED": shared_rows},
            )
        return found

    def window_backward(
        self, grad: torch.Tensor, delta: torch.Tensor, window: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Gradients of the windows.

        Of query (B, H, Q, D), table (D, P) float32, key, value and gate keys float32, and of the query of the table
        (B, H, Q, D) if it is one of its own.

        Args:
            grad: (B, H, Q, D). delta: float32 (B, H, Q), the sum of grad * out.
            window: start, end, stop, total of the forward pass, and the log-sum-exp over all keys.
        """
        B, H, Q, D, P = self.B, self.H, self.Q, self.D, self.P
        members, chunk = B * H, self.chunk
        columns = self.backward_tiles[0].columns
        values = self.empty(members, chunk, P, dtype=torch.int64)
        levels = self.empty(members, chunk, P, dtype=torch.int64)
        grad_values = self.empty(members, chunk, P, dtype=self.query.dtype)
        window_query = self.empty(members, chunk, D)
        key_blocks = triton.cdiv(self.K, columns)
        counts = self.empty(members, key_blocks, chunk, dtype=torch.int32)
        slopes = self.empty(members, key_blocks, chunk)
        grad_query = self.empty(B, H, Q, D, dtype=self.query.dtype)
        grad_position_query = torch.empty_like(grad_query) if self.own_position_query else None
        grad_table = torch.zeros(D, P, dtype=torch.float32, device=self.query.device)
        shape = (B, self.G, self.K, D)
        grad_key, grad_value = (torch.zeros(shape, dtype=torch.float32, device=self.query.device) for _ in range(2))
        grad_gate_key = torch.zeros_like(grad_key) if self.gate_key is not None else None
        statistics = (window["lse"], delta, window["start"], window["end"], window["stop"])
        sizes = (self.scaling, H, self.G, Q, self.K, P)
        strides = (*_strides(grad), *_strides(self.query), *self.strides)
        inputs = (grad, self.query, self.key, self.gate_key, self.value, values, self.ranges)
        for first in self.chunks():
            self.position_values(first, values)
            levels.zero_()
            place = (first, chunk, self.blocks)
            row_blocks = triton.cdiv(min(chunk, Q - first), WINDOW_ROWS)
            launch(
                _window_rows,
                (row_blocks * members,),
                self.backward_tiles,
                self.tune,
                (*inputs, *statistics, window["total"], window_query, levels, counts, slopes, *strides, *sizes, *place),
                self.constants,
            )
            launch(
                _table_rows,
                lambda tiles: (triton.cdiv(chunk, tiles.rows) * members,),
                [Tiles(32, 32)],
                (),
                (
                    self.table,
                    self.ranges,
                    window["start"],
                    window_query,
                    levels,
                    grad_values,
                    grad_query,
                    grad_position_query,
                    self.position_scale,
                    H,
                    Q,
                    self.K,
                    P,
                    *place,
                ),
                {
                    "RANGES": self.ranges is not None,
                    "WINDOW": WINDOW_ROWS,
                    "D": D,
                    "BLOCK_D": self.constants["BLOCK_D"],
                    "PRECISION": self.constants["PRECISION"],
                },
            )
            rows = slice(first, min(first + chunk, Q))
            part = grad_values.view(B, H, chunk, P)[:, :, : rows.stop - rows.start]
            queries = self.position_query[:, :, rows].transpose(2, 3)
            grad_table += torch.matmul(queries, part).sum((0, 1), dtype=torch.float32)
            ahead = self.K if self.ranges is not None else self.K - Q + rows.stop
            launch(
                _window_columns,
                (triton.cdiv(ahead, columns) * B * self.G,),
                self.backward_tiles,
                self.tune,
                (*inputs, *statistics, counts, slopes, grad_key, grad_gate_key, grad_value, *strides, *sizes, *place),
                {**self.constants, "ROW_BLOCKS": triton.next_power_of_2(triton.cdiv(chunk, WINDOW_ROWS))},
                timed=False,
            )
        return grad_query, grad_table, grad_key, grad_value, grad_gate_key, grad_position_query


def _decode(*arguments: Any) -> torch.Tensor:
    """One query row a head: the heads of a group are the rows of a program."""
    query, key, value, table, gate_key, position_query, ranges, scaling, position_scale = arguments
    B, H, _, D = query.shape
    G = key.shape[1]
    rows = query.reshape(B, G, H // G, D)
    if position_query is not None:
        position_query = position_query.reshape(B, G, H // G, D)
    attention = _Pass(rows, key, value, table, gate_key, position_query, ranges, scaling, position_scale)
    window = attention.window_forward(shared_rows=True)
    return flash_decode(
        query,
        key,
        value,
        scaling=scaling,
        ranges=ranges,
        bound=(window["start"], max(16, triton.next_power_of_2(H // G))),
        constant=window["constant"].view(B, H, 1),
        initial=(window["out"].view(B, H, 1, D), window["lse"].view(B, H, 1)),
    )


@torch.library.custom_op(f"{_NAMESPACE}::cope_forward", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    gate_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    ranges: torch.Tensor | None,
    scaling: float,
    position_scale: float,
) -> list[torch.Tensor]:
    attention = _Pass(query, key, value, table, gate_key, position_query, ranges, scaling, position_scale)
    window = attention.window_forward()
    out, lse = flash_forward(
        attention.query,
        attention.key,
        attention.value,
        scaling=scaling,
        ranges=ranges,
        bound=(window["start"], WINDOW_ROWS),
        constant=window["constant"],
        initial=(window["out"], window["lse"]),
    )
    return [out, lse, *(window[name] for name in _SAVED)]


# What the backward pass needs of the windows, besides the log-sum-exp over all keys.
_SAVED = ("start", "end", "stop", "total", "constant")


@_forward.register_fake
def _(query, key, value, table, gate_key, position_query, ranges, scaling, position_scale):
    B, H, Q, D = query.shape
    per_row, per_block = query.new_empty((B, H, Q), dtype=torch.float32), (B, H, -(-Q // WINDOW_ROWS))
    return [
        query.new_empty(B, H, Q, D),
        torch.empty_like(per_row),
        query.new_empty(per_block, dtype=torch.int32),
        query.new_empty(per_block, dtype=torch.int32),
        query.new_empty((B, H, Q), dtype=torch.int32),
        query.new_empty((B, H, Q), dtype=torch.int32),
        torch.empty_like(per_row),
    ]


@torch.library.custom_op(f"{_NAMESPACE}::cope_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    gate_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    ranges: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    scaling: float,
    position_scale: float,
) -> list[torch.Tensor]:
    attention = _Pass(query, key, value, table, gate_key, position_query, ranges, scaling, position_scale)
    out, lse, *rest = saved
    window = dict(zip(_SAVED, rest), lse=lse)
    grad = aligned(grad)
    delta = row_products(grad, out)
    grad_query, grad_table, grad_key, grad_value, grad_gate_key, grad_position_query = attention.window_backward(
        grad, delta, window
    )
    # A constant added to the logits of a row shifts their log-sum-exp.
    plain = (grad, attention.query, attention.key, attention.value, lse - window["constant"], delta)
    options: dict[str, Any] = {"scaling": scaling, "ranges": ranges, "bound": (window["start"], WINDOW_ROWS)}
    grad_query, _ = flash_backward_rows(*plain, **options, initial=grad_query)
    columns = flash_backward_columns(*plain, **options, initial=(grad_key, grad_value))
    results = [grad_query, *columns, grad_table.to(table.dtype)]
    if grad_gate_key is not None:
        results.append(grad_gate_key.to(key.dtype))
    return results if grad_position_query is None else [*results, grad_position_query]


@_backward.register_fake
def _(grad, query, key, value, table, gate_key, position_query, ranges, saved, scaling, position_scale):
    inputs = (query, key, value, table, gate_key, position_query)
    return [tensor.new_empty(tensor.shape) for tensor in inputs if tensor is not None]


@torch.library.custom_op(f"{_NAMESPACE}::cope_decode", mutates_args=())
def _decode_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    gate_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    ranges: torch.Tensor | None,
    scaling: float,
    position_scale: float,
) -> torch.Tensor:
    return _decode(query, key, value, table, gate_key, position_query, ranges, scaling, position_scale)


@_decode_op.register_fake
def _(query, key, value, table, gate_key, position_query, ranges, scaling, position_scale):
    return query.new_empty(query.shape)


def _save(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
    *tensors, ctx.scaling, ctx.position_scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple:
    # Read once: activation checkpointing allows no second time.
    saved = list(ctx.saved_tensors)
    *inputs, ranges = saved[:7]
    if grads[0] is None:
        return (None,) * 9
    results = iter(_backward(grads[0], *inputs, ranges, saved[7:], ctx.scaling, ctx.position_scale))
    return (*(None if tensor is None else next(results) for tensor in inputs), None, None, None)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "the CoPE kernels have no second derivative: use attn_implementation='eager' for gradients of gradients"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def cope_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    *,
    gate_key: torch.Tensor | None = None,
    position_query: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
    scaling: float,
    position_scale: float,
) -> torch.Tensor:
    """Causal attention with contextual positions (CoPE, Golovneva et al. 2024, Eq. 3 to 9), differentiable.

        g_ij = sigmoid(scaling * q_i.x_j), x the gate keys; p_ij = sum of g_ik for k = j..i, at most P - 1
        logit_ij = scaling * q_i.k_j + z_i[p_ij], z_i[p] = position_scale * r_i.e[p], linear between integers

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16; products are summed in float32.
        key: (B, G, K, D), H a multiple of G; key and value in the type of the query. value: (B, G, K, D).
        table: (D, P), the position embeddings e, P at least 2, in any of these types.
        gate_key: (B, G, K, D), what opens the gates: None for the keys themselves, the values, or keys of their own.
        position_query: (B, H, Q, D), r, what is multiplied with the table, in the type of the query; None for the query
            itself. (With RoPE: the query before rotation.)
        ranges: what each row sees, int32 (B, 1, Q + K, 2), see `attention_mask`; None: causal, row i sees the keys
            up to K - Q + i. Keys that are not seen are not counted.
        scaling: the factor on q.k, in content and gates.
        position_scale: the factor on r.e.

    Returns:
        (B, H, Q, D) in the type of the query. Rows that see nothing are 0.

    Raises:
        ValueError: shapes or types do not fit, or scaling is not positive.
    """
    check_inputs(query, key, value, scaling, ranges)
    if table.dim() != 2 or table.shape[0] != query.shape[3] or table.shape[1] < 2:
        raise ValueError(
            f"table={tuple(table.shape)!r} is not valid: it must be ({query.shape[3]}, P) with P at least 2."
        )
    if gate_key is not None and (gate_key.shape != key.shape or gate_key.dtype != key.dtype):
        raise ValueError(
            f"gate_key={tuple(gate_key.shape)!r} of type {gate_key.dtype!r} is not valid: it must be as the keys, "
            f"{tuple(key.shape)!r} of type {key.dtype!r}."
        )
    if position_query is not None and (position_query.shape != query.shape or position_query.dtype != query.dtype):
        raise ValueError(
            f"position_query={tuple(position_query.shape)!r} of type {position_query.dtype!r} is not valid: it must be "
            f"as the query, {tuple(query.shape)!r} of type {query.dtype!r}."
        )
    arguments = (query, key, value, table, gate_key, position_query, ranges, scaling, position_scale)
    inputs = (query, key, value, table, gate_key, position_query)
    wanted = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in inputs)
    if query.shape[2] == 1 and not wanted:
        return _decode_op(*arguments)
    return _forward(*arguments)[0]
