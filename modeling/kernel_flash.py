"""Causal softmax attention as Triton kernels: forward, backward and decoding, with polar (PoPE) scores if wanted.

These are launchers on raw tensors, without autograd; the operators of an encoding are built from them (`kernel_pope`,
`kernel_cope`). Their PyTorch counterpart is `attention_blockwise`.

Supports: causal attention with rows aligned to the end, and everything that `ranges` can say; grouped heads; query
length at most key length; head dims 16 to 256; float32, bfloat16, float16 (sums always float32). Does not support:
value width different from key width, dropout, additive masks.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, R rotated channels (the first R of
D), n blocks of rows that share a bound, S splits of the keys in decoding. Query head h uses key head h // (H // G).

What row i sees. Without `ranges`: keys j <= K - Q + i. With `ranges`, int32 (B, 1, Q + K, 2): key j exactly if
ranges[b, 0, i, 0] <= j < ranges[b, 0, i, 1] and ranges[b, 0, Q + j, 0] != 0, causal or not. With a `Bound` besides:
only keys j < start[b, h, i // rows]. A row that sees nothing has output 0 and log-sum-exp +1e30.

Polar scores (PoPE): channel c < R of a query or key is a magnitude mu, and stands for the pair (mu cos, mu sin) of its
phase; the score is the dot product of the pairs, plus that of the plain channels c >= R. A plain channel is computed as
one of phase 0. The pairs exist in registers and shared memory only.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .kernel_launch import Tiles, block_width, dot, launch, precision

try:
    import triton
    import triton.language as tl
except ImportError:  # Transformers checks the imports of every file of a checkpoint, but not those in a `try`.
    raise

# Far below every logit, and far from overflow. -inf would give NaN in rows that see nothing yet.
MASKED = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Rows, or blocks of rows, that a program looks at in one step when it looks for those that see its keys.
SCAN = tl.constexpr(512)
# Parts of the channels in which the gradients of polar features are finished.
PARTS = tl.constexpr(2)


@dataclasses.dataclass(frozen=True)
class Polar:
    """The phases of polar scores, as tables.

    Attributes:
        cos_q, sin_q: float32 or float16 (1 or B, Q, R), of the queries.
        cos_k, sin_k: the same (1 or B, K, R), of the keys.
        shift: float32 (H, R), subtracted from the phases of the queries, or None.
    """

    cos_q: torch.Tensor
    sin_q: torch.Tensor
    cos_k: torch.Tensor
    sin_k: torch.Tensor
    shift: torch.Tensor | None = None


# Tiles.


@triton.jit
def _load(
    pointer,
    stride,
    start,
    length,
    other,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Rows start.. of a (length, D) matrix as a (BLOCK, BLOCK_D) tile, `other` outside. WHOLE: no row is outside."""
    rows = tl.arange(0, BLOCK)[:, None]
    channels = tl.arange(0, BLOCK_D)[None, :]
    # 64 bits for the tile's address only.
    pointers = pointer + tl.cast(start, tl.int64) * stride + (rows * stride + channels)
    if WHOLE and D == BLOCK_D:
        tile = tl.load(pointers)
    elif WHOLE:
        tile = tl.load(pointers, mask=channels < D, other=other)
    elif D == BLOCK_D:
        tile = tl.load(pointers, mask=start + rows < length, other=other)
    else:
        tile = tl.load(pointers, mask=(start + rows < length) & (channels < D), other=other)
    return tile


