"""Attention whose logits have a running sum along the row, in Triton: CoPE_ALiBi and stick-breaking attention.

Both sum a function f of the scaled logits s_ij of the keys that row i sees, from key j on to its newest one:

    p_ij = sum of f(s_ik) over k = j..i, and logit_ij = s_ij + m p_ij
    CoPE_ALiBi: f = sigmoid, weights w = softmax(logit), with a slope m for each head
    stick-breaking: f = softplus, weights w = exp(logit), m = -1; what is left is exp(-p) at the oldest key

1. `_scan_forward` walks key blocks right to left with the sum of each row. Stick-breaking stops where the sticks of
   all rows of its block are spent. With one row, the query heads that share a key head are the rows of a program, and
   several programs share the keys: the sums of the newer ones are added when their results are put together.

Backward, with a_ij the gradient of logit ij:

2. ds_ik = a_ik + m f'(s_ik) * (sum of a_ij over j <= k, the keys whose p has f(s_ik)). That sum is T_i, the sum of all,
   less the newer ones. `_scan_rows` walks right to left twice, with the same p. The first time it sums w_ij dw_ij,
   with dw_ij = dout_i.v_j. For a softmax this is delta_i, a_ij = w_ij (dw_ij - delta_i), and T is 0. For stick-breaking
   a_ij = w_ij dw_ij, and T is this sum plus r_i dr_i, because the remainder r has a gradient, too. (dout_i.out_i is the
   same, but rounded: all keys far away, whose weights are 0, would get its error as a gradient.) The second time it
   writes dq, the sums of a_ij p_ij (the gradient of m), and for every key block p and T less the sum of a at its right
   edge ("carries").
3. `_scan_columns` computes dk and dv of a key block from the carries.

Steps 2 and 3 run over chunks of rows, so that the carries, which would be quadratic, stay within a budget proportional
to the size of the query. There are no atomics: results are deterministic.

Exponents are in base 2. Sums and logits are float32, whatever the input is.

Axes: B batch, H query heads, G key heads (query head h uses key head h // (H // G)), Q query rows, K keys, D head dim,
S splits of the keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .kernel_flash import (
    LN_2,
    LOG2_E,
    _decode_splits,
    apply_dropout,
    check_inputs,
    chunk_rows,
    decode_rows,
    dropout_arguments,
    dropout_seed,
    row_limits,
    running_sums,
    seen_keys,
    softmax_step,
)
from .kernel_launch import MASKED, Tiles, block_width, dot, heads, launch, load, pointer, precision, store, tl, triton
from .kernel_operator import Operator

# A stick is spent when 2^-58 of it is left: less than float32 resolves.
SPENT = tl.constexpr(58.0)
# Key blocks between two looks at what is left of the sticks: loads are pipelined over them.
SEVERAL = tl.constexpr(2)
# Row blocks that a program examines in one step to find those that have visited its keys.
SCAN = tl.constexpr(32)


# Parts of kernels. `slope` (BLOCK_M) is None for stick-breaking.


@triton.jit
def _limits(ranges, rows, inside, Q, K, own):
    """Rows see keys from `low` up to, but without, `high`; their own key is hidden if `own` is 1."""
    low, high = row_limits(ranges, None, 1, rows, Q, K)
    return low, tl.where(inside, high - own, 0)


@triton.jit
def _newer(like, BLOCK_N: tl.constexpr):
    """The matrix for `running_sums` over the keys of a block that are newer than each key."""
    keys = tl.arange(0, BLOCK_N)
    newer = (keys[:, None] > keys[None, :]).to(tl.float32)
    return newer.to(tl.float32 if like.dtype == tl.float32 else tl.bfloat16)


@triton.jit
def _unspent(sees, low, begin, sums, BLOCK_N: tl.constexpr):
    """1 if a row that has something left of its stick sees keys of the block from `begin` on, or older ones; else 0."""
    return tl.max((sees & (low < begin + BLOCK_N) & (sums < SPENT)).to(tl.int32))


@triton.jit
def _scan(q, k, seen, before, slope, newer, scale, PRECISION: tl.constexpr):
    """Logits of a block of rows and keys, given the sums over newer blocks, `before` (BLOCK_M).

    Returns logits in base 2, sums p up to each key, derivatives of f: (BLOCK_M, BLOCK_N); the block's sums (BLOCK_M).
    """
    content = dot(q, tl.trans(k), None, PRECISION) * scale
    # exp(-|s|): nothing overflows.
    small = tl.exp2(-tl.abs(content))
    inverse = 1.0 / (1.0 + small)
    if slope is None:
        rise = tl.where(content >= 0, inverse, small * inverse)
        # 1 + small loses the digits of a small number.
        above = tl.where(small < 1e-3, small * (1.0 - 0.5 * small) * LOG2_E, tl.log2(1.0 + small))
        terms = tl.where(seen, tl.maximum(content, 0.0) + above, 0.0)
        sums = before[:, None] + running_sums(terms, newer)
        # s - softplus(s) first: the difference of large numbers would have no digits.
        logits = tl.minimum(content, 0.0) - above - sums
        sums += terms
    else:
        rise = small * inverse * inverse
        terms = tl.where(seen, tl.where(content >= 0, inverse, small * inverse), 0.0)
        sums = before[:, None] + running_sums(terms, newer) + terms
        logits = content + (slope * LOG2_E)[:, None] * sums
    return logits, sums, rise, tl.sum(terms, 1)


@triton.jit
def _weights(q, k, v, grad, seen, before, slope, row_lse, newer, scale, PRECISION: tl.constexpr):
    """Weights and their gradients for a block of rows and keys, and the rest of what `_scan` returns."""
    logits, sums, rise, added = _scan(q, k, seen, before, slope, newer, scale, PRECISION)
    if slope is not None:
        logits -= row_lse[:, None]
    weights = tl.exp2(tl.where(seen, logits, MASKED))
    return weights, dot(grad, tl.trans(v), None, PRECISION), sums, rise, added


@triton.jit
def _content_gradient(grad_logits, rise, seen, left, slope, newer):
    """The gradient of s (BLOCK_M, BLOCK_N), given a and at the right edge of the block T less the sum of a, `left`."""
    older = left[:, None] - running_sums(grad_logits, newer)
    if slope is None:
        gradient = grad_logits - rise * older
    else:
        gradient = grad_logits + slope[:, None] * rise * older
    return tl.where(seen, gradient, 0.0)


# Kernels. Optional pointers are None; without `slopes`, stick-breaking.


@triton.jit(do_not_specialize=["H", "groups", "row_count", "Q", "K", "own", "splits"])
def _scan_forward(
    query, key, value, out, lse, sums, ranges, slopes, dropout, scaling, H, groups, row_count, Q, K, own, splits,
    SHARED: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head, and one split of the keys that they see.

    Writes out (B, H, splits, row_count, D), normalised in itself for a softmax, and float32 (B, H, splits, row_count):
    the log-sum-exp of a softmax, the sum p of the split. SHARED: rows are heads, and see what row 0 sees.
    """
    blocks = tl.cdiv(row_count, BLOCK_M)
    split = tl.program_id(0) % splits
    # The rows that see most begin first.
    first = (blocks - 1 - tl.program_id(0) // splits % blocks) * BLOCK_M
    member = (tl.program_id(0) // splits // blocks).to(tl.int64)
    b = member // H
    h = member % H
    keys = pointer(key, b, h // groups)
    values = pointer(value, b, h // groups)
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < row_count
    if ranges is not None:
        ranges += b * (Q + K) * 2
    # The row and the head of each row of the tile.
    of_row = rows * 0 if SHARED else rows
    of_head = member * row_count + rows if SHARED else member + rows * 0
    low, high = _limits(ranges, of_row, inside, Q, K, own)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + (h * row_count + rows if SHARED else h + rows * 0), mask=inside, other=0.0)
    q = load(pointer(query, b, h), query.row, first, row_count, 0.0, D, BLOCK_M, BLOCK_D, False)
    newer = _newer(q, BLOCK_N)
    scale = scaling * LOG2_E

    sees = low < high
    oldest = tl.maximum(tl.min(tl.where(sees, low, K)), 0) // BLOCK_N * BLOCK_N
    last = tl.max(tl.where(sees, high, 0))
    # A split is whole blocks.
    size = tl.cdiv(tl.maximum(last - oldest, 0), splits * BLOCK_N) * BLOCK_N
    start = oldest + split * size
    begin = start + (tl.cdiv(tl.maximum(tl.minimum(start + size, last) - start, 0), BLOCK_N) - 1) * BLOCK_N
    before = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stretch = SEVERAL * BLOCK_N if slopes is None else size
    pending = 1
    while (begin >= start) & (pending > 0):
        for back in range(0, tl.minimum(begin - start + BLOCK_N, stretch), BLOCK_N):
            this = begin - back
            columns = this + tl.arange(0, BLOCK_N)[None, :]
            k = load(keys, key.row, this, K, 0.0, D, BLOCK_N, BLOCK_D, False)
            v = load(values, value.row, this, K, 0.0, D, BLOCK_N, BLOCK_D, False)
            seen = seen_keys(ranges, low, high, this, Q, K, BLOCK_N)
            logits, _, _, added = _scan(q, k, seen, before, slope, newer, scale, PRECISION)
            if slopes is None:
                weights = tl.exp2(tl.where(seen, logits, MASKED))
                kept = apply_dropout(weights, dropout, of_head[:, None], of_row[:, None], columns)
                acc = dot(kept.to(v.dtype), v, acc, PRECISION)
            else:
                acc, total, top = softmax_step(
                    acc, total, top, logits, seen, v, dropout, of_head[:, None], of_row[:, None], columns, PRECISION
                )
            before += added
        begin -= stretch
        if slopes is None:
            pending = _unspent(sees, low, begin, before, BLOCK_N)

    flat = (member * splits + split) * row_count
    if slopes is not None:
        # Or NaN.
        some = total != 0
        total = tl.where(some, total, 1.0)
        acc = acc / total[:, None]
        tl.store(lse + flat + rows, tl.where(some, (top + tl.log2(total)) * LN_2, MASKED), mask=inside)
    if sums is not None:
        tl.store(sums + flat + rows, before, mask=inside)
    store(out + flat * D, D, first, row_count, acc, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["H", "groups", "Q", "K", "own", "first_row", "blocks"])
def _scan_rows(
    grad, query, key, value, ranges, slopes, dropout, lse, delta, grad_left, grad_query, slope_sums, starts, ends,
    carried_sum, carried_left, scaling, H, groups, Q, K, own, first_row, chunk_rows, blocks,
    D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one block of rows of the chunk, and what `_scan_columns` needs.

    grad_left: float32 (B, H, Q), r dr, or None. delta: float32 (B, H, Q), of a softmax. slope_sums: float32 (B * H,
    blocks), sums of a p. starts, ends: int32 (B * H, chunk_rows // BLOCK_M), the keys visited. Carries: float32
    (B * H, key blocks, chunk_rows).
    """
    row_blocks = tl.cdiv(tl.minimum(chunk_rows, Q - first_row), BLOCK_M)
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    member = (tl.program_id(0) // row_blocks).to(tl.int64)
    b = member // H
    h = member % H
    keys = pointer(key, b, h // groups)
    values = pointer(value, b, h // groups)
    local = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first_row + local
    inside = rows < Q
    if ranges is not None:
        ranges += b * (Q + K) * 2
    low, high = _limits(ranges, rows, inside, Q, K, own)
    first = first_row + row_block * BLOCK_M
    q = load(pointer(query, b, h), query.row, first, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    do = load(pointer(grad, b, h), grad.row, first, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    slope = None
    row_lse = None
    if slopes is not None:
        slope = tl.load(slopes + h + rows * 0)
        row_lse = tl.load(lse + member * Q + rows, mask=inside, other=0.0) * LOG2_E
    newer = _newer(q, BLOCK_N)
    scale = scaling * LOG2_E
    carry = member * tl.cdiv(K, BLOCK_N) * chunk_rows + local

    sees = low < high
    oldest = tl.maximum(tl.min(tl.where(sees, low, K)), 0) // BLOCK_N * BLOCK_N
    last = tl.max(tl.where(sees, high, 0))
    stretch = SEVERAL * BLOCK_N if slopes is None else last + BLOCK_N
    row_delta = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    slope_sum = tl.zeros([BLOCK_M], tl.float32)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for walk in tl.static_range(0, 2):
        begin = oldest + (tl.cdiv(tl.maximum(last - oldest, 0), BLOCK_N) - 1) * BLOCK_N
        before = tl.zeros([BLOCK_M], tl.float32)
        left = tl.zeros([BLOCK_M], tl.float32)
        if slopes is not None:
            # The weights sum to 1 but for rounding.
            row_delta = row_delta / tl.where(total == 0, 1.0, total)
        else:
            left = row_delta
            if grad_left is not None:
                left += tl.load(grad_left + member * Q + rows, mask=inside, other=0.0)
        pending = 1
        while (begin >= oldest) & (pending > 0):
            for back in range(0, tl.minimum(begin - oldest + BLOCK_N, stretch), BLOCK_N):
                this = begin - back
                k = load(keys, key.row, this, K, 0.0, D, BLOCK_N, BLOCK_D, False)
                v = load(values, value.row, this, K, 0.0, D, BLOCK_N, BLOCK_D, False)
                seen = seen_keys(ranges, low, high, this, Q, K, BLOCK_N)
                weights, grad_weights, sums, rise, added = _weights(
                    q, k, v, do, seen, before, slope, row_lse, newer, scale, PRECISION
                )
                columns = this + tl.arange(0, BLOCK_N)[None, :]
                grad_weights = apply_dropout(grad_weights, dropout, member, rows[:, None], columns)
                if walk == 0:
                    row_delta += tl.sum(weights * grad_weights, 1)
                    total += tl.sum(weights, 1)
                else:
                    tl.store(carried_sum + carry + this // BLOCK_N * chunk_rows, before, mask=inside)
                    tl.store(carried_left + carry + this // BLOCK_N * chunk_rows, left, mask=inside)
                    if slopes is not None:
                        grad_weights -= row_delta[:, None]
                    grad_logits = weights * grad_weights
                    grad_content = _content_gradient(grad_logits, rise, seen, left, slope, newer)
                    dq = dot(grad_content.to(k.dtype), k, dq, PRECISION)
                    if slopes is not None:
                        slope_sum += tl.sum(grad_logits * sums, 1)
                    left -= tl.sum(grad_logits, 1)
                before += added
            begin -= stretch
            if slopes is None:
                pending = _unspent(sees, low, begin, before, BLOCK_N)
    start = tl.maximum(oldest, begin + BLOCK_N)
    if slopes is not None:
        tl.store(delta + member * Q + rows, row_delta, mask=inside)
        tl.store(slope_sums + member * blocks + first // BLOCK_M, tl.sum(slope_sum))
    here = member * (chunk_rows // BLOCK_M) + row_block
    tl.store(starts + here, start)
    tl.store(ends + here, last)
    store(grad_query + member * Q * D, D, first, Q, dq * scaling, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["G", "groups", "Q", "K", "own", "first_row"])
def _scan_columns(
    grad, query, key, value, ranges, slopes, dropout, lse, delta, starts, ends, carried_sum, carried_left, grad_key,
    grad_value, scaling, G, groups, Q, K, own, first_row, chunk_rows,
    D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the chunk's part of dk and dv to float32 (B, G, K, D), for one block of keys."""
    # Keys that no row of the chunk sees are not visited.
    ahead = K
    if ranges is None:
        ahead = K - Q + tl.minimum(first_row + chunk_rows, Q)
    column_blocks = tl.cdiv(ahead, BLOCK_N)
    block = tl.program_id(0) % column_blocks
    begin = block * BLOCK_N
    member = (tl.program_id(0) // column_blocks).to(tl.int64)
    b = member // G
    g = member % G
    if ranges is not None:
        ranges += b * (Q + K) * 2
    k = load(pointer(key, b, g), key.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    v = load(pointer(value, b, g), value.row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    queries = pointer(query, b, g * groups)
    grads = pointer(grad, b, g * groups)
    newer = _newer(k, BLOCK_N)
    scale = scaling * LOG2_E
    row_blocks = chunk_rows // BLOCK_M
    used = tl.cdiv(tl.minimum(chunk_rows, Q - first_row), BLOCK_M)
    starts += member * groups * row_blocks
    ends += member * groups * row_blocks

    first_block = used
    last_block = 0
    for some in range(0, groups * row_blocks, SCAN):
        entries = some + tl.arange(0, SCAN)
        candidates = entries % row_blocks
        known = (entries < groups * row_blocks) & (candidates < used)
        visited = known & (tl.load(starts + entries, mask=known, other=0) < begin + BLOCK_N)
        visited = visited & (tl.load(ends + entries, mask=known, other=0) > begin)
        first_block = tl.minimum(first_block, tl.min(tl.where(visited, candidates, used)))
        last_block = tl.maximum(last_block, tl.max(tl.where(visited, candidates + 1, 0)))

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # One loop over rows and heads: nested loops would copy the accumulators, which costs their registers again.
    for index in range(first_block * groups, last_block * groups):
        row_block = index // groups
        h = tl.cast(index % groups, tl.int64)
        of_block = h * row_blocks + row_block
        # Blocks that have not visited these keys have no carries, and add nothing.
        visited = (tl.load(starts + of_block) <= begin) & (tl.load(ends + of_block) > begin)
        local = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = first_row + local
        inside = rows < tl.where(visited, Q, 0)
        low, high = _limits(ranges, rows, inside, Q, K, own)
        seen = seen_keys(ranges, low, high, begin, Q, K, BLOCK_N)
        first = first_row + row_block * BLOCK_M
        q = load(queries + h * query.head, query.row, first, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
        do = load(grads + h * grad.head, grad.row, first, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
        of_head = member * groups + h
        carry = (of_head * tl.cdiv(K, BLOCK_N) + block) * chunk_rows + local
        before = tl.load(carried_sum + carry, mask=inside, other=0.0)
        left = tl.load(carried_left + carry, mask=inside, other=0.0)
        slope = None
        row_lse = None
        if slopes is not None:
            slope = tl.load(slopes + g * groups + h + rows * 0)
            row_lse = tl.load(lse + of_head * Q + rows, mask=inside, other=0.0) * LOG2_E
            row_delta = tl.load(delta + of_head * Q + rows, mask=inside, other=0.0)
        weights, grad_weights, _, rise, _ = _weights(q, k, v, do, seen, before, slope, row_lse, newer, scale, PRECISION)
        columns = begin + tl.arange(0, BLOCK_N)[None, :]
        kept = apply_dropout(weights, dropout, of_head, rows[:, None], columns)
        grad_weights = apply_dropout(grad_weights, dropout, of_head, rows[:, None], columns)
        if slopes is not None:
            grad_weights -= row_delta[:, None]
        grad_content = _content_gradient(weights * grad_weights, rise, seen, left, slope, newer)
        dv = dot(tl.trans(kept.to(do.dtype)), do, dv, PRECISION)
        dk = dot(tl.trans(grad_content.to(q.dtype)), q, dk, PRECISION)
    if last_block > 0:
        to = member * K * D
        dk = dk * scaling + load(grad_key + to, D, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        store(grad_key + to, D, begin, K, dk, D, BLOCK_N, BLOCK_D)
        dv += load(grad_value + to, D, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
        store(grad_value + to, D, begin, K, dv, D, BLOCK_N, BLOCK_D)


# Launchers.


def _tiles(head_dim: int, dtype: torch.dtype) -> tuple[list[Tiles], list[Tiles]]:
    """The tiles of the forward and of the backward kernels, the preferred first.

    Registers are the limit (`tests/compile_kernels.py` prints them). Those of the backward pass have the same rows and
    columns: carries depend on them.
    """
    small = [Tiles(32, 16, warps=8), Tiles(32, 16)]
    if dtype == torch.float32:
        # Some devices have only 99 KiB of shared memory.
        return small, small if head_dim <= 128 else [Tiles(16, 16)]
    if head_dim > 128:
        return [Tiles(64, 16, warps=8, stages=2), *small], small
    forward = [Tiles(64, 32, stages=2), Tiles(64, 32)]
    return forward, forward if head_dim <= 64 else [Tiles(64, 16, stages=2), Tiles(64, 16)]


def _constants(query: torch.Tensor) -> dict[str, Any]:
    D = query.shape[3]
    return {"D": D, "BLOCK_D": block_width(D), "PRECISION": precision(query.dtype, D)}


def _forward(tensors: Sequence[Any], scaling: float, own: int, dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, and float32 (B, H, Q): the remainder, or with slopes the log-sum-exp of the logits."""
    query, key, value, slopes, ranges, seed = tensors
    (B, H, Q, D), (_, G, K, _) = query.shape, key.shape
    forward_tiles, _ = _tiles(D, query.dtype)
    # One row: the heads that share a key head are the rows.
    shared = Q == 1
    members, rows, splits = (G, H // G, _decode_splits(query, B * G, K)) if shared else (H, Q, 1)
    if shared:
        query = query.reshape(B, G, H // G, D)
        forward_tiles = [dataclasses.replace(tiles, rows=decode_rows(rows)) for tiles in forward_tiles]
    shape = (B, members, splits, rows)
    out = torch.empty(*shape, D, dtype=torch.float32 if shared else query.dtype, device=query.device)
    lse, sums = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    launch(
        _scan_forward,
        lambda tiles: (splits * triton.cdiv(rows, tiles.rows) * B * members,),
        forward_tiles,
        (
            *map(heads, (query, key, value)),
            *(out, lse if slopes is not None else None, sums if slopes is None or shared else None, ranges, slopes),
            dropout_arguments(seed, dropout),
            *(scaling, members, 1 if shared else H // G, rows, Q, K, own, splits),
        ),
        {**_constants(query), "SHARED": shared},
        key=(rows if shared else 0,),
    )
    # The sums of the splits that are newer than each.
    newer = torch.nn.functional.pad(sums[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2) if shared else None
    if slopes is None:
        rest = torch.exp2(-sums.sum(2))
        factors = None if newer is None else torch.exp2(-newer)
    elif newer is None:
        rest, factors = lse, None
    else:
        lse = lse + slopes.view(G, 1, rows) * newer
        rest = lse.logsumexp(2)
        factors = torch.exp(lse - rest[:, :, None])
    if factors is not None:
        out = (out * factors[..., None]).sum(2).to(query.dtype)
    return out.view(B, H, Q, D), rest.view(B, H, Q)


def _backward(
    grads: Sequence[Any], tensors: Sequence[Any], results: Sequence[torch.Tensor], scaling: float, own: int,
    dropout: float,
) -> list[torch.Tensor]:  # fmt: skip
    """Returns the gradients of query, key, value, and of the slopes if there are some."""
    (query, key, value, slopes, ranges, seed), (grad, grad_rest), (rest,) = tensors, grads, results
    (B, H, Q, D), (_, G, K, _) = query.shape, key.shape
    _, tiles = _tiles(D, query.dtype)
    rows, columns = tiles[0].rows, tiles[0].columns
    chunk, blocks = chunk_rows(query, 8 * triton.cdiv(K, columns), rows), triton.cdiv(Q, rows)
    grad_left = None if grad_rest is None else rest * grad_rest

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    grad_query = empty(B, H, Q, D, dtype=query.dtype)
    grad_key, grad_value = (torch.zeros(B, G, K, D, dtype=torch.float32, device=query.device) for _ in range(2))
    slope_sums, delta = (None, None) if slopes is None else (empty(B, H, blocks), empty(B, H, Q))
    visited = [empty(B, H, chunk // rows, dtype=torch.int32) for _ in range(2)]
    carries = [empty(B, H, triton.cdiv(K, columns), chunk) for _ in range(2)]
    inputs = (
        *(*map(heads, (grad, query, key, value)), ranges, slopes, dropout_arguments(seed, dropout)),
        *(None if slopes is None else rest, delta),
    )
    for first in range(0, Q, chunk):
        end = min(first + chunk, Q)
        launch(
            _scan_rows,
            (triton.cdiv(end - first, rows) * B * H,),
            tiles,
            (
                *(*inputs, grad_left, grad_query, slope_sums, *visited, *carries),
                *(scaling, H, H // G, Q, K, own, first, chunk, blocks),
            ),
            _constants(query),
        )
        ahead = K if ranges is not None else K - Q + end
        launch(
            _scan_columns,
            (triton.cdiv(ahead, columns) * B * G,),
            tiles,
            (*inputs, *visited, *carries, grad_key, grad_value, scaling, G, H // G, Q, K, own, first, chunk),
            _constants(query),
            repeatable=False,
        )
    gradients = [grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)]
    return gradients if slope_sums is None else [*gradients, slope_sums.sum((0, 2))]


_attention = Operator("scan", "float scaling, int own, float dropout", _forward, _backward, saved=slice(1, 2))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor | None,
    ranges: torch.Tensor | None, scaling: float, own: int, dropout: float,
) -> list[torch.Tensor]:  # fmt: skip
    check_inputs(query, key, value, scaling, ranges)
    others = (None if ranges is None else ranges.contiguous(), dropout_seed(query, dropout))
    return _attention((query, key, value, slopes), others, scaling, own, dropout)


def cope_alibi_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    *,
    ranges: torch.Tensor | None = None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention with contextual positions as distances (CoPE_ALiBi, Golovneva et al. 2024, Eq. 10).

        p_ij = sum of sigmoid(scaling * q_i.k_l) over l = j..i; logit_ij = scaling * q_i.k_j + m_h p_ij

    Differentiable in query, key, value and slopes.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key, value: (B, G, K, D), the same type, H a multiple of G, K at least Q.
        slopes: (H,), m.
        ranges, scaling, dropout: see `kernel_flash`. Keys that are not seen are not counted.

    Returns:
        (B, H, Q, D) in the type of the query; 0 in rows that see nothing.
    """
    if slopes.shape != query.shape[1:2]:
        raise ValueError(f"slopes={tuple(slopes.shape)!r} is not valid: it must be {(query.shape[1],)!r}.")
    return _attend(query, key, value, slopes.float().contiguous(), ranges, scaling, 0, dropout)[0]


def stick_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    ranges: torch.Tensor | None = None,
    scaling: float,
    inclusive: bool = False,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stick-breaking attention (Tan et al. 2024, 2410.17980), which reads keys only until the sticks are spent.

        A_ij = sigmoid(s_ij) * product of 1 - sigmoid(s_il) over the keys l that row i sees and that are newer than j

    Differentiable in query, key and value. Arguments are those of `cope_alibi_attention`.

    Args:
        inclusive: rows see their own key, the last of what they see, as well.

    Returns:
        (B, H, Q, D) in the type of the query, and the remainder 1 - sum_j A_ij, of all weights, float32 (B, H, Q).
        Rows that see nothing give 0, and a remainder of 1.
    """
    out, remainder = _attend(query, key, value, None, ranges, scaling, 0 if inclusive else 1, dropout)
    return out, remainder
