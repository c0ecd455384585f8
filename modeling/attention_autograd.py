"""Softmax attention in blocks of query rows with any bias, whose gradient autograd takes block by block.

A bias whose gradient is written by hand is faster: see `attention_blockwise`.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D key width, V value width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .attention_blockwise import autocast_inputs, block_rows, check_blockwise_inputs, direct_attention
from .attention_mask import is_key_ranges
from .kernel_operator import in_transform
from .position_base import PositionContext


def _rows(context: PositionContext, rows: slice, keys: int) -> PositionContext:
    """Returns the context of some query rows, and of the first `keys` key slots."""
    mask = context.attention_mask
    if mask is not None and is_key_ranges(mask):
        mask = torch.cat((mask[:, :, rows], mask[:, :, context.query_positions.shape[1] :]), dim=2)
    return dataclasses.replace(
        context,
        attention_mask=mask,
        query_positions=context.query_positions[:, rows],
        query=context.query[:, :, rows],
        value=context.value[:, :, :keys],
        new_value=context.new_value[:, :, rows],
        states={name: state[:, :, :keys] for name, state in context.states.items()},
        key_length=keys,
        _computed={"key_positions": context.key_positions[:, :keys]},
    )


def blockwise_attention_by_autograd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scaling: float,
    bias: Callable[..., torch.Tensor],
    context: PositionContext,
    dropout: float = 0.0,
    block_size: int | None = None,
) -> torch.Tensor:
    """Softmax attention with any bias: each block is recomputed in the backward pass, and differentiated by autograd.

    What is compiled, exported or within `torch.func` is one block: its memory is that of all logits.

    Args:
        bias: `PositionEncoding.bias`; called for some rows, with the context of these rows.
        context: the context of the layer.
        query, key, value, mask, scaling, dropout, block_size: see `blockwise_attention`.

    Returns:
        (B, H, Q, V) in the type of the query.
    """
    check_blockwise_inputs(query, key, value, mask)
    query, key, value = autocast_inputs(query, key, value)
    Q, K = query.shape[2], key.shape[2]
    block_size = block_size or block_rows(query.device)

    def attend(rows: slice, keys: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        part = None if mask is None or is_key_ranges(mask) else mask[:, :, rows]
        if mask is not None and is_key_ranges(mask):
            part = torch.cat((mask[:, :, rows], mask[:, :, Q:]), dim=2)

        def weigh(logits: torch.Tensor) -> torch.Tensor:
            return torch.softmax(logits + bias(logits, query, _rows(context, rows, keys), scaling), -1)

        return direct_attention(query, key, value, part, scaling, weigh, dropout)[0]

    if torch.compiler.is_compiling() or in_transform() or block_size >= Q:
        return attend(slice(0, Q), K, query, key, value)
    blocks = []
    for start in range(0, Q, block_size):
        rows = slice(start, min(start + block_size, Q))
        keys = K - Q + rows.stop if mask is None else K
        arguments = (rows, keys, query[:, :, rows], key[:, :, :keys], value[:, :, :keys])
        blocks.append(checkpoint(attend, *arguments, use_reentrant=False))
    return torch.cat(blocks, dim=2)


def autograd_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """The implementation `blockwise`, for `attention.attend`, of a layer with a bias that is no `BlockBias`."""
    settings = {name: options[name] for name in ("scaling", "dropout")}
    bias = layer.encodings.bias
    output = blockwise_attention_by_autograd(query, key, value, mask=mask, bias=bias, context=context, **settings)
    return output.transpose(1, 2).contiguous(), None
