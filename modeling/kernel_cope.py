"""CoPE attention in Triton: outputs and all gradients in memory linear in the length.

Contextual positions grow to the left, and are clamped to P - 1. So each row has a window of keys at its right end in
which positions vary; left of it the bias is a constant of the row, z[P - 1], and attention is plain. The two parts are
separate kernels, each with its own tiles:

1. `_position_values`: z[i, n] = position_scale * r_i.e[n], for a chunk of rows; r is the query, or one of its own.
   Logits, and so z, are in base 2 within the kernels of windows.
2. `_window_forward` walks key blocks right to left with a running sum of gates per row, until every row of its block
   has reached P - 1 or has no keys left. It leaves the output and log-sum-exp over the window, the first key of the
   window of each row block (`start`), and per row: its count there (`total`), and z[P - 1] (`constant`).
3. `kernel_flash` attends to the keys before `start`, beginning from what the window left.

Backward, with dL_ij the gradient of logit ij:

4. `_window_rows` walks left to right: positions are `total` minus a running sum of gates, in fixed point. That is exact
   if the gates are those of the forward pass. Other tiles or matrix instructions can round them differently: positions
   are then a few units of the last place off, so they are clamped on both sides. The gradient of a gate is the running
   sum of the gradients of the positions left of it. The kernel writes dq, and for every row and key block of
   `_window_columns` the count and the running gradient at the left edge of the block, from which that continues.
5. The gradient of z needs no atomics. Along a row, floor(p) falls by at most 1 from key to key, so each level n is
   one run of keys, and prefix sums of dL and of dL * fraction, stored where a run ends, give the sums over runs as
   differences (`grad_values`). The gradient of the table, and its part of dq, are products.
6. `_window_columns` gives dk and dv of the window, block by block, in a fixed order: the result is deterministic.
7. `kernel_flash` adds the gradients of the plain part.

Counts have 21 fractional bits, whatever P is: the whole positions of a row at the edge of a block are apart from the
32 bits that move within it. A gate is rounded to 2^-21, so after n keys a position is off by at most n / 2^22.

Steps 1 and 2, and 1, 4, 5 and 6, run over chunks of rows, so that z, the prefix sums and the numbers at the edges of
key blocks (a pair per row and block: quadratic for all rows) stay within a budget proportional to the query's size.

All programs are along the first axis of a grid: the others have at most 65,535.

Closed gates never reach P - 1: then the window is the whole row, correct and slower.

Axes: B batch, H query heads, G key heads (query head h uses key head h // (H // G)), Q query rows, K keys, D head dim,
P positions.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .kernel_bias import (
    bias_gradient,
    bias_rows,
    bias_values,
    check_bias,
    decay_argument,
    relative_argument,
    relative_gradients,
    store_last,
)
from .kernel_flash import (
    LN_2,
    LOG2_E,
    apply_dropout,
    check_inputs,
    chunk_rows,
    decode_rows,
    dropout_arguments,
    dropout_seed,
    flash_backward,
    flash_decode,
    flash_forward,
    row_limits,
    row_parts,
    row_products,
    seen_keys,
)
from .kernel_launch import (
    INTERPRETED,
    MASKED,
    Tiles,
    block_width,
    dot,
    heads,
    launch,
    load,
    pointer,
    precision,
    store,
    tl,
    triton,
)
from .kernel_operator import Operator, empty_results

# The log-sum-exp of a row that saw nothing: exp(logit - lse) is 0.
NOTHING = tl.constexpr(1e30)
# Query rows of a window program, at most; `start` has one entry for so many rows.
WINDOW_ROWS = 64
# Row blocks that a program examines in one step to find those whose windows have its keys.
SCAN_BLOCKS = tl.constexpr(32)
# Columns of a window program, at most.
MOST_COLUMNS = tl.constexpr(64)
# Fractional bits of counts, and one key.
BITS = tl.constexpr(21)
ONE = tl.constexpr(1 << 21)


class Window(NamedTuple):
    """What the forward pass over the windows leaves; see the text of this file.

    Attributes:
        out, lse: (B, H, Q, D), and float32 (B, H, Q); in the backward pass those of all keys.
        start, end: int32 (B, H, blocks).
        total: int64 (B, H, Q).
        constant: float32 (B, H, Q).
    """

    out: Any
    lse: Any
    start: Any
    end: Any
    total: Any
    constant: Any


@triton.constexpr_function
def _has_ptx():
    """Whether a kernel is being compiled for an NVIDIA GPU, and may have inline assembly."""
    return not INTERPRETED and tl.target_info.is_cuda()


@triton.jit
def _reciprocal(numbers):
    if _has_ptx():
        # A division takes care of numbers that are too large or too small.
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [numbers], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 / numbers
    return result


@triton.jit
def _load_pairs(pairs, index):
    """The two float32 at 2 * index of each row of pairs, in memory that the kernel does not write.

    The compiler would move scattered pointers of a `tl.load` to another layout, and what comes from them back, through
    shared memory. Assembly stays in the layout of the logits.
    """
    if _has_ptx():
        addresses = pairs.to(tl.int64)[:, None] + index.to(tl.int64) * 8
        first, second = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [addresses], dtype=(tl.float32, tl.float32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        pointers = pairs[:, None] + index * 2
        first, second = tl.load(pointers), tl.load(pointers + 1)
    return first, second


@triton.jit
def _store_pairs(pairs, index, first, second, mask):
    """Writes two float32 at 2 * index of each row of pairs where the mask is set; in assembly, as `_load_pairs`."""
    if _has_ptx():
        addresses = pairs.to(tl.int64)[:, None] + index.to(tl.int64) * 8
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }",
            "=r,l,f,f,r", [addresses, first, second, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        pointers = pairs[:, None] + index * 2
        tl.store(pointers, first, mask=mask)
        tl.store(pointers + 1, second, mask=mask)


@triton.jit
def _triangle(like, BLOCK_N: tl.constexpr, NEWER: tl.constexpr):
    """A triangular matrix of ones, (BLOCK_N, BLOCK_N): x @ triangle is the running sum along the rows of x.

    Column j sums the keys up to j, or with NEWER the keys from j on. A product leaves the sums in the layout of the
    logits, which a scan would not.
    """
    keys = tl.arange(0, BLOCK_N)
    if NEWER:
        ones = keys[:, None] >= keys[None, :]
    else:
        ones = keys[:, None] <= keys[None, :]
    # First to float32: the interpreter would take a bool for the bits of a bfloat16.
    return ones.to(tl.float32).to(like)


@triton.jit
def _triangles(like, BLOCK_N: tl.constexpr):
    """`_triangle` of older keys, for counts, and for sums of the gradients of a matrix like `like`."""
    terms = tl.float32 if like.dtype == tl.float32 else tl.bfloat16
    return _triangle(tl.float16, BLOCK_N, False), _triangle(terms, BLOCK_N, False)


@triton.jit
def _seen(key_ranges, low, high, begin, Q, K, BLOCK_N: tl.constexpr):
    """`seen_keys`, compared with limits relative to the block: `begin` becomes 64 bits wide where it is an address."""
    return seen_keys(key_ranges, low - begin, high - begin, 0, Q + begin, K - begin, BLOCK_N)


@triton.jit
def _open_gates(scores, seen):
    """sigmoid of gate logits in base 2; 0 for keys that are not seen, and instead of NaN."""
    gates = _reciprocal(1.0 + tl.exp2(-scores))
    return gates, tl.where(seen, tl.maximum(gates, 0.0), 0.0)


@triton.jit
def _counts(gates, triangle):
    """Gates as fixed-point numbers, and their exact running sums by a float16 `_triangle`: int32.

    Sums of integers are exact in any order: forward and backward pass find the same positions, and counts can be taken
    apart again. A gate is at most 1, so a level is never skipped.

    float16 represents integers of 11 bits exactly, so the upper bits, multiples of 2^-10, and the rest, times 2^11, are
    summed apart. Conversions are slow: a float32 plus a large constant is rounded to the constant's last place, and its
    bits are the integer plus a constant.
    """
    # Rounded to 2^-21.
    fixed = gates + 4.0
    counts = fixed.to(tl.int32, bitcast=True) - 0x40800000
    upper = (fixed + 8192.0) - 8196.0
    rest = fixed * 2048.0 + (upper * -2048.0 - 8192.0)
    upper = dot(upper.to(tl.float16), triangle, None, "ieee") + 8192.0
    rest = dot(rest.to(tl.float16), triangle, None, "ieee") + 12288.0
    # The bits of 8192.0 fall out.
    sums = (upper.to(tl.int32, bitcast=True) << 11) + rest.to(tl.int32, bitcast=True)
    return counts, sums - 0x46400000


@triton.jit
def running_sums(terms, triangle, ROUNDED: tl.constexpr = False):
    """Sums of float32 terms along a row, by a `_triangle`.

    In float32 with a float32 matrix, with 16 bits of each term with a bfloat16 one, or ROUNDED to 8 bits.
    """
    if ROUNDED or triangle.dtype == tl.float32:
        sums = dot(terms.to(triangle.dtype), triangle, None, "ieee")
    else:
        # Without the lower bits a float32 is a bfloat16.
        leading = (terms.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        rest = (terms - leading).to(tl.bfloat16)
        sums = dot(rest, triangle, dot(leading.to(tl.bfloat16), triangle, None, "ieee"), "ieee")
    return sums


@triton.jit
def _softmax_step(acc, total, top, logits, v, dropout, member, rows, keys, PRECISION: tl.constexpr):
    """As `softmax_step` of `kernel_flash`, for logits that are `MASKED` where a key is not seen."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    # A row that has seen no key yet has weights exp2(MASKED), 0.
    origin = tl.where(new_top == MASKED, 0.0, new_top)
    weights = tl.exp2(logits - origin[:, None])
    decay = tl.exp2(top - origin)
    kept = apply_dropout(weights, dropout, member, rows, keys)
    acc = dot(kept.to(v.dtype), v, acc * decay[:, None], PRECISION)
    return acc, total * decay + tl.sum(weights, 1), new_top


