"""Other ways to compute attention that may be faster on a GPU; the benchmark compares them with the kernels.

None of them is used by a model. What they may gain, by count, against attention with RoPE (forward 2 products of a row
and a key, backward 5), bf16, 4 x 32 x 4096 x 64, with 780 TFLOP/s and 4.3 TB/s:

| provider | against | expected |
|---|---|---|
| `pope-sdpa-*` | `pope-triton` | keys twice as wide: 11 / 7 = 1.6 with cuDNN's backward, 2.0 with ours |
| `cope-flex-half` | `cope-triton-half` | the same products; with a backward of one pass 1.0 instead of 1.3 |
| `cope-chip-half` | `cope-triton-half` | 0.5 GB of z less: 0.12 of 0.36 ms forward; 9 % at 16,384 tokens |
| `cope-once-half` | `cope-triton-half` | decoding by one launch: 110 us of the host less |

`cope-once-half` in a CUDA graph: between two kernels a GPU is idle for 1 to 2 us, and while windows are counted (one
program a key head, 2 blocks of 64 keys, 2 to 3 us) nothing else runs; here the programs with the other keys run beside
it. So 5 to 9 us less. With closed gates the window is all keys, one program walks them, and nothing is won.

Axes: B batch, H query heads, G key heads, Q query rows, K keys, D head dim, P positions in CoPE's table.
"""

import functools
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from whatwhere.kernel_cope import Window, _counts, _Pass, _running_counts, _triangle, cope_attention
from whatwhere.kernel_flash import (
    LN_2,
    LOG2_E,
    MASKED,
    _decode_splits,
    decode_kernel,
    row_products,
    seen_keys,
    softmax_step,
)
from whatwhere.kernel_launch import Tiles, block_width, dot, heads, launch, load, pointer, store

# Rows and keys of a block of FlexAttention's mask.
BLOCK = 128


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _attend(query: torch.Tensor) -> Any:
    # Only on a GPU there is a compiled backward pass.
    return _compiled() if query.is_cuda else flex_attention


