"""Other ways to compute attention that may be faster on a GPU; the benchmark compares them with the kernels.

None of them is used by a model.

Axes: B batch, H query heads, G key heads, Q query rows, K keys, D head dim, P positions in CoPE's table.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from whatwhere.kernel_cope import WINDOW_ROWS, Window, _Pass
from whatwhere.kernel_flash import MASKED, Polar, _decode_splits, decode_kernel, row_products
from whatwhere.kernel_launch import Tiles, block_width, heads, launch, precision

# Rows and keys of a block of FlexAttention's mask.
BLOCK = 128


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _attend(query: torch.Tensor) -> Any:
    # Only on a GPU there is a compiled backward pass.
    return _compiled() if query.is_cuda else flex_attention


@functools.cache
def _causal(Q: int, K: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda b, h, q, k: k <= q + (K - Q), None, None, Q, K, device=device)


def causal_flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """Returns causal attention by FlexAttention, rows aligned to the end of the keys.

    Args:
        query: (B, H, Q, D). key: (B, G, K, D). value: (B, G, K, V).
        scaling: the factor on q.k.
    """
    mask = None if query.shape[2] == 1 else _causal(query.shape[2], key.shape[2], query.device)
    result: torch.Tensor = _attend(query)(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return result


def _left_of(start: torch.Tensor, Q: int, K: int) -> BlockMask:
    """Returns the mask that shows row i the keys before start[b, h, i // WINDOW_ROWS]; start int32 (B, H, n)."""
    rows = BLOCK // WINDOW_ROWS
    blocks = -(-Q // BLOCK)
    # Rows from Q on do not count.
    some = torch.nn.functional.pad(start, (0, blocks * rows - start.shape[-1])).unflatten(-1, (blocks, rows)).amax(-1)
    every = start.repeat_interleave(WINDOW_ROWS, -1)[..., :Q]
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
        mask_mod=lambda b, h, q, k: k < start[b, h, q // WINDOW_ROWS],
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
        attention = _Pass(query, key, value, table, None, None, None, scaling, position_scale)
        window = attention.window_forward()
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with torch.enable_grad():
            plain, aux = _attend(query)(
                *inputs,
                block_mask=_left_of(window.start, query.shape[2], key.shape[2]),
                scale=scaling,
                enable_gqa=True,
                return_aux=AuxRequest(lse=True),
            )
        plain_lse = aux.lse
        nothing = window.start.repeat_interleave(WINDOW_ROWS, -1)[..., : query.shape[2]] == 0
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


def cope_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    *,
    scaling: float,
    position_scale: float,
) -> torch.Tensor:
    """Returns what `kernel_cope.cope_attention` does, causal and without options; the plain part by FlexAttention.

    Args:
        query: (B, H, Q, D). key, value: (B, G, K, D). table: (D, P).
        scaling: the factor on q.k.
        position_scale: the factor on q.e.
    """
    result: torch.Tensor = _CoPEFlex.apply(query, key, value, table, scaling, position_scale)
    return result


@triton.jit(do_not_specialize=["G", "groups", "K", "splits"])
def decode_once_kernel(
    query, key, value, parts, top_lse, done, out, ranges, polar, scaling, G, groups, K, splits,
    D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`decode_kernel`; the last program of a key head joins its splits. done: int32 (B * G), 0 before and after."""
    decode_kernel(
        query, key, value, parts, top_lse, ranges, None, polar, None, None, scaling, G, groups, K, splits,
        D, V, R, PRECISION, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    tl.debug_barrier()
    member = (tl.program_id(0) // splits).to(tl.int64)
    if tl.atomic_add(done + member, 1, sem="acq_rel") == splits - 1:
        tl.store(done + member, 0)
        indices = tl.arange(0, BLOCK_S)
        channels = tl.arange(0, BLOCK_V)
        inside = indices < splits
        for row in range(0, groups):
            places = (member * splits + indices) * groups + row
            # Past the first cache, where there may be older numbers.
            tops = tl.load(top_lse + places, mask=inside, other=MASKED, cache_modifier=".cg")
            tile = tl.load(
                parts + places[:, None] * V + channels[None, :],
                mask=inside[:, None] & (channels < V)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            weights = tl.where(inside, tl.exp2(tops - tl.max(tops, 0)), 0.0)
            row_out = tl.sum(tile * weights[:, None], 0) / tl.sum(weights, 0)
            to = out + (member * groups + row) * V + channels
            tl.store(to, row_out.to(out.dtype.element_ty), mask=channels < V)


@functools.cache
def _done(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def decode_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    ranges: torch.Tensor | None = None,
    polar: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Returns what `kernel_flash.flash_decode` does, by one launch instead of two; arguments as there."""
    (B, H, _, D), (_, G, K, V) = query.shape, value.shape
    splits = _decode_splits(query, B * G, K)
    parts = torch.empty(B, G, splits, H // G, V, dtype=torch.float32, device=query.device)
    top_lse = torch.empty(B, G, splits, H // G, dtype=torch.float32, device=query.device)
    out = torch.empty(B, H, 1, V, dtype=query.dtype, device=query.device)
    tables, R = None, 0
    if polar is not None:
        tables = Polar(*polar, *(0 if table.shape[0] == 1 else table.stride(0) for table in (polar[0], polar[2])))
        R = polar[0].shape[-1]
    rows = block_width(H // G)
    launch(
        decode_once_kernel,
        (splits * B * G,),
        [Tiles(rows, 64, 4, 2), Tiles(rows, 32, 4, 1)],
        (D, V, R, query.dtype, ranges is not None, polar is not None and polar[-1] is not None, rows),
        (
            *(heads(query), heads(key), heads(value), parts, top_lse, _done(B * G, query.device), out, ranges, tables),
            *(float(scaling), G, H // G, K, splits),
        ),
        {
            **{"D": D, "V": V, "R": R, "PRECISION": precision(query.dtype), "BLOCK_D": block_width(D)},
            **{"BLOCK_V": block_width(V), "BLOCK_S": block_width(splits)},
        },
    )
    return out