@triton.jit
def _store(pointer, stride, start, length, tile, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes a (BLOCK, BLOCK_D) tile to rows start.. of a (length, D) matrix."""
    rows = tl.arange(0, BLOCK)[:, None]
    channels = tl.arange(0, BLOCK_D)[None, :]
    pointers = pointer + tl.cast(start, tl.int64) * stride + (rows * stride + channels)
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=(start + rows < length) & (channels < D))


@triton.jit
def _phases(cos, sin, start, length, R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
    """Cosines and sines of rows start.., float32 (BLOCK, BLOCK_D); plain channels have phase 0."""
    cos_tile = _load(cos, R, start, length, 1.0, R, BLOCK, BLOCK_D, WHOLE)
    sin_tile = _load(sin, R, start, length, 0.0, R, BLOCK, BLOCK_D, WHOLE)
    return cos_tile.to(tl.float32), sin_tile.to(tl.float32)


@triton.jit
def _shift(shift, heads, stride, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Cosines and sines of a head's shift, float32 (1, BLOCK_D); plain channels, from R on, are not shifted."""
    channels = tl.arange(0, BLOCK_D)[None, :]
    cos = tl.load(shift + channels, mask=channels < R, other=1.0)
    sin = tl.load(shift + heads * stride + channels, mask=channels < R, other=0.0)
    return cos, sin


@triton.jit
def _turned_back(cos, sin, shift_cos, shift_sin):
    """Cosines and sines of phase - shift."""
    return cos * shift_cos + sin * shift_sin, sin * shift_cos - cos * shift_sin


@triton.jit
def _rotate(magnitude, cos, sin):
    """The pair (mu cos, mu sin), rounded to the type of the magnitudes."""
    wide = magnitude.to(tl.float32)
    return (wide * cos).to(magnitude.dtype), (wide * sin).to(magnitude.dtype)


@triton.jit
def _halves(tile, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """The first and the second half of the channels of a (BLOCK, BLOCK_D) tile."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK, 2, BLOCK_D // 2)), (0, 2, 1)))


@triton.jit
def _store_turned_back(
    real,
    imaginary,
    features,
    feature_stride,
    cos,
    sin,
    shift,
    shift_heads,
    result,
    grad_shift,
    initial,
    start,
    length,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """From the gradients of pairs, (BLOCK, BLOCK_D) each, writes those of the magnitudes, and of the shift.

    In PARTS parts of the channels, one after the other, to save registers. The tile begins at channel C. `shift` is
    the head's cosines, with the sines `shift_heads` rows below, or None; `grad_shift` (R,), `initial` (length, D) or
    None.
    """
    if PARTS > 1:
        HALF: tl.constexpr = BLOCK_D // 2
        real_1, real_2 = _halves(real, BLOCK, BLOCK_D)
        imaginary_1, imaginary_2 = _halves(imaginary, BLOCK, BLOCK_D)
        _store_turned_back(
            real_1, imaginary_1, features, feature_stride, cos, sin, shift, shift_heads, result, grad_shift, initial,
            start, length, C, PARTS // 2, D, R, BLOCK, HALF,
        )  # fmt: skip
        _store_turned_back(
            real_2, imaginary_2, features, feature_stride, cos, sin, shift, shift_heads, result, grad_shift, initial,
            start, length, C + HALF, PARTS // 2, D, R, BLOCK, HALF,
        )  # fmt: skip
    else:
        cos_tile = _load(cos + C, R, start, length, 1.0, R - C, BLOCK, BLOCK_D, False).to(tl.float32)
        sin_tile = _load(sin + C, R, start, length, 0.0, R - C, BLOCK, BLOCK_D, False).to(tl.float32)
        if shift is not None:
            shift_cos, shift_sin = _shift(shift + C, shift_heads, R, R - C, BLOCK_D)
            cos_tile, sin_tile = _turned_back(cos_tile, sin_tile, shift_cos, shift_sin)
        if grad_shift is not None:
            magnitude = _load(features + C, feature_stride, start, length, 0.0, D - C, BLOCK, BLOCK_D, False)
            part = tl.sum(magnitude.to(tl.float32) * (real * sin_tile - imaginary * cos_tile), 0)
            channels = tl.arange(0, BLOCK_D)
            tl.store(grad_shift + C + channels, part, mask=channels < R - C)
        grad = real * cos_tile + imaginary * sin_tile
        if initial is not None:
            grad += _load(initial + C, D, start, length, 0.0, D - C, BLOCK, BLOCK_D, False).to(tl.float32)
        _store(result + C, D, start, length, grad, D - C, BLOCK, BLOCK_D)


@triton.jit
def _visible_slots(ranges, bound, bound_rows, rows, Q, K):
    """The slots that some rows see: from `low` on, up to but without `high`. Of rows from Q on, nothing is promised."""
    low = tl.zeros_like(rows)
    high = rows + (K - Q + 1)
    if ranges is not None:
        low = tl.load(ranges + rows * 2, mask=rows < Q, other=0)
        high = tl.minimum(tl.load(ranges + rows * 2 + 1, mask=rows < Q, other=0), K)
    if bound is not None:
        high = tl.minimum(high, tl.load(bound + rows // bound_rows, mask=rows < Q, other=0))
    return low, high


@triton.jit
def _key_range(ranges, bound, low, high, start_m, Q, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that a block of rows visits: `first` (a multiple of BLOCK_N) to `last`; up to `full` no mask is needed.

    `full` is a multiple of BLOCK_N, or `first` with ranges.
    """
    inside = start_m + tl.arange(0, BLOCK_M) < Q
    if ranges is not None:
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
def _seen(ranges, low, high, start, Q, K, BLOCK_N: tl.constexpr):
    """Which of the keys start.. each row sees, (rows, BLOCK_N)."""
    slots = start + tl.arange(0, BLOCK_N)
    seen = slots[None, :] < high[:, None]
    if ranges is not None:
        valid = tl.load(ranges + (Q + slots) * 2, mask=slots < K, other=0) != 0
        seen = seen & (slots[None, :] >= low[:, None]) & valid[None, :]
    return seen


# Forward.


@triton.jit
def _forward_keys(
    acc,
    total,
    top,
    real,
    imaginary,
    key,
    value,
    key_stride,
    value_stride,
    cos_k,
    sin_k,
    ranges,
    low,
    high,
    scale,
    first,
    last,
    Q,
    K,
    MASK: tl.constexpr,
    POLAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the keys first..last to the online softmax (acc, total, top) of a block of rows; top is in base 2."""
    for start in range(first, last, BLOCK_N):
        k = _load(key, key_stride, start, K, 0.0, D, BLOCK_N, BLOCK_D, not MASK)
        if POLAR:
            cos, sin = _phases(cos_k, sin_k, start, K, R, BLOCK_N, BLOCK_D, not MASK)
            k_real, k_imaginary = _rotate(k, cos, sin)
            logits = dot(real, tl.trans(k_real), None, PRECISION)
            logits = dot(imaginary, tl.trans(k_imaginary), logits, PRECISION)
        else:
            logits = dot(real, tl.trans(k), None, PRECISION)
        if MASK:
            seen = _seen(ranges, low, high, start, Q, K, BLOCK_N)
            logits = tl.where(seen, logits, MASKED)
        new_top = tl.maximum(top, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - new_top[:, None])
        if MASK:
            # A row that has seen nothing yet has exp2(0) here.
            weights = tl.where(seen, weights, 0.0)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        v = _load(value, value_stride, start, K, 0.0, D, BLOCK_N, BLOCK_D, not MASK)
        acc = dot(weights.to(v.dtype), v, acc, PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["H", "groups", "Q", "K", "bound_blocks", "bound_rows"])
def forward_kernel(
    query,
    key,
    value,
    out,
    lse,
    ranges,
    bound,
    constant,
    initial_out,
    initial_lse,
    cos_q,
    sin_q,
    cos_k,
    sin_k,
    shift,
    scaling,
    H,
    groups,
    Q,
    K,
    bound_blocks,
    bound_rows,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    phase_q_batch,
    phase_k_batch,
    POLAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M rows of one head, all keys that they see. Optional pointers are None."""
    blocks = tl.cdiv(Q, BLOCK_M)
    # The rows that see most begin first.
    start_m = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head_index = (tl.program_id(0) // blocks).to(tl.int64)
    b = head_index // H
    h = head_index % H
    query += b * query_batch + h * query_head
    key += b * key_batch + (h // groups) * key_head
    value += b * value_batch + (h // groups) * value_head
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < Q
    if ranges is not None:
        ranges += b * (Q + K) * 2
    if bound is not None:
        bound += head_index * bound_blocks
    low, high = _visible_slots(ranges, bound, bound_rows, rows, Q, K)
    first, full, last = _key_range(ranges, bound, low, high, start_m, Q, K, BLOCK_M, BLOCK_N)

    real = _load(query, query_row, start_m, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    imaginary = real
    if POLAR:
        cos_k += b * phase_k_batch
        sin_k += b * phase_k_batch
        cos, sin = _phases(cos_q + b * phase_q_batch, sin_q + b * phase_q_batch, start_m, Q, R, BLOCK_M, BLOCK_D, False)
        if shift is not None:
            shift_cos, shift_sin = _shift(shift + h * R, H, R, R, BLOCK_D)
            cos, sin = _turned_back(cos, sin, shift_cos, shift_sin)
        real, imaginary = _rotate(real, cos, sin)

    # The constant of a row shifts its log-sum-exp, and nothing else.
    offset = tl.zeros([BLOCK_M], dtype=tl.float32)
    if constant is not None:
        offset = tl.load(constant + head_index * Q + rows, mask=inside, other=0.0)
    if initial_out is not None:
        before = tl.load(initial_lse + head_index * Q + rows, mask=inside, other=-MASKED)
        empty = before > -0.5 * MASKED
        top = tl.where(empty, MASKED, (before - offset) * LOG2_E)
        total = tl.where(empty, 0.0, 1.0)
        acc = _load(initial_out + head_index * Q * D, D, start_m, Q, 0.0, D, BLOCK_M, BLOCK_D, False).to(tl.float32)
        acc = tl.where(empty[:, None], 0.0, acc)
    else:
        top = tl.full([BLOCK_M], MASKED, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    scale = scaling * LOG2_E
    if ranges is None:
        acc, total, top = _forward_keys(
            acc, total, top, real, imaginary, key, value, key_row, value_row, cos_k, sin_k, ranges, low, high,
            scale, first, full, Q, K, False, POLAR, D, R, PRECISION, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    acc, total, top = _forward_keys(
        acc, total, top, real, imaginary, key, value, key_row, value_row, cos_k, sin_k, ranges, low, high,
        scale, full, last, Q, K, True, POLAR, D, R, PRECISION, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    acc = acc / total[:, None]
    row_lse = tl.where(nothing, -MASKED, (top + tl.log2(total)) * LN_2 + offset)
    _store(out + head_index * Q * D, D, start_m, Q, acc, D, BLOCK_M, BLOCK_D)
    tl.store(lse + head_index * Q + rows, row_lse, mask=inside)


# Backward.


@triton.jit(do_not_specialize=["H", "Q"])
def row_products_kernel(
    grad,
    out,
    result,
    H,
    Q,
    grad_batch,
    grad_head,
    grad_row,
    out_batch,
    out_head,
    out_row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M rows of one head. BLOCK_N is not used."""
    blocks = tl.cdiv(Q, BLOCK_M)
    start = tl.program_id(0) % blocks * BLOCK_M
    head_index = (tl.program_id(0) // blocks).to(tl.int64)
    b = head_index // H
    h = head_index % H
    left = _load(grad + b * grad_batch + h * grad_head, grad_row, start, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    right = _load(out + b * out_batch + h * out_head, out_row, start, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    rows = start + tl.arange(0, BLOCK_M)
    products = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    tl.store(result + head_index * Q + rows, products, mask=rows < Q)


@triton.jit
def _rows_keys(
    acc,
    acc_imaginary,
    real,
    imaginary,
    grad,
    row_lse,
    row_delta,
    key,
    value,
    key_stride,
    value_stride,
    cos_k,
    sin_k,
    ranges,
    low,
    high,
    scale,
    first,
    last,
    Q,
    K,
    MASK: tl.constexpr,
    POLAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds what the keys first..last contribute to the gradient of a block of query rows; row_lse is in base 2."""
    for start in range(first, last, BLOCK_N):
        k = _load(key, key_stride, start, K, 0.0, D, BLOCK_N, BLOCK_D, not MASK)
        v = _load(value, value_stride, start, K, 0.0, D, BLOCK_N, BLOCK_D, not MASK)
        if POLAR:
            cos, sin = _phases(cos_k, sin_k, start, K, R, BLOCK_N, BLOCK_D, not MASK)
            k, k_imaginary = _rotate(k, cos, sin)
        logits = dot(real, tl.trans(k), None, PRECISION)
        if POLAR:
            logits = dot(imaginary, tl.trans(k_imaginary), logits, PRECISION)
        weights = tl.exp2(logits * scale - row_lse[:, None])
        if MASK:
            weights = tl.where(_seen(ranges, low, high, start, Q, K, BLOCK_N), weights, 0.0)
        grad_weights = dot(grad, tl.trans(v), None, PRECISION)
        grad_logits = (weights * (grad_weights - row_delta[:, None])).to(k.dtype)
        acc = dot(grad_logits, k, acc, PRECISION)
        if POLAR:
            acc_imaginary = dot(grad_logits, k_imaginary, acc_imaginary, PRECISION)
    return acc, acc_imaginary


@triton.jit(do_not_specialize=["H", "groups", "Q", "K", "bound_blocks", "bound_rows"])
def backward_rows_kernel(
    grad,
    query,
    key,
    value,
    lse,
    delta,
    grad_query,
    grad_shift,
    ranges,
    bound,
    initial,
    cos_q,
    sin_q,
    cos_k,
    sin_k,
    shift,
    scaling,
    H,
    groups,
    Q,
    K,
    bound_blocks,
    bound_rows,
    grad_batch,
    grad_head,
    grad_row,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    phase_q_batch,
    phase_k_batch,
    POLAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: the gradient of BLOCK_M query rows of one head, and their part of the shift's (program, R)."""
    blocks = tl.cdiv(Q, BLOCK_M)
    start_m = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head_index = (tl.program_id(0) // blocks).to(tl.int64)
    b = head_index // H
    h = head_index % H
    grad += b * grad_batch + h * grad_head
    query += b * query_batch + h * query_head
    key += b * key_batch + (h // groups) * key_head
    value += b * value_batch + (h // groups) * value_head
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < Q
    if ranges is not None:
        ranges += b * (Q + K) * 2
    if bound is not None:
        bound += head_index * bound_blocks
    low, high = _visible_slots(ranges, bound, bound_rows, rows, Q, K)
    first, full, last = _key_range(ranges, bound, low, high, start_m, Q, K, BLOCK_M, BLOCK_N)

    real = _load(query, query_row, start_m, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    imaginary = real
    if POLAR:
        cos_q += b * phase_q_batch
        sin_q += b * phase_q_batch
        cos_k += b * phase_k_batch
        sin_k += b * phase_k_batch
        cos, sin = _phases(cos_q, sin_q, start_m, Q, R, BLOCK_M, BLOCK_D, False)
        if shift is not None:
            shift_cos, shift_sin = _shift(shift + h * R, H, R, R, BLOCK_D)
            cos, sin = _turned_back(cos, sin, shift_cos, shift_sin)
        real, imaginary = _rotate(real, cos, sin)
    grad_tile = _load(grad, grad_row, start_m, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    row_lse = tl.load(lse + head_index * Q + rows, mask=inside, other=0.0) * LOG2_E
    row_delta = tl.load(delta + head_index * Q + rows, mask=inside, other=0.0)

    scale = scaling * LOG2_E
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    acc_imaginary = acc
    if ranges is None:
        acc, acc_imaginary = _rows_keys(
            acc, acc_imaginary, real, imaginary, grad_tile, row_lse, row_delta, key, value, key_row, value_row,
            cos_k, sin_k, ranges, low, high, scale, first, full, Q, K,
            False, POLAR, D, R, PRECISION, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    acc, acc_imaginary = _rows_keys(
        acc, acc_imaginary, real, imaginary, grad_tile, row_lse, row_delta, key, value, key_row, value_row,
        cos_k, sin_k, ranges, low, high, scale, full, last, Q, K,
        True, POLAR, D, R, PRECISION, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    acc *= scaling
    grad_query += head_index * Q * D
    if initial is not None:
        initial += head_index * Q * D
    if POLAR:
        if shift is not None:
            shift += h * R
        if grad_shift is not None:
            grad_shift += (head_index * blocks + start_m // BLOCK_M) * R
        _store_turned_back(
            acc, acc_imaginary * scaling, query, query_row, cos_q, sin_q, shift, H, grad_query, grad_shift, initial,
            start_m, Q, 0, PARTS, D, R, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    else:
        if initial is not None:
            acc += _load(initial, D, start_m, Q, 0.0, D, BLOCK_M, BLOCK_D, False).to(tl.float32)
        _store(grad_query, D, start_m, Q, acc, D, BLOCK_M, BLOCK_D)


@triton.jit
def _columns_rows(
    grad_k,
    grad_k_imaginary,
    grad_v,
    real,
    imaginary,
    v,
    valid,
    grad,
    query,
    lse,
    delta,
    grad_head,
    grad_row,
    query_head,
    query_row,
    cos_q,
    sin_q,
    shift,
    H,
    head,
    ranges,
    bound,
    bound_blocks,
    bound_rows,
    scale,
    start_n,
    first,
    last,
    Q,
    K,
    MASK: tl.constexpr,
    GROUPS: tl.constexpr,
    POLAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds what the query rows first..last contribute to the gradients of a block of keys and values.

    The pointers, and `head`, are of the first query head of the group. `first` and `last` are multiples of BLOCK_M.
    """
    # One loop over rows and heads: in nested loops the accumulators would be copied, which costs their registers again.
    for index in range(first // BLOCK_M * GROUPS, last // BLOCK_M * GROUPS):
        start = index // GROUPS * BLOCK_M
        h = tl.cast(index % GROUPS, tl.int64)
        rows = start + tl.arange(0, BLOCK_M)
        q = _load(query + h * query_head, query_row, start, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
        if POLAR:
            cos, sin = _phases(cos_q, sin_q, start, Q, R, BLOCK_M, BLOCK_D, False)
            if shift is not None and GROUPS > 1:
                shift_cos, shift_sin = _shift(shift + (head + h) * R, H, R, R, BLOCK_D)
                cos, sin = _turned_back(cos, sin, shift_cos, shift_sin)
            q, q_imaginary = _rotate(q, cos, sin)
        # Transposed: (BLOCK_N, BLOCK_M).
        logits = dot(real, tl.trans(q), None, PRECISION)
        if POLAR:
            logits = dot(imaginary, tl.trans(q_imaginary), logits, PRECISION)
        # Rows from Q on have weights, but add nothing: their query, gradient and delta are 0.
        row_lse = tl.load(lse + h * Q + rows, mask=rows < Q, other=0.0) * LOG2_E
        weights = tl.exp2(logits * scale - row_lse[None, :])
        if MASK:
            head_bound = bound
            if bound is not None:
                head_bound = bound + h * bound_blocks
            low, high = _visible_slots(ranges, head_bound, bound_rows, rows, Q, K)
            slots = start_n + tl.arange(0, BLOCK_N)
            seen = slots[:, None] < high[None, :]
            if ranges is not None:
                seen = seen & (slots[:, None] >= low[None, :]) & valid[:, None]
            weights = tl.where(seen, weights, 0.0)
        grad_tile = _load(grad + h * grad_head, grad_row, start, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
        grad_v = dot(weights.to(grad_tile.dtype), grad_tile, grad_v, PRECISION)
        grad_weights = dot(v, tl.trans(grad_tile), None, PRECISION)
        row_delta = tl.load(delta + h * Q + rows, mask=rows < Q, other=0.0)
        grad_logits = (weights * (grad_weights - row_delta[None, :])).to(q.dtype)
        grad_k = dot(grad_logits, q, grad_k, PRECISION)
        if POLAR:
            grad_k_imaginary = dot(grad_logits, q_imaginary, grad_k_imaginary, PRECISION)
    return grad_k, grad_k_imaginary, grad_v


@triton.jit
def _rows_by_limits(ranges, start_n, Q, K, BLOCK_N: tl.constexpr):
    """The rows, from `first` up to but without `last`, among which are all that see keys of a block."""
    # The loop carries scalars: of what comes from carried tensors Triton does not know the alignment, and would not
    # pipeline the loads of a loop over these rows.
    first = Q
    last = 0
    for start in range(0, Q, SCAN):
        rows = start + tl.arange(0, SCAN)
        low, high = _visible_slots(ranges, None, 1, rows, Q, K)
        some = (rows < Q) & (low < high) & (low < start_n + BLOCK_N) & (high > start_n)
        first = tl.minimum(first, tl.min(tl.where(some, rows, Q)))
        last = tl.maximum(last, tl.max(tl.where(some, rows + 1, 0)))
    return first, last


@triton.jit
def _rows_by_bound(bound, bound_blocks, bound_rows, start_n, Q, K, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """As `_rows_by_limits`, for the bounds of some heads; from row `full` on, all rows see all keys of the block."""
    first = Q
    full = 0
    last = 0
    for start in range(0, bound_blocks * GROUPS, SCAN):
        entries = start + tl.arange(0, SCAN)
        inside = entries < bound_blocks * GROUPS
        rows = entries % bound_blocks * bound_rows
        high = tl.load(bound + entries, mask=inside, other=0)
        some = inside & (high > start_n)
        first = tl.minimum(first, tl.min(tl.where(some, rows, Q)))
        last = tl.maximum(last, tl.max(tl.where(some, rows + bound_rows, 0)))
        # Keys from K on do not count.
        part = inside & (high < tl.minimum(start_n + BLOCK_N, K))
        full = tl.maximum(full, tl.max(tl.where(part, rows + bound_rows, 0)))
    return first, tl.minimum(full, Q), tl.minimum(last, Q)


@triton.jit(do_not_specialize=["G", "Q", "K", "bound_blocks", "bound_rows"])
def backward_columns_kernel(
    grad,
    query,
    key,
    value,
    lse,
    delta,
    grad_key,
    grad_value,
    ranges,
    bound,
    initial_key,
    initial_value,
    cos_q,
    sin_q,
    cos_k,
    sin_k,
    shift,
    scaling,
    G,
    Q,
    K,
    bound_blocks,
    bound_rows,
    grad_batch,
    grad_head,
    grad_row,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    phase_q_batch,
    phase_k_batch,
    GROUPS: tl.constexpr,
    POLAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: the gradients of BLOCK_N keys and values of one key head, from all rows of its GROUPS query heads.

    The shift is on the phases of the queries; but with one query head, it is put on the keys, once a program.
    """
    blocks = tl.cdiv(K, BLOCK_N)
    # The oldest keys are seen most, and begin first.
    start_n = tl.program_id(0) % blocks * BLOCK_N
    head_index = (tl.program_id(0) // blocks).to(tl.int64)
    b = head_index // G
    g = head_index % G
    key += b * key_batch + g * key_head
    value += b * value_batch + g * value_head
    grad += b * grad_batch + g * GROUPS * grad_head
    query += b * query_batch + g * GROUPS * query_head
    lse += head_index * GROUPS * Q
    delta += head_index * GROUPS * Q
    slots = start_n + tl.arange(0, BLOCK_N)
    valid = slots < K
    if ranges is not None:
        ranges += b * (Q + K) * 2
        valid = tl.load(ranges + (Q + slots) * 2, mask=valid, other=0) != 0

    if ranges is not None:
        first, last = _rows_by_limits(ranges, start_n, Q, K, BLOCK_N)
        full = last
    else:
        first = tl.maximum(start_n - (K - Q), 0)
        full = tl.maximum(tl.minimum(start_n + BLOCK_N, K) - 1 - (K - Q), 0)
        last = Q
    if bound is not None:
        bound += head_index * GROUPS * bound_blocks
        bound_first, bound_full, bound_last = _rows_by_bound(
            bound, bound_blocks, bound_rows, start_n, Q, K, GROUPS, BLOCK_N
        )
        first = tl.maximum(first, bound_first)
        full = tl.maximum(full, bound_full)
        last = tl.minimum(last, bound_last)
    first = first // BLOCK_M * BLOCK_M
    last = tl.cdiv(last, BLOCK_M) * BLOCK_M
    full = tl.minimum(tl.maximum(tl.cdiv(full, BLOCK_M) * BLOCK_M, first), last)

    real = _load(key, key_row, start_n, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    imaginary = real
    if POLAR:
        cos_q += b * phase_q_batch
        sin_q += b * phase_q_batch
        cos_k += b * phase_k_batch
        sin_k += b * phase_k_batch
        cos, sin = _phases(cos_k, sin_k, start_n, K, R, BLOCK_N, BLOCK_D, False)
        if shift is not None and GROUPS == 1:
            shift_cos, shift_sin = _shift(shift + g * R, 2 * G, R, R, BLOCK_D)
            cos, sin = _turned_back(cos, sin, shift_cos, shift_sin)
        real, imaginary = _rotate(real, cos, sin)
    v = _load(value, value_row, start_n, K, 0.0, D, BLOCK_N, BLOCK_D, False)

    scale = scaling * LOG2_E
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    grad_k_imaginary = grad_k
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    grad_k, grad_k_imaginary, grad_v = _columns_rows(
        grad_k, grad_k_imaginary, grad_v, real, imaginary, v, valid, grad, query, lse, delta,
        grad_head, grad_row, query_head, query_row, cos_q, sin_q, shift, G * GROUPS, g * GROUPS,
        ranges, bound, bound_blocks, bound_rows, scale, start_n, first, full, Q, K,
        True, GROUPS, POLAR, D, R, PRECISION, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if ranges is None:
        grad_k, grad_k_imaginary, grad_v = _columns_rows(
            grad_k, grad_k_imaginary, grad_v, real, imaginary, v, valid, grad, query, lse, delta,
            grad_head, grad_row, query_head, query_row, cos_q, sin_q, shift, G * GROUPS, g * GROUPS,
            ranges, bound, bound_blocks, bound_rows, scale, start_n, full, last, Q, K,
            False, GROUPS, POLAR, D, R, PRECISION, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip

    if initial_value is not None:
        grad_v += _load(initial_value + head_index * K * D, D, start_n, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    _store(grad_value + head_index * K * D, D, start_n, K, grad_v, D, BLOCK_N, BLOCK_D)
    grad_k *= scaling
    grad_key += head_index * K * D
    if initial_key is not None:
        initial_key += head_index * K * D
    if POLAR:
        if GROUPS == 1:
            # Minus the shift: its sines, negative, are rows 2 G.. of the table.
            if shift is not None:
                shift += g * R
            _store_turned_back(
                grad_k, grad_k_imaginary * scaling, key, key_row, cos_k, sin_k, shift, 2 * G, grad_key, None,
                initial_key, start_n, K, 0, PARTS, D, R, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        else:
            _store_turned_back(
                grad_k, grad_k_imaginary * scaling, key, key_row, cos_k, sin_k, None, 0, grad_key, None,
                initial_key, start_n, K, 0, PARTS, D, R, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    else:
        if initial_key is not None:
            grad_k += _load(initial_key, D, start_n, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        _store(grad_key, D, start_n, K, grad_k, D, BLOCK_N, BLOCK_D)


# Decoding.


@triton.jit(do_not_specialize=["G", "groups", "K", "splits"])
def decode_kernel(
    query,
    key,
    value,
    out,
    top_lse,
    ranges,
    bound,
    cos_q,
    sin_q,
    cos_k,
    sin_k,
    shift,
    scaling,
    G,
    groups,
    K,
    splits,
    query_batch,
    query_head,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    phase_q_batch,
    phase_k_batch,
    POLAR: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: all query heads of one key head (a block of rows), and one split of the keys that they see.

    Writes float32 out (B, G, S, groups, D) and its log-sum-exp in base 2 (B, G, S, groups), MASKED if it saw nothing.
    """
    split = tl.program_id(0) % splits
    head_index = (tl.program_id(0) // splits).to(tl.int64)
    b = head_index // G
    g = head_index % G
    query += b * query_batch + g * groups * query_head
    key += b * key_batch + g * key_head
    value += b * value_batch + g * value_head
    rows = tl.arange(0, BLOCK_M)
    first = 0
    last = K
    if ranges is not None:
        ranges += b * (1 + K) * 2
        first = tl.maximum(tl.load(ranges), 0)
        last = tl.minimum(tl.load(ranges + 1), K)
    if bound is not None:
        last = tl.minimum(last, tl.load(bound + head_index))
    low = tl.zeros([BLOCK_M], dtype=tl.int32) + first
    high = tl.zeros([BLOCK_M], dtype=tl.int32) + last
    start = first // BLOCK_N * BLOCK_N
    # A split is whole blocks of what is visible, not of the cache.
    size = tl.cdiv(tl.maximum(last - start, 0), splits * BLOCK_N) * BLOCK_N
    start = start + split * size

    real = _load(query, query_head, 0, groups, 0.0, D, BLOCK_M, BLOCK_D, False)
    imaginary = real
    if POLAR:
        cos_k += b * phase_k_batch
        sin_k += b * phase_k_batch
        cos, sin = _phases(cos_q + b * phase_q_batch, sin_q + b * phase_q_batch, 0, 1, R, 1, BLOCK_D, False)
        if shift is not None:
            shift_cos, shift_sin = _phases(
                shift + g * groups * R, shift + (G + g) * groups * R, 0, groups, R, BLOCK_M, BLOCK_D, False
            )
            cos, sin = _turned_back(cos, sin, shift_cos, shift_sin)
        real, imaginary = _rotate(real, cos, sin)

    acc, total, top = _forward_keys(
        tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32),
        tl.full([BLOCK_M], MASKED, dtype=tl.float32), real, imaginary, key, value, key_row, value_row, cos_k, sin_k,
        ranges, low, high, scaling * LOG2_E, start, tl.minimum(start + size, last), 1, K,
        True, POLAR, D, R, PRECISION, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    index = (head_index * splits + split) * groups
    _store(out + index * D, D, 0, groups, acc / total[:, None], D, BLOCK_M, BLOCK_D)
    tl.store(top_lse + index + rows, tl.where(nothing, MASKED, top + tl.log2(total)), mask=rows < groups)


@triton.jit(do_not_specialize=["groups", "splits"])
def combine_kernel(
    parts,
    top_lse,
    out,
    constant,
    initial_out,
    initial_lse,
    groups,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one query head, all its splits in steps of BLOCK_N. BLOCK_M is not used."""
    head_index = tl.program_id(0).to(tl.int64)
    row = head_index // groups * splits * groups + head_index % groups
    channels = tl.arange(0, BLOCK_D)
    top = tl.full([1], MASKED, dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    offset = 0.0
    if constant is not None:
        offset = tl.load(constant + head_index)
    if initial_out is not None:
        before = tl.load(initial_lse + head_index + tl.zeros([1], dtype=tl.int32))
        empty = before > -0.5 * MASKED
        top = tl.where(empty, MASKED, (before - offset) * LOG2_E)
        total = tl.where(empty, 0.0, 1.0)
        acc = tl.load(initial_out + head_index * D + channels, mask=channels < D, other=0.0).to(tl.float32) * total
    for start in range(0, splits, BLOCK_N):
        indices = start + tl.arange(0, BLOCK_N)
        inside = indices < splits
        part_top = tl.load(top_lse + row + indices * groups, mask=inside, other=MASKED)
        tile = tl.load(
            parts + (row + indices[:, None] * groups) * D + channels[None, :],
            mask=inside[:, None] & (channels < D)[None, :],
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
    tl.store(out + head_index * D + channels, acc.to(out.dtype.element_ty), mask=channels < D)


# Launchers.

# Tiles (rows, columns, warps, stages) by (polar, padded head dim; less than 64 is as 64), for 16-bit types. The
# preferred first; the last fits the shared memory of every device. Those that write rows want 16 rows a warp or more,
# those that write columns 16 columns: else the tensor cores of Hopper compute some products twice.
_Table = dict[tuple[bool, int], tuple[Tiles, ...]]

_FORWARD: _Table = {
    (False, 64): (Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 2)),
    (False, 128): (Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    (False, 256): (Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
    (True, 64): (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    (True, 128): (Tiles(128, 32, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
    (True, 256): (Tiles(64, 32, 8, 1), Tiles(32, 16, 4, 1)),
}
_ROWS: _Table = {
    (False, 64): (Tiles(128, 64, 8, 2), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2)),
    (False, 128): (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
    (False, 256): (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1)),
    (True, 64): (Tiles(128, 32, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(64, 16, 4, 2)),
    (True, 128): (Tiles(64, 32, 8, 2), Tiles(128, 32, 8, 1), Tiles(64, 16, 4, 1)),
    (True, 256): (Tiles(32, 32, 8, 1), Tiles(32, 16, 4, 1)),
}
_COLUMNS: _Table = {
    (False, 64): (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
    (False, 128): (Tiles(32, 128, 8, 3), Tiles(64, 64, 8, 2), Tiles(16, 128, 8, 2), Tiles(32, 64, 4, 1)),
    (False, 256): (Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1)),
    (True, 64): (Tiles(32, 128, 8, 2), Tiles(16, 128, 8, 2), Tiles(32, 64, 4, 2), Tiles(16, 64, 4, 2)),
    (True, 128): (Tiles(32, 64, 8, 1), Tiles(16, 64, 8, 2), Tiles(16, 64, 8, 1)),
    (True, 256): (Tiles(16, 32, 8, 1),),
}
# float32 has its products on the ordinary cores, with all of their operands in registers.
_SMALLEST = Tiles(16, 16, 4, 1)
_FLOAT32 = {64: (Tiles(32, 32, 8, 1), _SMALLEST), 128: (Tiles(32, 32, 8, 1), _SMALLEST), 256: (_SMALLEST,)}
_ROW_PRODUCTS = (Tiles(32, 16, 4, 1),)
_DECODE = (Tiles(16, 64, 4, 2), Tiles(16, 32, 4, 1))
_COMBINE = (Tiles(16, 16, 4, 1),)

# Without a GPU decoding splits the keys in this number, on a GPU so that a split has at least this many keys.
INTERPRETED_SPLITS = 3
SPLIT_KEYS = 256


def _candidates(table: _Table, dtype: torch.dtype, D: int, polar: bool) -> tuple[Tiles, ...]:
    width = max(64, block_width(D))
    return _FLOAT32[width] if dtype == torch.float32 else table[polar, width]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with its channels side by side in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def check_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, ranges: torch.Tensor | None
) -> None:
    B, H, Q, D = query.shape
    G, K = key.shape[1], key.shape[2]
    if key.shape != (B, G, K, D) or value.shape != key.shape or H % G != 0 or not 0 < Q <= K or D > 256:
        raise ValueError(
            f"query={tuple(query.shape)!r}, key={tuple(key.shape)!r}, value={tuple(value.shape)!r} do not fit: they "
            "must be (B, H, Q, D), (B, G, K, D), (B, G, K, D) with H a multiple of G, Q from 1 to K, D at most 256."
        )
    types = (torch.float32, torch.bfloat16, torch.float16)
    if query.dtype not in types or key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(
            f"query {query.dtype!r}, key {key.dtype!r}, value {value.dtype!r} are not valid types: they must be the "
            f"same, of {types!r}."
        )
    if not scaling > 0:
        raise ValueError(f"scaling={scaling!r} is not valid: it must be positive.")
    if ranges is not None and (ranges.dtype != torch.int32 or ranges.shape != (B, 1, Q + K, 2)):
        raise ValueError(
            f"ranges={tuple(ranges.shape)!r} of type {ranges.dtype!r} is not valid: it must be int32 "
            f"{(B, 1, Q + K, 2)!r}."
        )


def _bound_arguments(bound: tuple[torch.Tensor, int] | None) -> tuple[torch.Tensor | None, int, int]:
    """Returns start, how many a head has, and the rows of each."""
    if bound is None:
        return None, 0, 1
    start, rows = bound
    if start.dtype != torch.int32:
        raise ValueError(f"bound of type {start.dtype!r} is not valid: it must be int32.")
    return start.contiguous(), start.shape[-1], rows


def _polar_arguments(polar: Polar | None) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, int], int]:
    """Returns the tables, cos, sin, -sin of the shift (3, H, R), the batch strides of the tables, and R."""
    if polar is None:
        return (None,) * 5, (0, 0), 0
    tables = [table.contiguous() for table in (polar.cos_q, polar.sin_q, polar.cos_k, polar.sin_k)]
    shift = None
    if polar.shift is not None:
        # Not in the kernels: their range reduction would cost registers.
        shift = torch.stack((polar.shift.cos(), polar.shift.sin(), -polar.shift.sin()))
    strides = tuple(0 if table.shape[0] == 1 else table.stride(0) for table in (tables[0], tables[2]))
    return (*tables, shift), (strides[0], strides[1]), tables[0].shape[-1]


def _constants(query: torch.Tensor, polar: Polar | None, R: int) -> dict[str, Any]:
    D = query.shape[-1]
    return {
        "POLAR": polar is not None,
        "D": D,
        "R": R,
        "PRECISION": precision(query.dtype),
        "BLOCK_D": block_width(D),
    }


# From so many rows on, tiles are chosen anew: short inputs do not fill a GPU.
LONG = 1024


def _key(query: torch.Tensor, R: int, *optional: torch.Tensor | None) -> tuple[Any, ...]:
    """What the choice of tiles depends on."""
    _, _, Q, D = query.shape
    return (query.dtype, D, R, precision(query.dtype), Q >= LONG, *(tensor is not None for tensor in optional))


def row_products(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns the sum of grad * out over channels, "delta" in the backward pass: float32 (B, H, Q).

    Args:
        grad, out: (B, H, Q, D), float32, bfloat16 or float16.
    """
    grad, out = aligned(grad), aligned(out)
    B, H, Q, D = grad.shape
    result = torch.empty(B, H, Q, dtype=torch.float32, device=grad.device)
    with torch.cuda.device_of(grad):
        launch(
            row_products_kernel,
            lambda tiles: (triton.cdiv(Q, tiles.rows) * B * H,),
            _ROW_PRODUCTS,
            (D, grad.dtype),
            (grad, out, result, H, Q, *grad.stride()[:3], *out.stride()[:3]),
            {"D": D, "BLOCK_D": block_width(D)},
        )
    return result


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    ranges: torch.Tensor | None = None,
    polar: Polar | None = None,
    bound: tuple[torch.Tensor, int] | None = None,
    constant: torch.Tensor | None = None,
    initial: tuple[torch.Tensor, torch.Tensor] | None = None,
    tiles: Sequence[Tiles] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key, value: (B, G, K, D), the same type.
        scaling: the factor on q.k, positive.
        ranges: int32 (B, 1, Q + K, 2), or None: causal. See the top of the file.
        polar: the phases of polar scores, or None.
        bound: (start, rows), start int32 (B, H, n) with n at least Q / rows: row i sees keys before start[b, h, i //
            rows] only.
        constant: float32 (B, H, Q), added to all logits of a row.
        initial: (out, lse), (B, H, Q, D) and float32 (B, H, Q): an attention over other keys, to be continued; lse is
            +1e30 in rows that saw nothing.
        tiles: candidates, instead of the file's own.

    Returns:
        out (B, H, Q, D) in the type of the query, and the log-sum-exp of each row's logits, float32 (B, H, Q); 0 and
        +1e30 in rows that see nothing.

    Raises:
        ValueError: shapes or types do not fit, or scaling is not positive.
    """
    check_inputs(query, key, value, scaling, ranges)
    query, key, value = aligned(query), aligned(key), aligned(value)
    B, H, Q, D = query.shape
    G, K = key.shape[1], key.shape[2]
    tables, phase_strides, R = _polar_arguments(polar)
    start, bound_blocks, bound_rows = _bound_arguments(bound)
    initial_out, initial_lse = (None, None) if initial is None else map(torch.Tensor.contiguous, initial)
    ranges, constant = _contiguous(ranges), _contiguous(constant)
    out = torch.empty(B, H, Q, D, dtype=query.dtype, device=query.device)
    lse = torch.empty(B, H, Q, dtype=torch.float32, device=query.device)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *phase_strides)
    with torch.cuda.device_of(query):
        launch(
            forward_kernel,
            lambda tiles: (triton.cdiv(Q, tiles.rows) * B * H,),
            tiles or _candidates(_FORWARD, query.dtype, D, polar is not None),
            _key(query, R, ranges, start, constant, initial_out, tables[-1]),
            [
                *(query, key, value, out, lse, ranges, start, constant, initial_out, initial_lse, *tables, scaling),
                *(H, H // G, Q, K, bound_blocks, bound_rows, *strides),
            ],
            _constants(query, polar, R),
        )
    return out, lse


def flash_backward_rows(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    scaling: float,
    ranges: torch.Tensor | None = None,
    polar: Polar | None = None,
    bound: tuple[torch.Tensor, int] | None = None,
    initial: torch.Tensor | None = None,
    tiles: Sequence[Tiles] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient of the query, and of the shift of polar scores.

    The weights are exp(scaling * q.k - lse): if the logits have a constant, it is subtracted from lse by the caller.

    Args:
        grad: (B, H, Q, D), of the output, the type of the query.
        query, key, value, scaling, ranges, polar, bound, tiles: as in `flash_forward`.
        lse: float32 (B, H, Q), of all keys that the softmax ran over; +1e30 in rows that see nothing.
        delta: float32 (B, H, Q), `row_products(grad, out)`.
        initial: (B, H, Q, D), added to the gradient of the query, or None.

    Returns:
        (B, H, Q, D) in the type of the query, and float32 (H, R), or None without a shift.

    Raises:
        ValueError: shapes or types do not fit, or scaling is not positive.
    """
    check_inputs(query, key, value, scaling, ranges)
    query, key, value, grad = aligned(query), aligned(key), aligned(value), aligned(grad)
    B, H, Q, D = query.shape
    G, K = key.shape[1], key.shape[2]
    tables, phase_strides, R = _polar_arguments(polar)
    start, bound_blocks, bound_rows = _bound_arguments(bound)
    ranges, initial = _contiguous(ranges), _contiguous(initial)
    candidates = tiles or _candidates(_ROWS, query.dtype, D, polar is not None)
    grad_query = torch.empty(B, H, Q, D, dtype=query.dtype, device=query.device)
    parts = None
    if tables[-1] is not None:
        most = triton.cdiv(Q, min(candidate.rows for candidate in candidates))
        parts = torch.empty(B * H * most * R, dtype=torch.float32, device=query.device)
    strides = (*grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *phase_strides)
    with torch.cuda.device_of(query):
        chosen = launch(
            backward_rows_kernel,
            lambda tiles: (triton.cdiv(Q, tiles.rows) * B * H,),
            candidates,
            _key(query, R, ranges, start, initial, parts),
            [
                *(grad, query, key, value, lse.contiguous(), delta.contiguous(), grad_query, parts, ranges, start),
                *(initial, *tables, float(scaling), H, H // G, Q, K, bound_blocks, bound_rows, *strides),
            ],
            _constants(query, polar, R),
        )
    if parts is None:
        return grad_query, None
    blocks = triton.cdiv(Q, chosen.rows)
    return grad_query, parts[: B * H * blocks * R].view(B, H, blocks, R).sum((0, 2))


def flash_backward_columns(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    scaling: float,
    ranges: torch.Tensor | None = None,
    polar: Polar | None = None,
    bound: tuple[torch.Tensor, int] | None = None,
    initial: tuple[torch.Tensor, torch.Tensor] | None = None,
    tiles: Sequence[Tiles] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of key and value.

    Args:
        grad, query, key, value, lse, delta, scaling, ranges, polar, bound, tiles: as in `flash_backward_rows`.
        initial: (grad_key, grad_value), float32 (B, G, K, D), added to the results, or None.

    Returns:
        (B, G, K, D) twice, in the type of the key.

    Raises:
        ValueError: shapes or types do not fit, or scaling is not positive.
    """
    check_inputs(query, key, value, scaling, ranges)
    query, key, value, grad = aligned(query), aligned(key), aligned(value), aligned(grad)
    B, H, Q, D = query.shape
    G, K = key.shape[1], key.shape[2]
    tables, phase_strides, R = _polar_arguments(polar)
    start, bound_blocks, bound_rows = _bound_arguments(bound)
    initial_key, initial_value = (None, None) if initial is None else map(torch.Tensor.contiguous, initial)
    ranges = _contiguous(ranges)
    grad_key = torch.empty(B, G, K, D, dtype=key.dtype, device=key.device)
    grad_value = torch.empty_like(grad_key)
    strides = (*grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *phase_strides)
    with torch.cuda.device_of(query):
        launch(
            backward_columns_kernel,
            lambda tiles: (triton.cdiv(K, tiles.columns) * B * G,),
            tiles or _candidates(_COLUMNS, query.dtype, D, polar is not None),
            (*_key(query, R, ranges, start, initial_key, tables[-1]), H // G),
            [
                *(grad, query, key, value, lse.contiguous(), delta.contiguous(), grad_key, grad_value, ranges, start),
                *(initial_key, initial_value, *tables, float(scaling), G, Q, K, bound_blocks, bound_rows, *strides),
            ],
            _constants(query, polar, R) | {"GROUPS": H // G},
        )
    return grad_key, grad_value


def _decode_splits(query: torch.Tensor, heads: int, K: int) -> int:
    """Returns how many programs share the keys of a key head; `heads` is the number of key heads, B * G."""
    if query.device.type != "cuda":
        return INTERPRETED_SPLITS
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return max(1, min(triton.cdiv(2 * processors, max(1, heads)), triton.cdiv(K, SPLIT_KEYS)))


def flash_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    ranges: torch.Tensor | None = None,
    polar: Polar | None = None,
    bound: tuple[torch.Tensor, int] | None = None,
    constant: torch.Tensor | None = None,
    initial: tuple[torch.Tensor, torch.Tensor] | None = None,
    splits: int | None = None,
    tiles: Sequence[Tiles] | None = None,
) -> torch.Tensor:
    """Attention of one query row, forward only: the keys are shared out over programs.

    Args:
        query: (B, H, 1, D).
        bound: (start, rows), start int32 (B, G, 1): the heads that share a key head share it. `rows` is not used.
        splits: programs that share the keys of a key head; None: by the size of the GPU and the number of keys.
        key, value, scaling, ranges, polar, constant, initial, tiles: as in `flash_forward`.

    Returns:
        (B, H, 1, D) in the type of the query; 0 where nothing is seen.

    Raises:
        ValueError: shapes or types do not fit, or scaling is not positive.
    """
    check_inputs(query, key, value, scaling, ranges)
    if query.shape[2] != 1:
        raise ValueError(f"query={tuple(query.shape)!r} is not valid: decoding takes one row, (B, H, 1, D).")
    query, key, value = aligned(query), aligned(key), aligned(value)
    B, H, _, D = query.shape
    G, K = key.shape[1], key.shape[2]
    tables, phase_strides, R = _polar_arguments(polar)
    start, _, _ = _bound_arguments(bound)
    if start is not None and start.shape != (B, G, 1):
        raise ValueError(f"bound={tuple(start.shape)!r} is not valid: it must be {(B, G, 1)!r}.")
    initial_out, initial_lse = (None, None) if initial is None else map(torch.Tensor.contiguous, initial)
    ranges, constant = _contiguous(ranges), _contiguous(constant)
    splits = splits or _decode_splits(query, B * G, K)
    parts = torch.empty(B, G, splits, H // G, D, dtype=torch.float32, device=query.device)
    top_lse = torch.empty(B, G, splits, H // G, dtype=torch.float32, device=query.device)
    out = torch.empty(B, H, 1, D, dtype=query.dtype, device=query.device)
    rows = block_width(H // G)
    candidates = tiles or [dataclasses.replace(candidate, rows=rows) for candidate in _DECODE]
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *phase_strides)
    with torch.cuda.device_of(query):
        launch(
            decode_kernel,
            lambda tiles: (splits * B * G,),
            candidates,
            (*_key(query, R, ranges, start, tables[-1]), rows),
            (query, key, value, parts, top_lse, ranges, start, *tables, float(scaling), G, H // G, K, splits, *strides),
            _constants(query, polar, R),
        )
        launch(
            combine_kernel,
            lambda tiles: (B * H,),
            _COMBINE,
            (D, query.dtype),
            (parts, top_lse, out, constant, initial_out, initial_lse, H // G, splits),
            {"D": D, "BLOCK_D": block_width(D)},
        )
    return out