def _left_of(start: torch.Tensor, count: int, Q: int, K: int) -> BlockMask:
    """Returns the mask that shows row i the keys before start[b, h, i // count]; start int32 (B, H, n)."""
    rows = BLOCK // count
    blocks = -(-Q // BLOCK)
    # Rows from Q on do not count.
    some = torch.nn.functional.pad(start, (0, blocks * rows - start.shape[-1])).unflatten(-1, (blocks, rows)).amax(-1)
    every = start.repeat_interleave(count, -1)[..., :Q]
    every = torch.nn.functional.pad(every, (0, blocks * BLOCK - Q), value=K).unflatten(-1, (blocks, BLOCK)).amin(-1)
    full = every // BLOCK
    partial = (some + BLOCK - 1) // BLOCK - full
    keys = torch.arange(-(-K // BLOCK), dtype=torch.int32, device=start.device).expand(*full.shape, -1)
    return BlockMask.from_kv_blocks(
        partial.int(),
        # Partial blocks follow the full ones.
        ((keys + full[..., None]) % keys.shape[-1]).int().contiguous(),
        full.int(),
        keys.contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, q, k: k < start[b, h, q // count],
        seq_lengths=(Q, K),
    )


class _CoPEFlex(torch.autograd.Function):
    """CoPE's windows by the Triton kernels, the keys left of them by FlexAttention."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: torch.Tensor,
        scaling: float,
        position_scale: float,
    ) -> torch.Tensor:
        attention = _Pass([query, key, value, table, *[None] * 10], scaling, position_scale)
        window = attention.window_forward()
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with torch.enable_grad():
            plain, aux = _attend(query)(
                *inputs,
                block_mask=_left_of(window.start, attention.rows, query.shape[2], key.shape[2]),
                scale=scaling,
                enable_gqa=True,
                return_aux=AuxRequest(lse=True),
            )
        plain_lse = aux.lse
        nothing = window.start.repeat_interleave(attention.rows, -1)[..., : query.shape[2]] == 0
        shifted = (plain_lse.detach() + window.constant).masked_fill(nothing, -torch.inf)
        lse = torch.logaddexp(shifted, window.lse)
        share = (shifted - lse).exp()[..., None]
        out = plain.detach().nan_to_num() * share + window.out * (1 - share)
        ctx.parts = attention, window, inputs, plain, plain_lse, share
        out = out.to(query.dtype)
        ctx.save_for_backward(out, lse.float())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out, lse = ctx.saved_tensors
        attention, window, inputs, plain, plain_lse, share = ctx.parts
        delta = row_products(grad, out)
        merged = Window(out, lse, *window[2:])
        grad_query, grad_table, grad_key, grad_value, *_ = attention.window_backward(grad, delta, merged)
        # out = share * plain + ..., and the share grows with the log-sum-exp of the plain part.
        of_share = (grad * plain.detach().nan_to_num()).sum(-1, dtype=torch.float32) - delta
        grads = torch.autograd.grad(
            (plain, plain_lse), inputs, ((grad * share).to(plain.dtype), (of_share * share[..., 0]).to(plain_lse.dtype))
        )
        parts = (grad_query, grad_key, grad_value)
        results = [
            (one + other.nan_to_num()).to(one_input.dtype) for one, other, one_input in zip(parts, grads, inputs)
        ]
        return (*results, grad_table.to(attention.table.dtype), None, None)


def cope_flex(*inputs: torch.Tensor, scaling: float, position_scale: float) -> torch.Tensor:
    """Returns what `kernel_cope.cope_attention` does, causal and without options; the plain part by FlexAttention.

    Args:
        inputs: query (B, H, Q, D), key and value (B, G, K, D), table (D, P).
        scaling: the factor on q.k.
        position_scale: the factor on q.e.
    """
    return _CoPEFlex.apply(*inputs, scaling, position_scale)


@triton.jit
def _position_tile(q, table, position_scale, P, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr,
                   BLOCK_P: tl.constexpr):  # fmt: skip
    """z of rows q, (BLOCK_M, BLOCK_P), on chip. table: (D, P)."""
    channels = tl.arange(0, BLOCK_D)[:, None]
    positions = tl.arange(0, BLOCK_P)[None, :]
    known = (channels < D) & (positions < P)
    e = tl.load(table + channels * P + positions, mask=known, other=0.0).to(tl.float32)
    z = dot(q, e.to(q.dtype), None, PRECISION)
    if q.dtype != tl.float32:
        z = dot(q, (e - e.to(q.dtype).to(tl.float32)).to(q.dtype), z, PRECISION)
    return z * position_scale


@triton.jit
def _window_step(
    q, keys, key_row, values, value_row, z, block, high, count, stopped, acc, weight, top, newer, scaling, last, Q, K,
    P, BITS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of keys of `_window_forward` without options; z (BLOCK_M, positions) is on chip."""
    begin = block * BLOCK_N
    k = load(keys, key_row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    logits = dot(q, tl.trans(k), None, PRECISION) * scaling
    seen = seen_keys(None, high, high, begin, Q, K, BLOCK_N)
    counting = count < last
    stopped = tl.where(counting & (high > 0), begin, stopped)
    counts = _counts(tl.sigmoid(logits), seen & counting[:, None], BITS)
    position = tl.minimum(_running_counts(counts, newer) + count[:, None], last)
    floor = position >> BITS
    fraction = (position & ((1 << BITS) - 1)).to(tl.float32) * (1.0 / (1 << BITS))
    below = tl.gather(z, floor, 1)
    logits += below + fraction * (tl.gather(z, tl.minimum(floor + 1, P - 1), 1) - below)
    v = load(values, value_row, begin, K, 0.0, D, BLOCK_N, BLOCK_D, False)
    acc, weight, top = softmax_step(acc, weight, top, logits * LOG2_E, seen, v, None, None, None, None, PRECISION)
    return count + tl.sum(counts, 1), stopped, acc, weight, top


@triton.jit(do_not_specialize=["H", "groups", "Q", "K", "blocks"])
def window_on_chip_kernel(
    query, key, value, table, window, scaling, position_scale, H, groups, Q, K, P, blocks,
    BITS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`_window_forward`, causal and without options; z is never in global memory. table: (D, P)."""
    row_block = tl.program_id(0) % blocks
    member = (tl.program_id(0) // blocks).to(tl.int64)
    b = member // H
    h = member % H
    first = row_block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < Q
    high = tl.where(inside, rows + (K - Q + 1), 0)
    q = load(pointer(query, b, h), query.row, first, Q, 0.0, D, BLOCK_M, BLOCK_D, False)
    keys = pointer(key, b, h // groups)
    values = pointer(value, b, h // groups)
    z = _position_tile(q, table, position_scale, P, D, PRECISION, BLOCK_D, BLOCK_P)
    positions = tl.arange(0, BLOCK_P)[None, :]

    last = (P - 1) << BITS
    block = (tl.max(high) + BLOCK_N - 1) // BLOCK_N - 1
    count = tl.zeros([BLOCK_M], tl.int32)
    stopped = high
    top = tl.full([BLOCK_M], MASKED, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    newer = _triangle(tl.float16, BLOCK_N, True)
    # A gate is at most 1: so many blocks are needed in any case, and the loads of this loop are made ahead.
    sure = tl.minimum((P - 1) // BLOCK_N, block + 1)
    for _ in range(0, sure):
        count, stopped, acc, weight, top = _window_step(
            q, keys, key.row, values, value.row, z, block, high, count, stopped, acc, weight, top, newer, scaling,
            last, Q, K, P, BITS, D, PRECISION, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        block -= 1
    while (tl.max(((high > 0) & (count < last)).to(tl.int32)) > 0) & (block >= 0):
        count, stopped, acc, weight, top = _window_step(
            q, keys, key.row, values, value.row, z, block, high, count, stopped, acc, weight, top, newer, scaling,
            last, Q, K, P, BITS, D, PRECISION, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        block -= 1
    weight = tl.where(weight == 0, 1.0, weight)
    flat = member * Q + rows
    store(window.out + member * Q * D, D, first, Q, acc / weight[:, None], D, BLOCK_M, BLOCK_D)
    tl.store(window.lse + flat, (top + tl.log2(weight)) * LN_2, mask=inside)
    tl.store(window.total + flat, count, mask=inside)
    tl.store(window.stop + flat, stopped, mask=inside)
    tl.store(window.constant + flat, tl.sum(tl.where(positions == P - 1, z, 0.0), 1), mask=inside)
    tl.store(window.start + member * blocks + row_block, (block + 1) * BLOCK_N)
    tl.store(window.end + member * blocks + row_block, tl.max(high))


def _window_on_chip(self: _Pass) -> Window:
    """`_Pass.window_forward`, causal and without options, by `window_on_chip_kernel`."""
    B, H, Q = self.B, self.H, self.Q
    window = Window(
        out=self.empty(B, H, Q, self.D, dtype=self.query.dtype),
        lse=self.empty(B, H, Q),
        start=self.empty(B, H, self.blocks, dtype=torch.int32),
        end=self.empty(B, H, self.blocks, dtype=torch.int32),
        stop=self.empty(B, H, Q, dtype=torch.int32),
        total=self.empty(B, H, Q, dtype=torch.int32),
        constant=self.empty(B, H, Q),
    )
    states = (heads(self.query), heads(self.key), heads(self.value))
    launch(
        window_on_chip_kernel,
        (self.blocks * B * H,),
        [Tiles(self.rows, 32, 8, 2), Tiles(self.rows, 16, 8, 2)],
        (
            *(*states, self.table, window, self.scaling, self.position_scale),
            *(H, H // self.G, Q, self.K, self.P, self.blocks),
        ),
        {**self.constants, "BLOCK_P": block_width(self.P)},
    )
    return window


def cope_on_chip(*inputs: torch.Tensor, scaling: float, position_scale: float) -> torch.Tensor:
    """Returns what `kernel_cope.cope_attention` does for several rows, causal and without options.

    Arguments as in `cope_flex`. The table has at most 64 positions: z of a row is in registers.
    """
    with mock.patch.object(_Pass, "window_forward", _window_on_chip):
        return cope_attention(*inputs, scaling=scaling, position_scale=position_scale)


@triton.jit
def _join(
    parts, top_lse, member, row, used, splits, groups, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Output (BLOCK_V,) and log-sum-exp in base 2 of a row over the first `used` splits of `decode_kernel`."""
    indices = tl.arange(0, BLOCK_S)
    channels = tl.arange(0, BLOCK_V)
    inside = indices < used
    places = (member * splits + indices) * groups + row
    # Past the first cache, where there may be older numbers.
    tops = tl.load(top_lse + places, mask=inside, other=MASKED, cache_modifier=".cg")
    tile = tl.load(
        parts + places[:, None] * V + channels[None, :],
        mask=inside[:, None] & (channels < V)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    top = tl.max(tops, 0)
    weights = tl.where(inside, tl.exp2(tops - top), 0.0)
    total = tl.sum(weights, 0)
    total = tl.where(total == 0.0, 1.0, total)
    return tl.sum(tile * weights[:, None], 0) / total, top + tl.log2(total)


@functools.cache
def _done(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def _decode_window(
    query, key, value, table, window, member, scaling, position_scale, G, groups, K, P, splits,
    BITS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The window of the newest row of the heads of a key head, from the newest key to the left edge of a split.

    The splits are those of `decode_kernel`; `window.start` is how many of them are left of the window.
    """
    b = member // G
    g = member % G
    rows = tl.arange(0, BLOCK_M)
    size = tl.cdiv(K, splits * BLOCK_N) * BLOCK_N
    q = load(pointer(query, b, g * groups), query.head, 0, groups, 0.0, D, BLOCK_M, BLOCK_D, False)
    z = _position_tile(q, table, position_scale, P, D, PRECISION, BLOCK_D, BLOCK_P)
    last = (P - 1) << BITS
    high = tl.zeros([BLOCK_M], tl.int32) + K
    count = tl.zeros([BLOCK_M], tl.int32)
    top = tl.full([BLOCK_M], MASKED, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    newer = _triangle(tl.float16, BLOCK_N, True)
    # The keys from here on are done.
    end = tl.cdiv(K, BLOCK_N) * BLOCK_N
    pending = 1
    while (end > 0) & ((pending > 0) | (end % size != 0)):
        end -= BLOCK_N
        count, _, acc, weight, top = _window_step(
            q, pointer(key, b, g), key.row, pointer(value, b, g), value.row, z, end // BLOCK_N, high, count, high,
            acc, weight, top, newer, scaling, last, 1, K, P, BITS, D, PRECISION, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        pending = tl.max(((rows < groups) & (count < last)).to(tl.int32))
    store(window.out + member * groups * D, D, 0, groups, acc / weight[:, None], D, BLOCK_M, BLOCK_D)
    flat = member * groups + rows
    tl.store(window.lse + flat, top + tl.log2(weight), mask=rows < groups)
    at_last = tl.sum(tl.where(tl.arange(0, BLOCK_P)[None, :] == P - 1, z, 0.0), 1)
    tl.store(window.constant + flat, at_last * LOG2_E, mask=rows < groups)
    tl.store(window.start + member, end // size)


@triton.jit(do_not_specialize=["G", "groups", "K", "splits"])
def cope_decode_once_kernel(
    query, key, value, table, parts, top_lse, window, done, out, scaling, position_scale, G, groups, K, P, splits,
    BITS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decoding with CoPE: no program waits for another, the last one of a key head joins what all have found.

    Along the second axis of the grid: a program for the window of each key head, then the programs of `decode_kernel`,
    as if all their keys had the last position, which is a constant of the row. Only those left of the window
    count. done: int32 (B * G), 0 before and after.
    """
    member = tl.program_id(0).to(tl.int64)
    windows = tl.program_id(1) == 0
    if windows & (member >= tl.num_programs(0) // splits):
        return
    if windows:
        _decode_window(
            query, key, value, table, window, member, scaling, position_scale, G, groups, K, P, splits,
            BITS, D, PRECISION, BLOCK_D, BLOCK_P, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        decode_kernel(
            query, key, value, parts, top_lse, None, None, None, None, scaling, G, groups, K, splits,
            D, D, 0, PRECISION, BLOCK_D, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        member = member // splits
    tl.debug_barrier()
    if tl.atomic_add(done + member, 1, sem="acq_rel") == splits:
        tl.store(done + member, 0)
        left = tl.load(window.start + member, cache_modifier=".cg")
        for row in range(0, groups):
            channels = tl.arange(0, BLOCK_D)
            flat = member * groups + row
            plain, plain_lse = _join(parts, top_lse, member, row, left, splits, groups, D, BLOCK_D, BLOCK_S)
            plain_lse += tl.load(window.constant + flat, cache_modifier=".cg")
            lse = tl.load(window.lse + flat, cache_modifier=".cg")
            near = tl.load(window.out + flat * D + channels, mask=channels < D, other=0.0, cache_modifier=".cg")
            top = tl.maximum(plain_lse, lse)
            shares = tl.exp2(plain_lse - top), tl.exp2(lse - top)
            joined = (plain * shares[0] + near * shares[1]) / (shares[0] + shares[1])
            tl.store(out + flat * D + channels, joined.to(out.dtype.element_ty), mask=channels < D)


def cope_decode_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    *,
    scaling: float,
    position_scale: float,
) -> torch.Tensor:
    """Returns what `kernel_cope.cope_attention` does for one row, without options, by one launch instead of four.

    Arguments as in `cope_flex`. The table has at most 64 positions.
    """
    attention = _Pass([query, key, value, table, *[None] * 10], scaling, position_scale)
    B, H, G, K, D, P = attention.B, attention.H, attention.G, attention.K, attention.D, attention.P
    splits = _decode_splits(query, B * G, K)
    rows = block_width(H // G)
    window = Window(
        out=attention.empty(B, H, D),
        lse=attention.empty(B, H),
        start=attention.empty(B, G, dtype=torch.int32),
        end=None,
        stop=None,
        total=None,
        constant=attention.empty(B, H),
    )
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    launch(
        cope_decode_once_kernel,
        (splits * B * G, 2),
        # With 64 columns float32 needs more registers than there are.
        [Tiles(rows, 64, 4, 2), Tiles(rows, 32, 4, 1), Tiles(rows, 16, 4, 1)][query.dtype == torch.float32 :],
        (
            *(heads(query), heads(key), heads(value), attention.table),
            *(attention.empty(B, G, splits, H // G, D), attention.empty(B, G, splits, H // G)),
            *(window, _done(B * G, query.device), out, float(scaling), float(position_scale)),
            *(G, H // G, K, P, splits),
        ),
        {**attention.constants, "BLOCK_P": block_width(P), "BLOCK_S": block_width(splits)},
        key=(rows,),
    )
    return out