@triton.jit
def _split(count, P):
    """What a block needs of the counts of its rows.

    The whole positions, the fixed-point rest, and the limits of a fixed-point position relative to the former. Within a
    block positions move by at most MOST_COLUMNS: farther limits, and positions farther beyond the last, are the same.
    """
    level = tl.minimum((count >> BITS).to(tl.int32), P - 1 + MOST_COLUMNS)
    rest = (count & (ONE - 1)).to(tl.int32)
    lowest = -tl.minimum(level, 2 * MOST_COLUMNS) << BITS
    highest = tl.minimum(P - 1 - level, 2 * MOST_COLUMNS) << BITS
    return level, rest[:, None], lowest[:, None], highest[:, None]


@triton.jit
def _interpolate(z, level, position):
    """Returns fraction, z[floor] and z[floor + 1] - z[floor] of fixed-point positions relative to a level of each row.

    At the largest position the difference is 0.
    """
    # The bits of the fraction are those of a float32 from 1 to 2.
    bits = (position << 2) & 0x7FFFFF | 0x3F800000
    fraction = bits.to(tl.float32, bitcast=True) - 1.0
    below, step = _load_pairs(z + level * 2, position >> BITS)
    return fraction, below, step


@triton.jit(do_not_specialize=["H", "first_row", "row_count"])
def _position_values(
    query, table, values, scale, H, P, first_row, chunk_rows, row_count, D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """values (B * H, chunk_rows, P, 2): z = scale * q.e and its step to the next position, from first_row on.

    query: what is multiplied with the table. If it is not float32, the table is used as a sum of two numbers of the
    query's type.
    """
    row_blocks = tl.cdiv(chunk_rows, BLOCK_M)
    member = (tl.program_id(0) // row_blocks).to(tl.int64)
    local = (tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    following = tl.minimum(columns + 1, P - 1)
    queries = pointer(query, member // H, member % H)
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    step = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, D, BLOCK_K):
        channels = first + tl.arange(0, BLOCK_K)
        mask = (first_row + local < row_count)[:, None] & (channels < D)[None, :]
        q = tl.load(queries + (first_row + local)[:, None] * query.row + channels[None, :], mask=mask, other=0.0)
        mask = (channels < D)[:, None] & (columns < P)[None, :]
        e = tl.load(table + channels[:, None] * P + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rise = tl.load(table + channels[:, None] * P + following[None, :], mask=mask, other=0.0).to(tl.float32) - e
        leading, leading_rise = e.to(q.dtype), rise.to(q.dtype)
        z = dot(q, leading, z, PRECISION)
        step = dot(q, leading_rise, step, PRECISION)
        if q.dtype != tl.float32:
            z = dot(q, (e - leading.to(tl.float32)).to(q.dtype), z, PRECISION)
            step = dot(q, (rise - leading_rise.to(tl.float32)).to(q.dtype), step, PRECISION)
    to = values + ((member * chunk_rows + local)[:, None] * P + columns[None, :]) * 2
    mask = (local < chunk_rows)[:, None] & (columns < P)[None, :]
    tl.store(to[:, :, None] + tl.arange(0, 2), tl.join(z * scale, step * scale), mask=mask[:, :, None])


@triton.jit(do_not_specialize=["H", "groups", "Q", "K", "first_row", "row_count", "blocks"])
def _window_forward(
    query, key, gate_key, value, values, key_ranges, logit_bias, window, dropout, scaling, H, groups, Q, K, P,
    first_row, chunk_rows, row_count, blocks, SHARED: tl.constexpr, EDGE: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The window of one block of rows, of `row_count` a head: Q, or with SHARED as many as see what row 0 sees.

    With SHARED each row is a head, with its own decay.
    """
    row_blocks = tl.cdiv(tl.minimum(chunk_rows, row_count - first_row), BLOCK_M)
    row_block = tl.program_id(0) % row_blocks
    member = (tl.program_id(0) // row_blocks).to(tl.int64)
    b = member // H
    h = member % H
    local = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first_row + local
    inside = rows < row_count
    if key_ranges is not None:
        key_ranges += b * (Q + K) * 2
    low, high = row_limits(key_ranges, None, 1, rows * 0 if SHARED else rows, Q, K)
    high = tl.where(inside, high, 0)
    first = first_row + row_block * BLOCK_M
    q = load(pointer(query, b, h), query.row, first, row_count, 0.0, D, BLOCK_M, BLOCK_D, False)
    keys = pointer(key, b, h // groups)
    v_rows = pointer(value, b, h // groups)
    if gate_key is not None:
        gate_keys = pointer(gate_key, b, h // groups)
    z = values + (member * chunk_rows + tl.minimum(local, chunk_rows - 1)) * P * 2
    if logit_bias is not None:
        if SHARED:
            # Row 0 of each head.
            row = tl.minimum(rows, row_count - 1)
            heads = h * row_count + row[:, None]
            of_rows = bias_rows(logit_bias, b, heads, member * row_count + row, row * 0, inside, 1, K, 1)
        else:
            count_rows = tl.minimum(chunk_rows, row_count - first_row)
            of_rows = bias_rows(logit_bias, b, h, member, local, inside, count_rows, K, 1)

    sees = high > low
    bottom = tl.min(tl.where(sees, low, K))
    block = (tl.max(high) + BLOCK_N - 1) // BLOCK_N - 1
    count = tl.zeros([BLOCK_M], tl.int64)
    top = tl.full([BLOCK_M], MASKED, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale = scaling * LOG2_E
    pending = tl.max(sees.to(tl.int32))
    newer = _triangle(tl.float16, BLOCK_N, True)
    # Windows end at the edge of a block of the backward pass.
    while ((pending > 0) & (block * BLOCK_N + BLOCK_N > bottom)) | ((block + 1) * BLOCK_N % EDGE > 0):
        begin = block * BLOCK_N
        k = load(keys, key.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        logits = dot(q, tl.trans(k), None, PRECISION) * scale
        seen = _seen(key_ranges, low, high, begin, Q, K, BLOCK_N)
        scores = logits
        if gate_key is not None:
            gk = load(gate_keys, gate_key.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
            scores = dot(q, tl.trans(gk), None, PRECISION) * scale
        gates, known = _open_gates(scores, seen)
        if gate_key is not None:
            # Counts have no NaN: a row with such a gate gets it here, and by its log-sum-exp in the backward pass.
            logits += gates * 0.0
        counts, running = _counts(known, newer)
        level, rest, _, highest = _split(count, P)
        fraction, below, step = _interpolate(z, level, tl.minimum(running + rest, highest))
        logits += below + fraction * step
        columns = begin + tl.arange(0, BLOCK_N)[None, :]
        if logit_bias is not None:
            logits += bias_values(logit_bias, of_rows, columns, K) * LOG2_E
        v = load(v_rows, value.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        logits = tl.where(seen, logits, MASKED)
        acc, weight, top = _softmax_step(
            acc, weight, top, logits, v, dropout, member, rows[:, None], columns, PRECISION
        )
        count += tl.sum(counts, 1)
        unfinished = sees & (low < begin) & ((count >> BITS).to(tl.int32) < P - 1)
        pending = tl.max(unfinished.to(tl.int32))
        block -= 1

    # Or NaN.
    some = weight != 0
    weight = tl.where(some, weight, 1.0)
    flat = member * row_count + rows
    store(window.out + member * row_count * D, D, first, row_count, acc / weight[:, None], D, BLOCK_M, BLOCK_D)
    tl.store(window.lse + flat, tl.where(some, (top + tl.log2(weight)) * LN_2, NOTHING), mask=inside)
    tl.store(window.total + flat, count, mask=inside)
    tl.store(window.constant + flat, tl.load(z + (P - 1) * 2) * LN_2, mask=inside)
    this = member * blocks + first_row // BLOCK_M + row_block
    tl.store(window.start + this, (block + 1) * BLOCK_N)
    tl.store(window.end + this, tl.max(high))


class _Rows(NamedTuple):
    """A block of rows in the backward pass.

    Attributes:
        rows, inside: their numbers, and which of them exist.
        place: where their numbers begin in (B * H, chunk_rows, P, 2).
        low, high: limits of the keys that they see.
        q, do: the queries and the gradients of the output.
        lse, delta: the log-sum-exp in base 2, and the sum of do * output.
    """

    rows: Any
    inside: Any
    place: Any
    low: Any
    high: Any
    q: Any
    do: Any
    lse: Any
    delta: Any


@triton.jit
def _load_rows(
    grad, query, window, delta, key_ranges, b, h, member, first_row, local, chunk_rows, Q, K, P,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows `local`.. to BLOCK_M more of the chunk that begins at row `first_row`."""
    first = first_row + local
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < Q
    low, high = row_limits(key_ranges, None, 1, rows, Q, K)
    place = (member * chunk_rows + tl.minimum(local + tl.arange(0, BLOCK_M), chunk_rows - 1)) * P * 2
    q = load(pointer(query, b, h), query.row, first, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    do = load(pointer(grad, b, h), grad.row, first, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    lse = tl.load(window.lse + member * Q + rows, mask=inside, other=NOTHING) * LOG2_E
    row_delta = tl.load(delta + member * Q + rows, mask=inside, other=0.0)
    return _Rows(rows, inside, place, low, tl.where(inside, high, 0), q, do, lse, row_delta)


class _Gradients(NamedTuple):
    """What both kernels of the backward pass compute for a block of rows and keys.

    Attributes:
        weights: after dropout.
        logits, gates, positions: gradients of logits, of the logits of gates, and of positions (times log 2).
        counts: of the gates, as fixed-point numbers.
        level: the whole position of each row at the left edge of the block.
        position, after: relative to `level`, the positions of each key, and of the keys right of it.
        fraction: of the position.
    """

    weights: Any
    logits: Any
    gates: Any
    positions: Any
    counts: Any
    level: Any
    position: Any
    after: Any
    fraction: Any


@triton.jit
def _window_gradients(
    block, values, k, gk, v, bias, seen, count, slope, older, dropout, member, columns, scale, P,
    PRECISION: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Returns `_Gradients` for a block of `_Rows` and keys `columns`, given count and slope at its left edge.

    bias: added to logits, but not to the gates, or None. older: of `_triangles`. ROUNDED: of `running_sums`, for the
    gradients of gates.
    """
    scores = dot(block.q, tl.trans(k), None, PRECISION) * scale
    logits = scores - block.lse[:, None]
    if gk is not None:
        scores = dot(block.q, tl.trans(gk), None, PRECISION) * scale
    _, gates = _open_gates(scores, seen)
    counts, running = _counts(gates, older[0])
    level, rest, lowest, highest = _split(count, P)
    after = rest - running
    position = tl.minimum(tl.maximum(after + counts, lowest), highest)
    after = tl.minimum(tl.maximum(after, lowest), highest)
    fraction, below, step = _interpolate(values + block.place, level, position)
    if bias is not None:
        logits += bias * LOG2_E
    weights = tl.where(seen, tl.exp2(logits + (below + fraction * step)), 0.0)
    rows = block.rows[:, None]
    grad_weights = dot(block.do, tl.trans(v), None, PRECISION)
    grad_weights = apply_dropout(grad_weights, dropout, member, rows, columns[None, :])
    grad_logits = weights * (grad_weights - block.delta[:, None])
    grad_positions = grad_logits * step
    grad_gates = (slope[:, None] + running_sums(grad_positions, older[1], ROUNDED)) * (gates - gates * gates) * LN_2
    kept = apply_dropout(weights, dropout, member, rows, columns[None, :])
    return _Gradients(kept, grad_logits, grad_gates, grad_positions, counts, level, position, after, fraction)


@triton.jit(do_not_specialize=["H", "groups", "Q", "K", "first_row", "blocks"])
def _window_rows(
    grad, query, key, gate_key, value, values, key_ranges, logit_bias, window, delta, dropout, grad_query, levels,
    edge_count, edge_slope, scaling, H, groups, Q, K, P, first_row, chunk_rows, blocks,
    EDGE: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For the window of one block of rows: dq, prefix sums of dL per level, and numbers at the edges of key blocks.

    grad_query (B * H, chunk_rows, D); levels (B * H, chunk_rows, P, 2), as they were where nothing is written, the sums
    of dL and of dL * fraction; edge_count, edge_slope (B * H, blocks of EDGE keys, chunk_rows).
    """
    row_blocks = tl.cdiv(tl.minimum(chunk_rows, Q - first_row), BLOCK_M)
    row_block = tl.program_id(0) % row_blocks
    member = (tl.program_id(0) // row_blocks).to(tl.int64)
    b = member // H
    h = member % H
    local = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    if key_ranges is not None:
        key_ranges += b * (Q + K) * 2
    own = _load_rows(
        grad, query, window, delta, key_ranges, b, h, member, first_row, row_block * BLOCK_M, chunk_rows, Q, K, P,
        D, BLOCK_D, BLOCK_M,
    )  # fmt: skip
    inside = own.inside
    edges = member * tl.cdiv(K, EDGE) * chunk_rows + local

    keys = pointer(key, b, h // groups)
    v_rows = pointer(value, b, h // groups)
    if gate_key is not None:
        gate_keys = pointer(gate_key, b, h // groups)

    # The count of the keys that are still ahead, the one at the left edge of the block included.
    count = tl.load(window.total + member * Q + own.rows, mask=inside, other=0)
    slope = tl.zeros([BLOCK_M], tl.float32)
    sum_before = tl.zeros([BLOCK_M], tl.float32)
    fraction_before = tl.zeros([BLOCK_M], tl.float32)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale = scaling * LOG2_E
    older = _triangles(own.q, BLOCK_N)
    if logit_bias is not None:
        count_rows = tl.minimum(chunk_rows, Q - first_row)
        of_rows = bias_rows(logit_bias, b, h, member, local, inside, count_rows, K, 1)
        grad_last = tl.zeros([BLOCK_M], tl.float32)
    this = member * blocks + first_row // BLOCK_M + row_block
    oldest = tl.load(window.start + this)
    for block in range(oldest // BLOCK_N, tl.cdiv(tl.load(window.end + this), BLOCK_N)):
        begin = block * BLOCK_N
        columns = begin + tl.arange(0, BLOCK_N)
        seen = _seen(key_ranges, own.low, own.high, begin, Q, K, BLOCK_N)
        if begin % EDGE == 0:
            edge = edges + begin // EDGE * chunk_rows
            known = tl.minimum(count, (tl.cast(P, tl.int64) + MOST_COLUMNS) << BITS)
            tl.store(edge_count + edge, known.to(edge_count.dtype.element_ty), mask=inside)
            tl.store(edge_slope + edge, slope, mask=inside)
        k = load(keys, key.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        v = load(v_rows, value.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        gk = None
        if gate_key is not None:
            gk = load(gate_keys, gate_key.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        block_bias = None
        if logit_bias is not None:
            block_bias = bias_values(logit_bias, of_rows, columns[None, :], K)
        found = _window_gradients(
            own, values, k, gk, v, block_bias, seen, count, slope, older, dropout, member, columns, scale, P,
            PRECISION, k.dtype == tl.bfloat16,
        )  # fmt: skip
        if logit_bias is not None:
            grad_last += bias_gradient(logit_bias, of_rows, columns[None, :], K, found.logits)
        if gate_key is not None:
            dq = dot(found.gates.to(k.dtype), gk, dq, PRECISION)
            dq = dot(found.logits.to(k.dtype), k, dq, PRECISION)
        else:
            dq = dot((found.logits + found.gates).to(k.dtype), k, dq, PRECISION)
        # The last key of a level, going right, leaves the sums up to it; those of level 0 come after the loop.
        leaving = seen & ((found.after >> BITS) < (found.position >> BITS))
        part = found.logits * found.fraction
        sums = sum_before[:, None] + running_sums(found.logits, older[1])
        fractions = fraction_before[:, None] + running_sums(part, older[1])
        _store_pairs(levels + own.place + found.level * 2, found.position >> BITS, sums, fractions, leaving)
        sum_before += tl.sum(found.logits, 1)
        fraction_before += tl.sum(part, 1)
        slope += tl.sum(found.positions, 1)
        count -= tl.sum(found.counts, 1)
    if logit_bias is not None:
        store_last(logit_bias, of_rows, grad_last)
    # Every row ends at position 0.
    tl.store(levels + own.place, sum_before, mask=inside)
    tl.store(levels + own.place + 1, fraction_before, mask=inside)
    store(
        grad_query + member * chunk_rows * D, D, row_block * BLOCK_M, Q - first_row, dq * scaling, D, BLOCK_M, BLOCK_D
    )


@triton.jit
def _window_blocks(window, member, begin, first_row, chunk_rows, blocks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of a chunk's rows, from the first up to but without the last, whose windows may have keys begin.."""
    count = chunk_rows // BLOCK_M
    first = count
    last = 0
    for some in range(0, count, SCAN_BLOCKS):
        candidates = some + tl.arange(0, SCAN_BLOCKS)
        index = first_row // BLOCK_M + candidates
        known = (candidates < count) & (index < blocks)
        starts = tl.load(window.start + member * blocks + index, mask=known, other=0)
        ends = tl.load(window.end + member * blocks + index, mask=known, other=0)
        needed = known & (starts < begin + BLOCK_N) & (ends > begin)
        first = tl.minimum(first, tl.min(tl.where(needed, candidates, count)))
        last = tl.maximum(last, tl.max(tl.where(needed, candidates + 1, 0)))
    return first, last


@triton.jit
def _add(data, begin, K, tile, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Adds a tile to rows begin.. of a (K, D) matrix."""
    tile += load(data, D, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    store(data, D, begin, K, tile, D, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=["G", "groups", "Q", "K", "first_row", "blocks"])
def _window_columns(
    grad, query, key, gate_key, value, values, key_ranges, logit_bias, window, delta, dropout, edge_count,
    edge_slope, grad_key, grad_gate_key, grad_value, scaling, G, groups, Q, K, P, first_row, chunk_rows, blocks,
    D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the chunk's part of dk, dv (and of the gate keys) to float32 (B, G, K, D), for one block of keys."""
    # Keys that no row of the chunk sees are not visited.
    ahead = K
    if key_ranges is None:
        ahead = K - Q + tl.minimum(first_row + chunk_rows, Q)
    column_blocks = tl.cdiv(ahead, BLOCK_N)
    block = tl.program_id(0) % column_blocks
    begin = block * BLOCK_N
    member = (tl.program_id(0) // column_blocks).to(tl.int64)
    b = member // G
    g = member % G
    columns = begin + tl.arange(0, BLOCK_N)
    if key_ranges is not None:
        key_ranges += b * (Q + K) * 2
    # Most programs of a long sequence find no window with their keys.
    touched = 0
    for h in range(g * groups, (g + 1) * groups):
        _, last_block = _window_blocks(
            window, b * G * groups + h, begin, first_row, chunk_rows, blocks, BLOCK_M, BLOCK_N
        )
        touched = tl.maximum(touched, last_block)
    if touched == 0:
        return
    k = load(pointer(key, b, g), key.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    v = load(pointer(value, b, g), value.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    gk = None
    if gate_key is not None:
        gk = load(pointer(gate_key, b, g), gate_key.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        dgk = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    # Transposed: a matrix instruction of Hopper has 64 rows.
    dk = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    dv = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    older = _triangles(k, BLOCK_N)
    scale = scaling * LOG2_E
    for h in range(g * groups, (g + 1) * groups):
        of_head = b * G * groups + h
        first_block, last_block = _window_blocks(
            window, of_head, begin, first_row, chunk_rows, blocks, BLOCK_M, BLOCK_N
        )
        for row_block in range(first_block, last_block):
            oldest = tl.load(window.start + of_head * blocks + first_row // BLOCK_M + row_block)
            if oldest < begin + BLOCK_N:
                local = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
                block_rows = _load_rows(
                    grad, query, window, delta, key_ranges, b, h, of_head, first_row, row_block * BLOCK_M, chunk_rows,
                    Q, K, P, D, BLOCK_D, BLOCK_M,
                )  # fmt: skip
                inside, q, do = block_rows.inside, block_rows.q, block_rows.do
                seen = _seen(key_ranges, block_rows.low, block_rows.high, begin, Q, K, BLOCK_N)
                edge = (of_head * tl.cdiv(K, BLOCK_N) + block) * chunk_rows + local
                count = tl.load(edge_count + edge, mask=inside, other=0).to(tl.int64)
                slope = tl.load(edge_slope + edge, mask=inside, other=0.0)
                block_bias = None
                if logit_bias is not None:
                    count_rows = tl.minimum(chunk_rows, Q - first_row)
                    of_rows = bias_rows(logit_bias, b, h, of_head, local, inside, count_rows, K, 1)
                    block_bias = bias_values(logit_bias, of_rows, columns[None, :], K)
                found = _window_gradients(
                    block_rows, values, k, gk, v, block_bias, seen, count, slope, older, dropout, of_head, columns,
                    scale, P, PRECISION, False,
                )  # fmt: skip
                dv = dot(tl.trans(do), found.weights.to(do.dtype), dv, PRECISION)
                if gate_key is not None:
                    dgk = dot(tl.trans(q), found.gates.to(q.dtype), dgk, PRECISION)
                    dk = dot(tl.trans(q), found.logits.to(q.dtype), dk, PRECISION)
                else:
                    dk = dot(tl.trans(q), (found.logits + found.gates).to(q.dtype), dk, PRECISION)
    to = member * K * D
    _add(grad_key + to, begin, K, tl.trans(dk) * scaling, D, BLOCK_N, BLOCK_D)
    _add(grad_value + to, begin, K, tl.trans(dv), D, BLOCK_N, BLOCK_D)
    if gate_key is not None:
        _add(grad_gate_key + to, begin, K, tl.trans(dgk) * scaling, D, BLOCK_N, BLOCK_D)


class _WindowTiles(NamedTuple):
    """Tiles of the window kernels, the preferred first. Those of one kernel have the same rows, `columns` also columns.

    Those of `rows` have at most as many columns as those of `columns`.
    """

    forward: list[Tiles]
    rows: list[Tiles]
    columns: list[Tiles]


def _window_tiles(head_dim: int, dtype: torch.dtype, own_gates: bool) -> _WindowTiles:
    """The tiles for a head dim, a type, and gates that are those of the keys or not.

    Registers are the limit (`tests/compile_kernels.py` prints them). On Hopper a matrix instruction has 64 rows for 4
    warps, and 8 warps do some work twice. Narrow tiles compute more per element and hold less.
    """
    if dtype == torch.float32:
        # Some devices have only 99 KiB of shared memory.
        rows = min(WINDOW_ROWS, 64 if head_dim <= 64 else 32 if head_dim <= 128 else 16)
        tiles = [Tiles(rows, 16, warps=8), Tiles(rows, 16)]
        return _WindowTiles(tiles, tiles, tiles)
    narrow = [Tiles(WINDOW_ROWS, 16), Tiles(WINDOW_ROWS, 16, warps=8)]
    wide = [Tiles(WINDOW_ROWS, 32), Tiles(WINDOW_ROWS, 32, warps=8)]
    # To head dim 64 narrow tiles have more warps on a multiprocessor; beyond it both have 8.
    forward = narrow[:1] + wide if head_dim <= 64 else wide + narrow[:1]
    # Wide ones spill registers in `_window_rows`, and in `_window_columns` with a third product or wide heads.
    return _WindowTiles(forward, narrow, wide if head_dim <= 64 and not own_gates else narrow)


class _Pass:
    """What the forward and the backward pass share: shapes, constants, chunks, positions."""

    def __init__(self, tensors: Sequence[Any], scaling: float, position_scale: float, dropout: float = 0.0) -> None:
        query, key, value, table, gate_key, position_query, *others, key_ranges, seed = tensors
        self.query, self.key, self.value, self.gate_key = query, key, value, gate_key
        # What is multiplied with the table.
        self.position_query = query if position_query is None else position_query
        self.own_position_query = position_query is not None
        self.table = table.contiguous()
        self.key_ranges = key_ranges.contiguous() if key_ranges is not None else None
        self.relative = None if others[0] is None else [one.contiguous() for one in others[:3]]
        self.decay = None if others[3] is None else others[3:]
        self.seed = seed
        self.scaling, self.position_scale = scaling, position_scale
        self.probability, self.dropout = dropout, dropout_arguments(seed, dropout)
        self.B, self.H, self.Q, self.D = query.shape
        self.G, self.K = key.shape[1], key.shape[2]
        self.P = table.shape[1]
        self.tiles = _window_tiles(self.D, query.dtype, gate_key is not None)
        self.rows, self.columns = self.tiles.forward[0].rows, self.tiles.columns[0].columns
        self.blocks = triton.cdiv(self.Q, self.rows)
        distances = 0 if self.relative is None else self.relative[0].shape[0]
        entries = (16 + query.element_size()) * self.P
        # The count at an edge may have 32 bits if the table is short.
        self.count_type = torch.int32 if self.P + 2 * MOST_COLUMNS.value <= 1024 else torch.int64
        edge_bytes = (4 + self.count_type.itemsize) * triton.cdiv(self.K, self.columns)
        self.chunk = chunk_rows(query, 4 * self.D + entries + edge_bytes + 8 * distances, self.rows)
        self.forward_chunk = chunk_rows(query, 8 * self.P + 4 * distances, self.rows)
        gates = None if gate_key is None else heads(gate_key)
        self.matrices = (heads(query), heads(key), gates, heads(value))
        self.constants: dict[str, Any] = {"D": self.D, "BLOCK_D": block_width(self.D)}
        self.constants["PRECISION"] = precision(query.dtype, self.D)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.query.device)

    def logit_bias(self, rows: slice, keys: slice = slice(None), *, grad: bool = False, near: bool = False) -> Any:
        """The decay or the relative positions of some rows as an argument of a kernel, or None."""
        if self.decay is not None:
            return decay_argument(self.decay[0][:, :, rows], self.decay[1][:, :, keys], near=near)
        if self.relative is None:
            return None
        table, row_positions, key_positions = self.relative
        positions = row_positions[:, rows], key_positions[:, keys]
        return relative_argument(self.query[:, :, rows], table, *positions, self.scaling, grad=grad)

    def plain_parts(self, window: Window, *, grad: bool) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
        """Yields rows, keys and options of `kernel_flash` for the keys left of the windows."""
        # With relative positions z of all rows would be quadratic.
        size = self.Q if self.relative is None else self.chunk
        seen = {"key_ranges": self.key_ranges, "seed": self.seed, "dropout": self.probability}
        for rows, keys, options in row_parts(self.query, self.key, size, **seen):
            blocks = slice(rows.start // self.rows, triton.cdiv(rows.stop, self.rows))
            options |= {"scaling": self.scaling, "logit_bias": self.logit_bias(rows, keys, grad=grad, near=True)}
            yield rows, keys, {**options, "bound": (window.start[:, :, blocks], self.rows)}

    def position_values(self, first: int, into: torch.Tensor) -> None:
        """Computes z of the chunk that begins at row `first`."""
        half = self.query.dtype != torch.float32
        constants = {"D": self.D, "PRECISION": self.constants["PRECISION"]}
        launch(
            _position_values,
            lambda tiles: (triton.cdiv(into.shape[1], tiles.rows) * into.shape[0], triton.cdiv(self.P, tiles.columns)),
            [Tiles(64, 64) if half else Tiles(32, 32)],
            (
                *(heads(self.position_query), self.table, into, self.position_scale * LOG2_E.value),
                *(self.H, self.P, first, into.shape[1], self.Q),
            ),
            {**constants, "BLOCK_K": min(self.constants["BLOCK_D"], 64 if half else 16)},
        )

    def window_forward(self, *, shared_rows: bool = False) -> Window:
        """Attention over the windows. With `shared_rows` all rows see what a single row would see (decoding)."""
        B, H, Q = self.B, self.H, self.Q
        rows = decode_rows(Q) if shared_rows else self.rows
        chunk = Q if shared_rows else self.forward_chunk
        blocks = triton.cdiv(Q, rows)
        window = Window(
            out=self.empty(B, H, Q, self.D, dtype=self.query.dtype),
            lse=self.empty(B, H, Q),
            start=self.empty(B, H, blocks, dtype=torch.int32),
            end=self.empty(B, H, blocks, dtype=torch.int32),
            total=self.empty(B, H, Q, dtype=torch.int64),
            constant=self.empty(B, H, Q),
        )
        values = self.empty(B * H, chunk, self.P, 2)
        seen_from = 1 if shared_rows else Q
        for first in range(0, Q, chunk):
            self.position_values(first, values)
            logit_bias = self.logit_bias(slice(first, min(first + chunk, Q)))
            launch(
                _window_forward,
                (triton.cdiv(min(chunk, Q - first), rows) * B * H,),
                [Tiles(rows, 32), Tiles(rows, 16)] if shared_rows else self.tiles.forward,
                (
                    *(*self.matrices, values, self.key_ranges, logit_bias, window, self.dropout),
                    *(self.scaling, H, H // self.G, seen_from, self.K, self.P, first, chunk, Q, blocks),
                ),
                {**self.constants, "SHARED": shared_rows, "EDGE": 1 if shared_rows else self.columns},
                key=(rows,),
            )
        return window

    def grad_values(self, levels: torch.Tensor, window: Window, rows: slice) -> torch.Tensor:
        """Returns the gradient of q.e for a chunk of rows, float32 (B, H, rows, P), from its prefix sums per level.

        z enters by z[floor] (1 - fraction) + z[floor + 1] fraction, so with the sums s of dL and f of dL * fraction
        over the keys of level n, dz[n] = s[n] - f[n] + f[n - 1]. The keys left of the window belong to the last level;
        all dL of a row sum to 0.
        """
        sums = levels.view(self.B, self.H, self.chunk, self.P, 2)[:, :, : rows.stop - rows.start]
        low = 0 if self.key_ranges is None else self.key_ranges[:, :, rows, 0]
        plain = window.start.repeat_interleave(self.rows, dim=-1)[:, :, rows] > low
        left = torch.where(plain, -sums[..., 0, 0], 0.0)
        per_level = sums - torch.nn.functional.pad(sums[..., 1:, :], (0, 0, 0, 1))
        grad = per_level[..., 0] - per_level[..., 1]
        grad[..., 1:] += per_level[..., :-1, 1]
        grad[..., -1] += left
        return grad.mul_(self.position_scale)

    def window_backward(self, grad: torch.Tensor, delta: torch.Tensor, window: Window) -> tuple[Any, ...]:
        """Gradients of query, table, key, value, gate keys, position query, and table of relative positions.

        All but those of the queries are float32; None if there is none. `window` has the log-sum-exp over all keys.
        """
        B, H, Q, D, P, K = self.B, self.H, self.Q, self.D, self.P, self.K
        members, chunk, groups = B * H, self.chunk, H // self.G
        values = self.empty(members, chunk, P, 2)
        levels = self.empty(members, chunk, P, 2)
        transposed = self.table.T.to(self.query.dtype)
        window_query = self.empty(members, chunk, D)
        key_blocks = triton.cdiv(K, self.columns)
        counts = self.empty(members, key_blocks, chunk, dtype=self.count_type)
        slopes = self.empty(members, key_blocks, chunk)
        grad_query = self.empty(B, H, Q, D, dtype=self.query.dtype)
        grad_position_query = torch.empty_like(grad_query) if self.own_position_query else None
        grad_table = torch.zeros(self.table.shape, dtype=torch.float32, device=self.query.device)
        shape = (B, self.G, K, D)
        grad_key, grad_value = (torch.zeros(shape, dtype=torch.float32, device=self.query.device) for _ in range(2))
        grad_gate_key = torch.zeros_like(grad_key) if self.gate_key is not None else None
        grad_relative = None if self.relative is None else torch.zeros_like(self.relative[0], dtype=torch.float32)
        for first in range(0, Q, chunk):
            self.position_values(first, values)
            levels.zero_()
            place = (Q, K, P, first, chunk, self.blocks)
            rows = slice(first, min(first + chunk, Q))
            logit_bias = self.logit_bias(rows, grad=True)
            inputs = (heads(grad), *self.matrices, values, self.key_ranges, logit_bias, window, delta, self.dropout)
            launch(
                _window_rows,
                (triton.cdiv(rows.stop - first, self.rows) * members,),
                self.tiles.rows,
                (*inputs, window_query, levels, counts, slopes, self.scaling, H, groups, *place),
                {**self.constants, "EDGE": self.columns},
                repeatable=self.relative is None,
            )
            grad_z = self.grad_values(levels, window, rows).to(self.query.dtype)
            queries = self.position_query[:, :, rows].transpose(2, 3)
            grad_table += torch.matmul(queries, grad_z).sum((0, 1), dtype=torch.float32)
            part, from_table = window_query.view(B, H, chunk, D)[:, :, : rows.stop - first], grad_z @ transposed
            if self.relative is not None and grad_relative is not None:
                from_relative = relative_gradients(logit_bias, self.query[:, :, rows], self.relative[0], self.scaling)
                part = part + from_relative[0]
                grad_relative += from_relative[1]
            if grad_position_query is None:
                grad_query[:, :, rows] = part + from_table
            else:
                grad_query[:, :, rows], grad_position_query[:, :, rows] = part, from_table
            ahead = K if self.key_ranges is not None else K - Q + rows.stop
            launch(
                _window_columns,
                (triton.cdiv(ahead, self.columns) * B * self.G,),
                self.tiles.columns,
                (*inputs, counts, slopes, grad_key, grad_gate_key, grad_value, self.scaling, self.G, groups, *place),
                self.constants,
                repeatable=False,
            )
        return grad_query, grad_table, grad_key, grad_value, grad_gate_key, grad_position_query, grad_relative


def _cope_forward(tensors: Sequence[Any], scaling: float, position_scale: float, dropout: float) -> list[torch.Tensor]:
    attention = _Pass(tensors, scaling, position_scale, dropout)
    window = attention.window_forward()
    parts = []
    for rows, keys, options in attention.plain_parts(window, grad=False):
        states = (attention.query[:, :, rows], attention.key[:, :, keys], attention.value[:, :, keys])
        options |= {
            "constant": window.constant[:, :, rows],
            "initial": (window.out[:, :, rows], window.lse[:, :, rows]),
        }
        parts.append(flash_forward(*states, **options))
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(part, dim=2) for part in zip(*parts))
    return [out, lse, *window[2:]]


def _empty(tensors: Sequence[Any]) -> list[torch.Tensor]:
    B, H, Q, D = tensors[0].shape
    out, per_row = empty_results(tensors)
    counts = torch.empty_like(per_row, dtype=torch.int64)
    # Gates of their own do not change the rows; what is None may be missing here.
    rows = _window_tiles(D, tensors[0].dtype, False).forward[0].rows
    blocks = per_row.new_empty((B, H, -(-Q // rows)), dtype=torch.int32)
    return [out, *map(torch.empty_like, (per_row, blocks, blocks, counts, per_row))]


def _cope_backward(
    grads: Sequence[Any], tensors: Sequence[Any], results: Sequence[torch.Tensor], scaling: float,
    position_scale: float, dropout: float,
) -> list[torch.Tensor]:  # fmt: skip
    attention = _Pass(tensors, scaling, position_scale, dropout)
    query, key, value, relative = attention.query, attention.key, attention.value, attention.relative
    window, (grad, _) = Window(*results), grads
    delta = row_products(grad, window.out)
    grad_query, grad_table, grad_key, grad_value, *others = attention.window_backward(grad, delta, window)
    grad_gate_key, grad_position_query, grad_relative = others
    # A constant added to the logits of a row shifts their log-sum-exp.
    lse = window.lse - window.constant
    for rows, keys, options in attention.plain_parts(window, grad=True):
        part_query = query[:, :, rows]
        plain = (grad[:, :, rows], part_query, key[:, :, keys], value[:, :, keys], lse[:, :, rows], delta[:, :, rows])
        before = (grad_key, grad_value) if relative is None else (None, None)
        part, *columns, _ = flash_backward(*plain, **options, initial=(grad_query[:, :, rows], *before))
        if relative is None:
            grad_query, grad_key, grad_value = part, *columns
        else:
            from_relative = relative_gradients(options["logit_bias"], part_query, relative[0], scaling)
            grad_query[:, :, rows] = part + from_relative[0]
            grad_relative += from_relative[1]
            grad_key[:, :, keys] += columns[0]
            grad_value[:, :, keys] += columns[1]
    gradients = (grad_query, grad_key, grad_value, grad_table, grad_gate_key, grad_position_query, grad_relative)
    return [gradient.to(one.dtype) for one, gradient in zip(tensors, gradients) if one is not None]


def _cope_decode(tensors: Sequence[Any], scaling: float, position_scale: float, dropout: float) -> torch.Tensor:
    """One query row a head: the heads of a group are the rows of a program."""
    query, key, value, table, gate_key, position_query, *others = tensors
    (B, H, _, D), G = query.shape, key.shape[1]
    shape = (B, G, H // G, D)
    position_query = None if position_query is None else position_query.reshape(shape)
    given = (query.reshape(shape), key, value, table, gate_key, position_query, *others)
    attention = _Pass(given, scaling, position_scale)
    window = attention.window_forward(shared_rows=True)
    return flash_decode(
        *(query, key, value),
        scaling=scaling,
        key_ranges=attention.key_ranges,
        logit_bias=attention.logit_bias(slice(None)),
        bound=(window.start, 0),
        constant=window.constant.view(B, H, 1),
        initial=(window.out.view(B, H, 1, D), window.lse.view(B, H, 1)),
    )


_COPE_SETTINGS = "float scaling, float position_scale, float dropout"
_cope_operator = Operator("cope", _COPE_SETTINGS, _cope_forward, _cope_backward, _cope_decode, empty=_empty)


def cope_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    *,
    gate_key: torch.Tensor | None = None,
    position_query: torch.Tensor | None = None,
    relative: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    decay: tuple[torch.Tensor, torch.Tensor] | None = None,
    key_ranges: torch.Tensor | None = None,
    scaling: float,
    position_scale: float,
    dropout: float = 0.0,
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
        relative: relative positions: embeddings e' (N, D) of the distances of positions, and the positions of rows and
            keys, integers (1 or B, Q) and (1 or B, K); scaling * q_i.e'[distance] is added to the logits, which the
            gates do not see. Negative distances have the first embedding, larger ones the last. Not with a decay.
        decay: numbers c of the rows (1 or B, H, Q) and of the keys (1 or B, H, K), float64 or float32, without
            gradients; c_i - c_j, or 0 if that is positive, is added to the logit of row i and key j (ALiBi). Gates do
            not see it.
        position_scale: the factor on r.e.
        key_ranges, scaling, dropout: see `kernel_flash`. Keys that are not seen are not counted; the scaling is that of
            the gates, too.

    Returns:
        (B, H, Q, D) in the type of the query. Rows that see nothing are 0.
    """
    check_inputs(query, key, value, scaling, key_ranges)
    if table.dim() != 2 or table.shape[0] != query.shape[3] or table.shape[1] < 2:
        raise ValueError(
            f"table={tuple(table.shape)!r} is not valid: it must be ({query.shape[3]}, P) with P at least 2."
        )
    for name, one, like in (("gate_key", gate_key, key), ("position_query", position_query, query)):
        if one is not None and (one.shape != like.shape or one.dtype != like.dtype):
            raise ValueError(
                f"{name}={tuple(one.shape)!r} of type {one.dtype!r} is not valid: it must be {tuple(like.shape)!r} of "
                f"type {like.dtype!r}."
            )
    if decay is not None or relative is not None:
        check_bias(decay, relative, query, key)
    if any(numbers.requires_grad for numbers in decay or ()):
        raise ValueError("decay is not valid: CoPE's kernels have no gradient for it, it must not require one.")
    first = (query, key, value, table, gate_key, position_query, *(relative or (None,))[:1])
    others = (*(relative or (None,) * 3)[1:], *(decay or (None, None)), key_ranges, dropout_seed(query, dropout))
    return _cope_operator(first, others, scaling, position_scale, dropout)[0]
