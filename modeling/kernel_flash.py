"""Causal softmax attention as Triton kernels: forward, backward and decoding.

These are launchers on raw tensors, without autograd and without checks; the operators are built from them
(`kernel_plain`, `kernel_pope`, `kernel_cope`), whose functions call `check_inputs`.

Supports: causal attention with rows aligned to the end, and everything that `key_ranges` can say; grouped heads; query
length at most key length; values of up to 256 channels, keys as wide or up to twice as wide; float32, bfloat16, float16
(sums always float32); dropout of weights. Does not support: additive masks.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D channels of queries and keys, V channels of
values, n blocks of rows that share a bound, S splits of the keys in decoding, R rotated channels of PoPE. Query head h
uses key head h // (H // G).

Row i sees, without `key_ranges`, the keys j <= K - Q + i. With `key_ranges`, int32 (B, 1, Q + K, 2), it sees key j if
key_ranges[b, 0, i, 0] <= j < key_ranges[b, 0, i, 1] and key_ranges[b, 0, Q + j, 0] != 0, causal or not. With a `bound`
in addition it sees only keys j < start[b, h, i // rows]. A row that sees no key has output 0 and log-sum-exp +1e30.

Functions of all files of kernels take these `key_ranges`; `scaling`, the positive factor on q.k; and `dropout`, the
probability in [0, 1] that a weight is dropped. They raise ValueError for what they do not support.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .kernel_bias import LN_2, LOG2_E, NO_BIAS, LogitBias, bias_gradient, bias_rows, biased_logits, store_last
from .kernel_launch import MASKED, Tiles, block_width, dot, heads, launch, load, pointer, precision, store, tl, triton
from .kernel_operator import check_shapes


class Dropout(NamedTuple):
    """Weights are dropped by a hash of the seed, the head, the row and the key: the same in every kernel.

    Attributes:
        seed: int32 (1,).
        limit: a weight is dropped if the first 31 bits of its hash are below this.
        scale: the factor on the other weights.
    """

    seed: Any
    limit: Any
    scale: Any


class Polar(NamedTuple):
    """The phases of PoPE in decoding: two magnitudes q, k have the score q k cos(phase_q - shift - phase_k).

    Without phases all attributes are None, as in `LogitBias`.

    Attributes:
        cos_q, sin_q: float32 or float16 (1 or B, 1, R), of the query.
        cos_k, sin_k: the same (1 or B, K, R), of the keys.
        cos_shift, sin_shift: float32 (H, R), or None. Computed once: for large angles sines take a kernel many
            registers and local memory.
        batch_q, batch_k: the strides of the batch.
    """

    cos_q: Any = None
    sin_q: Any = None
    cos_k: Any = None
    sin_k: Any = None
    cos_shift: Any = None
    sin_shift: Any = None
    batch_q: Any = None
    batch_k: Any = None


# Rows, or blocks of rows, that a program examines in one step to find those that see its keys.
SCAN = tl.constexpr(512)


# Parts of kernels.


@triton.jit
def row_limits(key_ranges, bound, bound_rows, rows, Q, K):
    """Rows see keys from `low` up to, but without, `high`. The values of rows from Q on are not defined."""
    low = tl.zeros_like(rows)
    high = rows + (K - Q + 1)
    if key_ranges is not None:
        low = tl.load(key_ranges + rows * 2, mask=rows < Q, other=0)
        high = tl.minimum(tl.load(key_ranges + rows * 2 + 1, mask=rows < Q, other=0), K)
    if bound is not None:
        high = tl.minimum(high, tl.load(bound + rows // bound_rows, mask=rows < Q, other=0))
    return low, high


@triton.jit
def seen_keys(key_ranges, low, high, start, Q, K, BLOCK_N: tl.constexpr):
    """Which of the keys start.. each row sees, (rows, BLOCK_N)."""
    keys = start + tl.arange(0, BLOCK_N)
    seen = keys[None, :] < high[:, None]
    if key_ranges is not None:
        valid = tl.load(key_ranges + (Q + keys) * 2, mask=keys < K, other=0) != 0
        seen = seen & (keys[None, :] >= low[:, None]) & valid[None, :]
    return seen


@triton.jit
def _hash(bits):
    """A bijection of uint32 that spreads every bit over all ("lowbias32" by Chris Wellons)."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def apply_dropout(weights, dropout, member, rows, keys):
    """Returns weights times 0 or 1 / (1 - p); unchanged if `dropout` is None.

    rows, keys: indices that broadcast to the shape of the weights. member: batch entry * H + head.
    """
    if dropout is not None:
        seed = _hash(tl.load(dropout.seed).to(tl.uint32)) + member.to(tl.uint32)
        row_hash = _hash(_hash(seed) + rows.to(tl.uint32))
        bits = _hash(row_hash + _hash(keys.to(tl.uint32)))
        weights = tl.where((bits >> 1).to(tl.int32) >= dropout.limit, weights * dropout.scale, 0.0)
    return weights


@triton.jit
def zero_sums(data, never, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros, (ROWS, COLUMNS), that the compiler does not know: loads that are masked by `never`, which is false.

    Known zeros would be written between a product of Hopper and its wait where a loop may be empty: ptxas then lets no
    product run beside other instructions.
    """
    pointers = data + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointers, mask=never, other=0.0).to(tl.float32)


@triton.jit
def softmax_step(
    acc, total, top, logits, seen, v, dropout, member, rows, keys, PRECISION: tl.constexpr, scale=None,
    shift=None,
):  # fmt: skip
    """Adds logits, (BLOCK_M, BLOCK_N), and values to an online softmax; `seen` None: all are seen.

    `top`, finite, is in base 2, and the logits times `scale`, positive, plus `shift` are, a number for each row,
    (BLOCK_M, 1); None is 1 or 0. For dropout, member, rows and keys see `apply_dropout`.
    """
    if seen is not None:
        # exp2(-inf - top) is 0 in rows that have seen no key yet, too.
        logits = tl.where(seen, logits, float("-inf"))
    highest = tl.max(logits, 1)
    if scale is not None:
        # The factor and the difference are then one instruction.
        highest *= scale
        logits *= scale
    if shift is not None:
        new_top = tl.maximum(top, highest + tl.sum(shift, 1))
        weights = tl.exp2(logits - (new_top[:, None] - shift))
    else:
        new_top = tl.maximum(top, highest)
        weights = tl.exp2(logits - new_top[:, None])
    decay = tl.exp2(top - new_top)
    kept = apply_dropout(weights, dropout, member, rows, keys)
    acc = dot(kept.to(v.dtype), v, acc * decay[:, None], PRECISION)
    return acc, total * decay + tl.sum(weights, 1), new_top


@triton.jit
def _key_blocks(key_ranges, bound, low, high, start_m, Q, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that a block of rows sees: `first` (a multiple of BLOCK_N) to `last`; all rows see those before `full`.

    `full` is a multiple of BLOCK_N, or `first` with key ranges.
    """
    inside = start_m + tl.arange(0, BLOCK_M) < Q
    if key_ranges is not None:
        some = inside & (low < high)
        first = tl.maximum(tl.min(tl.where(some, low, K)), 0) // BLOCK_N * BLOCK_N
        last = tl.max(tl.where(some, high, 0))
        full = first
    else:
        first = 0
        if bound is not None:
            last = tl.maximum(tl.max(tl.where(inside, high, 0)), 0)
            full = tl.maximum(tl.min(tl.where(inside, high, K)), 0) // BLOCK_N * BLOCK_N
        else:
            last = tl.minimum(start_m + BLOCK_M, Q) + (K - Q)
            full = (start_m + (K - Q + 1)) // BLOCK_N * BLOCK_N
    return first, full, last


@triton.jit
def _row_blocks(
    key_ranges, bound, bound_blocks, bound_rows, start_n, Q, K,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The rows, from `first` up to but without `last`, that see keys of a block; from `full` on they see all of them.

    All three are multiples of BLOCK_M. `bound` has the bounds of GROUPS heads.
    """
    # The loops carry scalars: Triton does not know the alignment of what comes from carried tensors, and would not
    # pipeline the loads of a loop over these rows.
    if key_ranges is not None:
        first = Q
        last = 0
        for start in range(0, Q, SCAN):
            rows = start + tl.arange(0, SCAN)
            low, high = row_limits(key_ranges, None, 1, rows, Q, K)
            some = (rows < Q) & (low < high) & (low < start_n + BLOCK_N) & (high > start_n)
            first = tl.minimum(first, tl.min(tl.where(some, rows, Q)))
            last = tl.maximum(last, tl.max(tl.where(some, rows + 1, 0)))
        full = last
    else:
        first = tl.maximum(start_n - (K - Q), 0)
        full = tl.maximum(tl.minimum(start_n + BLOCK_N, K) - 1 - (K - Q), 0)
        last = Q
    if bound is not None:
        bound_first = Q
        bound_last = 0
        for start in range(0, bound_blocks * GROUPS, SCAN):
            entries = start + tl.arange(0, SCAN)
            inside = entries < bound_blocks * GROUPS
            rows = entries % bound_blocks * bound_rows
            high = tl.load(bound + entries, mask=inside, other=0)
            some = inside & (high > start_n)
            bound_first = tl.minimum(bound_first, tl.min(tl.where(some, rows, Q)))
            bound_last = tl.maximum(bound_last, tl.max(tl.where(some, rows + bound_rows, 0)))
            # Keys from K on do not count.
            part = inside & (high < tl.minimum(start_n + BLOCK_N, K))
            full = tl.maximum(full, tl.max(tl.where(part, rows + bound_rows, 0)))
        first = tl.maximum(first, bound_first)
        last = tl.minimum(last, bound_last)
    first = first // BLOCK_M * BLOCK_M
    last = tl.cdiv(last, BLOCK_M) * BLOCK_M
    full = tl.minimum(tl.maximum(tl.cdiv(tl.minimum(full, Q), BLOCK_M) * BLOCK_M, first), last)
    return first, full, last


@triton.jit
def subtract_phase(cos, sin, cos_shift, sin_shift):
    """Cosines and sines of phase - shift."""
    return cos * cos_shift + sin * sin_shift, sin * cos_shift - cos * sin_shift


@triton.jit
def polar_query(polar, q, b, g, groups, first, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Real and imaginary parts of magnitudes (BLOCK_M, BLOCK_D): one query row of the heads first.. of key head g."""
    channels = tl.arange(0, BLOCK_D)[None, :]
    cos = tl.load(polar.cos_q + b * polar.batch_q + channels, mask=channels < R, other=1.0).to(tl.float32)
    sin = tl.load(polar.sin_q + b * polar.batch_q + channels, mask=channels < R, other=0.0).to(tl.float32)
    if polar.cos_shift is not None:
        cos_shift = load(polar.cos_shift + g * groups * R, R, first, groups, 1.0, R, BLOCK_M, BLOCK_D, False)
        sin_shift = load(polar.sin_shift + g * groups * R, R, first, groups, 0.0, R, BLOCK_M, BLOCK_D, False)
        cos, sin = subtract_phase(cos, sin, cos_shift, sin_shift)
    imaginary = (q.to(tl.float32) * sin).to(q.dtype)
    return (q.to(tl.float32) * cos).to(q.dtype), imaginary


@triton.jit
def polar_products(
    polar, q, imaginary, k, b, begin, K,
    R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of what `polar_query` returned with the magnitudes k of the keys begin.., (BLOCK_M, BLOCK_N)."""
    cos = load(polar.cos_k + b * polar.batch_k, R, begin, K, 1.0, R, BLOCK_N, BLOCK_D, False).to(tl.float32)
    sin = load(polar.sin_k + b * polar.batch_k, R, begin, K, 0.0, R, BLOCK_N, BLOCK_D, False).to(tl.float32)
    scores = dot(q, tl.trans((k.to(tl.float32) * cos).to(k.dtype)), None, PRECISION)
    return dot(imaginary, tl.trans((k.to(tl.float32) * sin).to(k.dtype)), scores, PRECISION)


# Kernels. Optional pointers are None.


@triton.jit(do_not_specialize=["H", "groups", "Q", "K", "bound_blocks", "bound_rows"])
def forward_kernel(
    query, key, value, out, lse, key_ranges, bound, logit_bias, dropout, constant, initial_out, initial_lse, scaling, H,
    groups, Q, K, bound_blocks, bound_rows, D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head, all keys that they see."""
    blocks = tl.cdiv(Q, BLOCK_M)
    # The rows that see most begin first.
    start_m = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    member = (tl.program_id(0) // blocks).to(tl.int64)
    b = member // H
    h = member % H
    keys = pointer(key, b, h // groups)
    values = pointer(value, b, h // groups)
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < Q
    if key_ranges is not None:
        key_ranges += b * (Q + K) * 2
    if bound is not None:
        bound += member * bound_blocks
    low, high = row_limits(key_ranges, bound, bound_rows, rows, Q, K)
    first, full, last = _key_blocks(key_ranges, bound, low, high, start_m, Q, K, BLOCK_M, BLOCK_N)
    q = load(pointer(query, b, h), query.row, start_m, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    if logit_bias.rows is not None:
        of_rows = bias_rows(logit_bias, b, h, member, rows, inside, Q, K, 1)

    # The constant of a row only shifts its log-sum-exp.
    offset = tl.zeros([BLOCK_M], dtype=tl.float32)
    if constant is not None:
        offset = tl.load(constant + member * Q + rows, mask=inside, other=0.0)
    if initial_out is not None:
        before = tl.load(initial_lse + member * Q + rows, mask=inside, other=-MASKED)
        empty = before > -0.5 * MASKED
        top = tl.where(empty, MASKED, (before - offset) * LOG2_E)
        total = tl.where(empty, 0.0, 1.0)
        acc = load(initial_out + member * Q * V, V, start_m, Q, 0.0, V, BLOCK_M, BLOCK_V, False).to(tl.float32)
        acc = tl.where(empty[:, None], 0.0, acc)
    else:
        top = tl.full([BLOCK_M], MASKED, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = zero_sums(out, Q < 0, BLOCK_M, BLOCK_V)

    scale = scaling * LOG2_E
    # Two loops: the keys that all rows see, without key ranges; then those that need a mask.
    for masked in tl.static_range(0 if key_ranges is None else 1, 2):
        begin, end = (full, last) if masked else (first, full)
        for start in range(begin, end, BLOCK_N):
            k = load(keys, key.row, start, K, 0.0, D, BLOCK_N, BLOCK_D, not masked)
            v = load(values, value.row, start, K, 0.0, V, BLOCK_N, BLOCK_V, not masked)
            logits = dot(q, tl.trans(k), None, PRECISION)
            columns = start + tl.arange(0, BLOCK_N)[None, :]
            shift = None
            if logit_bias.rows is not None:
                newest = None if masked else start + (BLOCK_N - 1)
                logits, shift = biased_logits(logit_bias, logits, scale, of_rows, columns, newest, K)
            seen = seen_keys(key_ranges, low, high, start, Q, K, BLOCK_N) if masked else None
            acc, total, top = softmax_step(
                acc, total, top, logits, seen, v, dropout, member, rows[:, None], columns, PRECISION,
                scale if logit_bias.rows is None else None, shift,
            )  # fmt: skip

    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    row_lse = tl.where(nothing, -MASKED, (top + tl.log2(total)) * LN_2 + offset)
    store(out + member * Q * V, V, start_m, Q, acc / total[:, None], V, BLOCK_M, BLOCK_V)
    tl.store(lse + member * Q + rows, row_lse, mask=inside)


@triton.jit(do_not_specialize=["H", "Q"])
def row_products_kernel(
    grad, out, result, H, Q, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program: BLOCK_M rows of one head. BLOCK_N is not used."""
    blocks = tl.cdiv(Q, BLOCK_M)
    start = tl.program_id(0) % blocks * BLOCK_M
    member = (tl.program_id(0) // blocks).to(tl.int64)
    left = load(pointer(grad, member // H, member % H), grad.row, start, Q, 0.0, V, BLOCK_M, BLOCK_V, False)
    right = load(pointer(out, member // H, member % H), out.row, start, Q, 0.0, V, BLOCK_M, BLOCK_V, False)
    rows = start + tl.arange(0, BLOCK_M)
    products = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    tl.store(result + member * Q + rows, products, mask=rows < Q)


@triton.jit(do_not_specialize=["H", "groups", "Q", "K", "bound_blocks", "bound_rows"])
def backward_rows_kernel(
    grad, query, key, value, lse, delta, grad_query, grad_decay, key_ranges, bound, logit_bias, dropout, initial,
    scaling, H, groups, Q, K, bound_blocks, bound_rows, D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of BLOCK_M query rows of one head."""
    blocks = tl.cdiv(Q, BLOCK_M)
    start_m = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    member = (tl.program_id(0) // blocks).to(tl.int64)
    b = member // H
    h = member % H
    keys = pointer(key, b, h // groups)
    values = pointer(value, b, h // groups)
    rows = start_m + tl.arange(0, BLOCK_M)
    if key_ranges is not None:
        key_ranges += b * (Q + K) * 2
    if bound is not None:
        bound += member * bound_blocks
    low, high = row_limits(key_ranges, bound, bound_rows, rows, Q, K)
    first, full, last = _key_blocks(key_ranges, bound, low, high, start_m, Q, K, BLOCK_M, BLOCK_N)
    q = load(pointer(query, b, h), query.row, start_m, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    grad_tile = load(pointer(grad, b, h), grad.row, start_m, Q, 0.0, V, BLOCK_M, BLOCK_V, False)
    row_lse = tl.load(lse + member * Q + rows, mask=rows < Q, other=0.0) * LOG2_E
    row_delta = tl.load(delta + member * Q + rows, mask=rows < Q, other=0.0)
    if logit_bias.rows is not None:
        of_rows = bias_rows(logit_bias, b, h, member, rows, rows < Q, Q, K, 1)
        grad_last = tl.zeros([BLOCK_M], dtype=tl.float32)

    scale = scaling * LOG2_E
    acc = zero_sums(grad_query, Q < 0, BLOCK_M, BLOCK_D)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Two loops: the keys that all rows see, without key ranges; then those that need a mask.
    for masked in tl.static_range(0 if key_ranges is None else 1, 2):
        begin, end = (full, last) if masked else (first, full)
        for start in range(begin, end, BLOCK_N):
            k = load(keys, key.row, start, K, 0.0, D, BLOCK_N, BLOCK_D, not masked)
            v = load(values, value.row, start, K, 0.0, V, BLOCK_N, BLOCK_V, not masked)
            logits = dot(q, tl.trans(k), None, PRECISION)
            columns = start + tl.arange(0, BLOCK_N)[None, :]
            own_lse = row_lse[:, None]
            if logit_bias.rows is None:
                logits *= scale
            else:
                newest = None if masked else start + (BLOCK_N - 1)
                logits, shift = biased_logits(logit_bias, logits, scale, of_rows, columns, newest, K)
                own_lse -= shift
            weights = tl.exp2(logits - own_lse)
            if masked:
                weights = tl.where(seen_keys(key_ranges, low, high, start, Q, K, BLOCK_N), weights, 0.0)
            grad_weights = dot(grad_tile, tl.trans(v), None, PRECISION)
            grad_weights = apply_dropout(grad_weights, dropout, member, rows[:, None], columns)
            grad_logits = weights * (grad_weights - row_delta[:, None])
            if logit_bias.rows is not None:
                grad_last += bias_gradient(logit_bias, of_rows, columns, K, grad_logits)
            if grad_decay is not None:
                sums += tl.sum(grad_logits, 1)
            acc = dot(grad_logits.to(k.dtype), k, acc, PRECISION)

    if grad_decay is not None:
        tl.store(grad_decay + member * Q + rows, sums, mask=rows < Q)
    if logit_bias.rows is not None:
        store_last(logit_bias, of_rows, grad_last)
    acc *= scaling
    if initial is not None:
        acc += load(initial + member * Q * D, D, start_m, Q, 0.0, D, BLOCK_M, BLOCK_D, False).to(tl.float32)
    store(grad_query + member * Q * D, D, start_m, Q, acc, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["G", "Q", "K", "bound_blocks", "bound_rows"])
def backward_columns_kernel(
    grad, query, key, value, lse, delta, grad_key, grad_value, grad_decay, key_ranges, bound, logit_bias, dropout,
    initial_key, initial_value, scaling, G, Q, K, bound_blocks, bound_rows, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the gradients of BLOCK_N keys and values of one key head, from all rows of GROUPS query heads."""
    blocks = tl.cdiv(K, BLOCK_N)
    # The oldest keys are seen most, and begin first.
    start_n = tl.program_id(0) % blocks * BLOCK_N
    member = (tl.program_id(0) // blocks).to(tl.int64)
    b = member // G
    g = member % G
    queries = pointer(query, b, g * GROUPS)
    grads = pointer(grad, b, g * GROUPS)
    lse += member * GROUPS * Q
    delta += member * GROUPS * Q
    keys = start_n + tl.arange(0, BLOCK_N)
    valid = keys < K
    if key_ranges is not None:
        key_ranges += b * (Q + K) * 2
        valid = tl.load(key_ranges + (Q + keys) * 2, mask=valid, other=0) != 0
    if bound is not None:
        bound += member * GROUPS * bound_blocks
    first, full, last = _row_blocks(
        key_ranges, bound, bound_blocks, bound_rows, start_n, Q, K, GROUPS, BLOCK_M, BLOCK_N
    )
    k = load(pointer(key, b, g), key.row, start_n, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    v = load(pointer(value, b, g), value.row, start_n, K, 0.0, V, BLOCK_N, BLOCK_V, False)

    scale = scaling * LOG2_E
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_V], dtype=tl.float32)
    # The query heads of the group.
    of_group = tl.arange(0, BLOCK_G)[None, :]
    grad_c = tl.zeros([BLOCK_N, BLOCK_G], dtype=tl.float32)
    # Two loops: the rows that need a mask; then, without key ranges, those that see all keys of the block.
    for whole in tl.static_range(0, 2 if key_ranges is None else 1):
        begin, end = (full, last) if whole else (first, full)
        # One loop over rows and heads: nested loops would copy the accumulators, which costs their registers again.
        for index in range(begin // BLOCK_M * GROUPS, end // BLOCK_M * GROUPS):
            start = index // GROUPS * BLOCK_M
            h = tl.cast(index % GROUPS, tl.int64)
            rows = start + tl.arange(0, BLOCK_M)
            q = load(queries + h * query.head, query.row, start, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
            # Transposed: (BLOCK_N, BLOCK_M). Rows from Q on have weights, but add nothing: their query, gradient and
            # delta are 0.
            row_lse = tl.load(lse + h * Q + rows, mask=rows < Q, other=0.0) * LOG2_E
            logits = dot(k, tl.trans(q), None, PRECISION)
            own_lse = row_lse[None, :]
            if logit_bias.rows is None:
                logits *= scale
            else:
                of_rows = bias_rows(logit_bias, b, g * GROUPS + h, member * GROUPS + h, rows, rows < Q, Q, K, 0)
                newest = tl.minimum(start_n + BLOCK_N, K) - 1 if whole else None
                logits, shift = biased_logits(logit_bias, logits, scale, of_rows, keys[:, None], newest, K)
                own_lse -= shift
            weights = tl.exp2(logits - own_lse)
            if not whole:
                head_bound = bound
                if bound is not None:
                    head_bound = bound + h * bound_blocks
                low, high = row_limits(key_ranges, head_bound, bound_rows, rows, Q, K)
                seen = keys[:, None] < high[None, :]
                if key_ranges is not None:
                    seen = seen & (keys[:, None] >= low[None, :]) & valid[:, None]
                weights = tl.where(seen, weights, 0.0)
            grad_tile = load(grads + h * grad.head, grad.row, start, Q, 0.0, V, BLOCK_M, BLOCK_V, False)
            kept = apply_dropout(weights, dropout, member * GROUPS + h, rows[None, :], keys[:, None])
            grad_v = dot(kept.to(grad_tile.dtype), grad_tile, grad_v, PRECISION)
            grad_weights = dot(v, tl.trans(grad_tile), None, PRECISION)
            grad_weights = apply_dropout(grad_weights, dropout, member * GROUPS + h, rows[None, :], keys[:, None])
            row_delta = tl.load(delta + h * Q + rows, mask=rows < Q, other=0.0)
            grad_logits = weights * (grad_weights - row_delta[None, :])
            if grad_decay is not None:
                grad_c -= tl.where(of_group == h, tl.sum(grad_logits, 1)[:, None], 0.0)
            grad_k = dot(grad_logits.to(q.dtype), q, grad_k, PRECISION)

    if grad_decay is not None:
        to = grad_decay + (member * GROUPS + of_group) * K + keys[:, None]
        tl.store(to, grad_c, mask=(of_group < GROUPS) & (keys < K)[:, None])
    grad_k *= scaling
    if initial_key is not None:
        grad_k += load(initial_key + member * K * D, D, start_n, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        grad_v += load(initial_value + member * K * V, V, start_n, K, 0.0, V, BLOCK_N, BLOCK_V, False)
    store(grad_key + member * K * D, D, start_n, K, grad_k, D, BLOCK_N, BLOCK_D)
    store(grad_value + member * K * V, V, start_n, K, grad_v, V, BLOCK_N, BLOCK_V)


@triton.jit(do_not_specialize=["G", "groups", "K", "splits"])
def decode_kernel(
    query, key, value, out, top_lse, key_ranges, bound, polar, logit_bias, scaling, G, groups, K, splits,
    D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query heads of one key head (rows), and one split of the keys that they see.

    Writes float32 out (B, G, S, groups, V) and its log-sum-exp in base 2 (B, G, S, groups), MASKED if it saw nothing.
    With `polar` the first R channels are magnitudes; a channel without a phase is one of phase 0.
    """
    split = tl.program_id(0) % splits
    blocks = tl.cdiv(groups, BLOCK_M)
    block = tl.program_id(0) // splits % blocks
    member = (tl.program_id(0) // splits // blocks).to(tl.int64)
    b = member // G
    g = member % G
    keys = pointer(key, b, g)
    values = pointer(value, b, g)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first = 0
    last = K
    if key_ranges is not None:
        key_ranges += b * (1 + K) * 2
        first = tl.maximum(tl.load(key_ranges), 0)
        last = tl.minimum(tl.load(key_ranges + 1), K)
    if bound is not None:
        last = tl.minimum(last, tl.load(bound + member * blocks + block))
    low = tl.zeros([BLOCK_M], dtype=tl.int32) + first
    high = tl.zeros([BLOCK_M], dtype=tl.int32) + last
    start = first // BLOCK_N * BLOCK_N
    # A split is whole blocks of what is visible, not of the cache.
    size = tl.cdiv(tl.maximum(last - start, 0), splits * BLOCK_N) * BLOCK_N
    start = start + split * size

    q = load(pointer(query, b, g * groups), query.head, block * BLOCK_M, groups, 0.0, D, BLOCK_M, BLOCK_D, False)
    if polar.cos_q is not None:
        q, imaginary = polar_query(polar, q, b, g, groups, block * BLOCK_M, R, BLOCK_M, BLOCK_D)
    if logit_bias.rows is not None:
        # Row 0 of each head.
        head = g * groups + tl.minimum(rows, groups - 1)
        of_rows = bias_rows(logit_bias, b, head[:, None], b * G * groups + head, rows * 0, rows < groups, 1, K, 1)
    scale = scaling * LOG2_E
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], MASKED, dtype=tl.float32)
    for begin in range(start, tl.minimum(start + size, last), BLOCK_N):
        k = load(keys, key.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        if polar.cos_q is not None:
            logits = polar_products(polar, q, imaginary, k, b, begin, K, R, BLOCK_N, BLOCK_D, PRECISION)
        else:
            logits = dot(q, tl.trans(k), None, PRECISION)
        if logit_bias.rows is not None:
            columns = begin + tl.arange(0, BLOCK_N)[None, :]
            logits, _ = biased_logits(logit_bias, logits, scale, of_rows, columns, None, K)
        v = load(values, value.row, begin, K, 0.0, V, BLOCK_N, BLOCK_V, False)
        seen = seen_keys(key_ranges, low, high, begin, 1, K, BLOCK_N)
        acc, total, top = softmax_step(
            acc, total, top, logits, seen, v, None, None, None, None, PRECISION,
            scale if logit_bias.rows is None else None,
        )  # fmt: skip
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    index = (member * splits + split) * groups
    store(out + index * V, V, block * BLOCK_M, groups, acc / total[:, None], V, BLOCK_M, BLOCK_V)
    tl.store(top_lse + index + rows, tl.where(nothing, MASKED, top + tl.log2(total)), mask=rows < groups)


@triton.jit(do_not_specialize=["groups", "splits"])
def combine_kernel(
    parts, top_lse, out, constant, initial_out, initial_lse, groups, splits, V: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one query head, all its splits in steps of BLOCK_N. BLOCK_M is not used."""
    member = tl.program_id(0).to(tl.int64)
    row = member // groups * splits * groups + member % groups
    channels = tl.arange(0, BLOCK_V)
    top = tl.full([1], MASKED, dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([BLOCK_V], dtype=tl.float32)
    offset = 0.0
    if constant is not None:
        offset = tl.load(constant + member)
    if initial_out is not None:
        before = tl.load(initial_lse + member + tl.zeros([1], dtype=tl.int32))
        empty = before > -0.5 * MASKED
        top = tl.where(empty, MASKED, (before - offset) * LOG2_E)
        total = tl.where(empty, 0.0, 1.0)
        acc = tl.load(initial_out + member * V + channels, mask=channels < V, other=0.0).to(tl.float32) * total
    for start in range(0, splits, BLOCK_N):
        indices = start + tl.arange(0, BLOCK_N)
        inside = indices < splits
        part_top = tl.load(top_lse + row + indices * groups, mask=inside, other=MASKED)
        tile = tl.load(
            parts + (row + indices[:, None] * groups) * V + channels[None, :],
            mask=inside[:, None] & (channels < V)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(part_top, 0))
        # Where no part saw anything the weights are 1, and the parts 0.
        weights = tl.exp2(part_top - new_top)
        decay = tl.exp2(top - new_top)
        acc = acc * decay + tl.sum(tile * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + member * V + channels, acc.to(out.dtype.element_ty), mask=channels < V)


# Launchers.

# Tiles (rows, columns, warps, stages) by the padded channels of keys and values (less than 64 is as 64), for 16-bit
# types. The preferred first; the last fits the shared memory of every device. Those that write rows want 16 rows a warp
# or more, those that write columns 16 columns: else the tensor cores of Hopper compute some products twice.
# The limit are registers: the first has the fewest instructions for a logit on sm_90 without spills.
_Table = dict[tuple[int, int], tuple[Tiles, ...]]

_FORWARD: _Table = {
    (64, 64): (Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 2)),
    (128, 128): (Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    (256, 256): (Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
    (128, 64): (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    (256, 128): (Tiles(128, 32, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
    (512, 256): (Tiles(64, 32, 8, 1), Tiles(32, 16, 4, 1)),
}
_ROWS: _Table = {
    (64, 64): (Tiles(128, 64, 8, 2), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2)),
    (128, 128): (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    (256, 256): (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1)),
    (128, 64): (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2), Tiles(64, 16, 4, 2)),
    (256, 128): (Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 16, 4, 1)),
    (512, 256): (Tiles(32, 32, 8, 1), Tiles(32, 16, 4, 1)),
}
_COLUMNS: _Table = {
    (64, 64): (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
    (128, 128): (Tiles(32, 128, 8, 2), Tiles(64, 64, 8, 2), Tiles(16, 128, 8, 2), Tiles(32, 64, 4, 1)),
    (256, 256): (Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1)),
    (128, 64): (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 2), Tiles(16, 64, 4, 2)),
    (256, 128): (Tiles(32, 64, 8, 2), Tiles(16, 64, 8, 2), Tiles(16, 64, 8, 1)),
    (512, 256): (Tiles(16, 32, 8, 1),),
}
# float32 has its products on the ordinary cores, with all of their operands in registers.
_FLOAT32 = (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1))
# A program has few keys: splits are short. Rows are `decode_rows`. Wide float32 begins with the second: compilers take
# minutes for the first.
_DECODE = (Tiles(16, 64, 4, 2), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1))

# Without a GPU decoding splits the keys in this number, on a GPU so that a split has at least this many keys.
INTERPRETED_SPLITS = 3
SPLIT_KEYS = 256

# Tiles are chosen separately from so many rows on: short inputs do not fill a GPU.
LONG = 1024

# Scratch memory of rows that are computed at once, as a multiple of the query's, and at least so many bytes.
SCRATCH_FACTOR, SCRATCH_BYTES = 4, 32 << 20


def check_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, key_ranges: torch.Tensor | None, *,
    as_wide: bool = True,
) -> None:  # fmt: skip
    """Raises ValueError if shapes or types of query, key, value (B, H or G, Q or K, D or V) or key ranges do not fit.

    as_wide: values must have D channels.
    """
    check_shapes(query, key, value)
    (B, _, Q, D), K = query.shape, key.shape[2]
    if value.shape[3] > 256 or not value.shape[3] <= D <= 2 * value.shape[3]:
        raise ValueError(
            f"query={tuple(query.shape)!r}, value={tuple(value.shape)!r} are not valid: values may have at most 256 "
            "channels, queries and keys as many as the values, up to twice as many."
        )
    if as_wide and value.shape != key.shape:
        raise ValueError(f"value={tuple(value.shape)!r} is not valid: it must be as the keys, {tuple(key.shape)!r}.")
    types = (torch.float32, torch.bfloat16, torch.float16)
    if query.dtype not in types or key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(
            f"query {query.dtype!r}, key {key.dtype!r}, value {value.dtype!r} are not valid types: they must be the "
            f"same, of {types!r}."
        )
    if not scaling > 0:
        raise ValueError(f"scaling={scaling!r} is not valid: it must be positive.")
    if key_ranges is not None and (key_ranges.dtype != torch.int32 or key_ranges.shape != (B, 1, Q + K, 2)):
        raise ValueError(
            f"key_ranges={tuple(key_ranges.shape)!r} of type {key_ranges.dtype!r} is not valid: it must be int32 "
            f"{(B, 1, Q + K, 2)!r}."
        )


def dropout_arguments(seed: torch.Tensor | None, probability: float) -> Dropout | None:
    """Returns the argument of the kernels for a seed, int32 (1,), and the probability that a weight is dropped."""
    if seed is None:
        return None
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return Dropout(seed, min(round(probability * 2**31), 2**31 - 1), scale)


def shift_tables(shift: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Returns cosines and sines of the shift, (H, R), as the kernels take them."""
    return (None, None) if shift is None else (shift.cos().contiguous(), shift.sin().contiguous())


def polar_argument(
    cos_q: torch.Tensor, sin_q: torch.Tensor, cos_k: torch.Tensor, sin_k: torch.Tensor, shift: torch.Tensor | None
) -> Polar:
    """Returns the tensors of `Polar` as an argument of a kernel."""
    cos_q, sin_q, cos_k, sin_k = (table.contiguous() for table in (cos_q, sin_q, cos_k, sin_k))
    batch_q, batch_k = (0 if table.shape[0] == 1 else table.stride(0) for table in (cos_q, cos_k))
    cos_shift, sin_shift = shift_tables(shift)
    return Polar(cos_q, sin_q, cos_k, sin_k, cos_shift, sin_shift, batch_q, batch_k)


def dropout_seed(query: torch.Tensor, probability: float) -> torch.Tensor | None:
    """Returns a seed from PyTorch's generator of the device, int32 (1,); None if nothing is dropped."""
    if not 0 <= probability <= 1:
        raise ValueError(f"dropout={probability!r} is not valid: it must be in [0, 1].")
    if probability == 0:
        return None
    return torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=query.device)


def chunk_rows(query: torch.Tensor, row_bytes: int, multiple: int) -> int:
    """Returns how many query rows are computed at once: a multiple, of `row_bytes` a row and head within the budget."""
    B, H, Q, _ = query.shape
    budget = max(SCRATCH_BYTES, SCRATCH_FACTOR * query.numel() * query.element_size())
    fitting = budget // (max(1, B) * H * row_bytes * multiple)
    return multiple * min(triton.cdiv(Q, multiple), max(1, fitting))


def row_parts(
    query: torch.Tensor, key: torch.Tensor, size: int, *, key_ranges: torch.Tensor | None, seed: torch.Tensor | None,
    dropout: float,
) -> Iterator[tuple[slice, slice, dict[str, Any]]]:  # fmt: skip
    """Yields so many rows of queries at a time, the keys that they may see, and options of `flash_forward` for them."""
    Q, K = query.shape[2], key.shape[2]
    for first in range(0, Q, size):
        rows = slice(first, min(first + size, Q))
        keys = slice(0, K if key_ranges is not None else K - Q + rows.stop)
        visible = key_ranges
        if key_ranges is not None and size < Q:
            visible = torch.cat((key_ranges[:, :, rows], key_ranges[:, :, Q:]), dim=2)
        # Each part counts its rows from 0.
        own_seed = seed + first if seed is not None and first else seed
        yield rows, keys, {"key_ranges": visible, "dropout": dropout_arguments(own_seed, dropout)}


class _Call:
    """What the launchers share: the options of `flash_forward` as arguments of a kernel."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float,
        key_ranges: torch.Tensor | None = None, logit_bias: LogitBias = NO_BIAS, dropout: Dropout | None = None,
        bound: tuple[torch.Tensor, int] | None = None,
    ) -> None:  # fmt: skip
        start, bound_rows = bound or (None, 1)
        (B, H, Q, D), (_, G, K, V) = query.shape, value.shape
        self.matrices = (heads(query), heads(key), heads(value))
        self.options = (_contiguous(key_ranges), _contiguous(start), logit_bias, dropout)
        self.scaling, self.shape = float(scaling), (B, H, G, Q, K, V)
        self.lengths = (Q, K, 0 if start is None else start.shape[-1], bound_rows)
        widths = {"D": D, "V": V, "BLOCK_D": block_width(D), "BLOCK_V": block_width(V)}
        self.constants: dict[str, Any] = {**widths, "PRECISION": precision(query.dtype, V)}
        self.key = (Q >= LONG,)


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _candidates(table: _Table, call: _Call) -> tuple[Tiles, ...]:
    widths = max(64, call.constants["BLOCK_D"]), max(64, call.constants["BLOCK_V"])
    return _FLOAT32[widths[0] > 128 :] if call.matrices[0].data.dtype == torch.float32 else table[widths]


def row_products(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns the sum of grad * out, (B, H, Q, V) each, over channels, "delta": float32 (B, H, Q)."""
    B, H, Q, V = grad.shape
    result = torch.empty(B, H, Q, dtype=torch.float32, device=grad.device)
    launch(
        row_products_kernel,
        lambda tiles: (triton.cdiv(Q, tiles.rows) * B * H,),
        [Tiles(32, 16)],
        (heads(grad), heads(out), result, H, Q),
        {"V": V, "BLOCK_V": block_width(V)},
    )
    return result


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, constant: torch.Tensor | None = None,
    initial: tuple[torch.Tensor, torch.Tensor] | None = None, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Softmax attention.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key: (B, G, K, D), the same type.
        value: (B, G, K, V), the same type, V <= D <= 2 V.
        constant: float32 (B, H, Q), added to all logits of a row.
        initial: (out, lse), (B, H, Q, V) and float32 (B, H, Q): an attention over other keys, to be continued; lse is
            +1e30 in rows that saw nothing.
        options: of all launchers; all but scaling are optional.
            scaling: the factor on q.k, positive.
            key_ranges: int32 (B, 1, Q + K, 2), or None: causal. See the top of the file.
            logit_bias: of `decay_argument` or `relative_argument`.
            dropout: of `dropout_arguments`.
            bound: (start, rows), start int32 (B, H, n) with n at least Q / rows: row i sees only keys before
                start[b, h, i // rows].

    Returns:
        out (B, H, Q, V) in the type of the query, and the log-sum-exp of each row's logits, float32 (B, H, Q); 0 and
        +1e30 in rows that see nothing.
    """
    call = _Call(query, key, value, **options)
    B, H, G, Q, _, V = call.shape
    constant = _contiguous(constant)
    before = [_contiguous(one) for one in initial or (None, None)]
    out = torch.empty(B, H, Q, V, dtype=query.dtype, device=query.device)
    lse = torch.empty(B, H, Q, dtype=torch.float32, device=query.device)
    launch(
        forward_kernel,
        lambda tiles: (triton.cdiv(Q, tiles.rows) * B * H,),
        _candidates(_FORWARD, call),
        (*call.matrices, out, lse, *call.options, constant, *before, call.scaling, H, H // G, *call.lengths),
        call.constants,
        key=call.key,
    )
    return out, lse


def flash_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor, *, initial: tuple[torch.Tensor | None, ...] = (None, None, None),
    decay_gradient: bool = False, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:  # fmt: skip
    """The gradients of query, key, value, and of c of rows and keys (see `LogitBias`).

    Arguments are those of `flash_forward` where nothing else is said.

    The weights are exp(scaling * q.k - lse): if the logits have a constant, it is subtracted from lse by the caller.

    Args:
        grad: (B, H, Q, V), of the output, the type of the query.
        lse: float32 (B, H, Q), of all keys that the softmax ran over; +1e30 in rows that see nothing.
        delta: float32 (B, H, Q), `row_products(grad, out)`.
        initial: what is added to the first three results: (B, H, Q, D), float32 (B, G, K, D) and (B, G, K, V), or None.
        decay_gradient: whether the last two gradients are computed. That of the rows is the rounding error of the sum
            of a row's weights, which the sums over keys would add up.

    Returns:
        (B, H, Q, D), (B, G, K, D), (B, G, K, V) in the type of the query; float32 (B, H, Q) and (B, H, K), or None.
    """
    call = _Call(query, key, value, **options)
    B, H, G, Q, K, _ = call.shape
    before_query, *before = map(_contiguous, initial)
    grad_query, grad_key, grad_value = (
        torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (query, key, value)
    )
    of_decay = None
    if decay_gradient:
        of_decay = lse.new_empty(B, H, Q), lse.new_empty(B, H, K)
    of_rows, of_keys = of_decay or (None, None)
    given = (heads(grad), *call.matrices, lse.contiguous(), delta.contiguous())
    launch(
        backward_rows_kernel,
        lambda tiles: (triton.cdiv(Q, tiles.rows) * B * H,),
        _candidates(_ROWS, call),
        (*given, grad_query, of_rows, *call.options, before_query, call.scaling, H, H // G, *call.lengths),
        call.constants,
        key=call.key,
        repeatable=call.options[2].grad is None,
    )
    launch(
        backward_columns_kernel,
        lambda tiles: (triton.cdiv(K, tiles.columns) * B * G,),
        _candidates(_COLUMNS, call),
        (*given, grad_key, grad_value, of_keys, *call.options, *before, call.scaling, G, *call.lengths),
        {**call.constants, "GROUPS": H // G, "BLOCK_G": triton.next_power_of_2(H // G)},
        key=call.key,
    )
    return grad_query, grad_key, grad_value, of_decay


def decode_rows(groups: int) -> int:
    """Returns how many of the query heads of a key head are the rows of a program in decoding."""
    return min(block_width(groups), 32)


def _decode_splits(query: torch.Tensor, key_heads: int, K: int) -> int:
    """Returns how many programs share the keys of a key head; `key_heads` is B * G."""
    if query.device.type != "cuda":
        return INTERPRETED_SPLITS
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return max(1, min(triton.cdiv(2 * processors, max(1, key_heads)), triton.cdiv(K, SPLIT_KEYS)))


def flash_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, polar: tuple[Any, ...] | None = None,
    constant: torch.Tensor | None = None, initial: tuple[torch.Tensor, torch.Tensor] | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of one query row, forward only: the keys are shared out over programs. Arguments as in `flash_forward`.

    Args:
        query: (B, H, 1, D).
        polar: the tensors of `Polar`: cosines and sines of the query, of the keys, and the shift or None. The first R
            channels of query and key are then magnitudes. None: plain products.
        bound: (start, rows), start int32 (B, G, n), one for each `decode_rows` of the heads that share a key head;
            `rows` is not used.

    Returns:
        (B, H, 1, V) in the type of the query; 0 where nothing is seen.
    """
    call = _Call(query, key, value, **options)
    B, H, G, _, K, V = call.shape
    key_ranges, start, logit_bias, _ = call.options
    rows = decode_rows(H // G)
    blocks = triton.cdiv(H // G, rows)
    constant = _contiguous(constant)
    before = [_contiguous(one) for one in initial or (None, None)]
    tables, R = (Polar(), 0) if polar is None else (polar_argument(*polar), polar[0].shape[-1])
    splits = _decode_splits(query, B * G, K)
    parts = torch.empty(B, G, splits, H // G, V, dtype=torch.float32, device=query.device)
    top_lse = torch.empty(B, G, splits, H // G, dtype=torch.float32, device=query.device)
    out = torch.empty(B, H, 1, V, dtype=query.dtype, device=query.device)
    launch(
        decode_kernel,
        lambda tiles: (splits * blocks * B * G,),
        [dataclasses.replace(one, rows=rows) for one in _DECODE[query.dtype == torch.float32 and V > 128 :]],
        (*call.matrices, parts, top_lse, key_ranges, start, tables, logit_bias, call.scaling, G, H // G, K, splits),
        {**call.constants, "R": R},
        key=(rows,),
    )
    launch(
        combine_kernel,
        lambda tiles: (B * H,),
        [Tiles(16, 16)],
        (parts, top_lse, out, constant, *before, H // G, splits),
        {"V": V, "BLOCK_V": block_width(V)},
    )
    return out
