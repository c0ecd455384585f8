"""Causal attention with relative position embeddings on the keys (Shaw et al. 2018, 1803.02155) in Triton.

The kernels are those of `kernel_flash`, which read z[i, n] = scaling * q_i.e[n] for every distance n. PyTorch computes
z, and from its gradient those of query and table, for a chunk of rows at a time: z of all rows would be quadratic.

For what is supported see `kernel_flash`; gradients of gradients are not supported. The gradient of z is added by
atomics: it is deterministic if the positions of the keys that a row sees are distinct.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, P entries of the table.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from .kernel_flash import (
    check_inputs,
    dropout_arguments,
    dropout_seed,
    flash_backward,
    flash_decode,
    flash_forward,
    row_chunk,
)
from .kernel_terms import check_relative, relative_argument, relative_gradients

_NAMESPACE = "whatwhere_" + hashlib.sha256(__name__.encode()).hexdigest()[:16]
# Scratch memory for z and its gradient, as a multiple of the query's, and at least so many bytes.
SCRATCH_FACTOR, SCRATCH_BYTES = 4, 32 << 20
# A chunk is a multiple of so many rows.
CHUNK_ROWS = 128


def _chunks(
    query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, ranges: torch.Tensor | None
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Yields the rows of a chunk, the keys that they may see, and their ranges."""
    (B, H, Q, _), K = query.shape, key.shape[2]
    budget = max(SCRATCH_BYTES, SCRATCH_FACTOR * query.numel() * query.element_size())
    size = CHUNK_ROWS * max(1, budget // (8 * max(1, B) * H * table.shape[0] * CHUNK_ROWS))
    for first in range(0, Q, size):
        rows = slice(first, min(first + size, Q))
        yield rows, *row_chunk(rows, Q, K, ranges)


@torch.library.custom_op(f"{_NAMESPACE}::relative_forward", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    ranges: torch.Tensor | None,
    seed: torch.Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Contiguous, as the fake implementation says, whatever the query is.
    out, lse = query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)
    for rows, keys, visible in _chunks(query, key, table, ranges):
        part = query[:, :, rows]
        out[:, :, rows], lse[:, :, rows] = flash_forward(
            part,
            key[:, :, keys],
            value[:, :, keys],
            scaling=scaling,
            ranges=visible,
            added=relative_argument(part, table, query_positions[:, rows], key_positions[:, keys], scaling),
            dropout=_dropout(seed, rows, dropout),
        )
    return out, lse


@_forward.register_fake
def _(query, *arguments):
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


def _dropout(seed: torch.Tensor | None, rows: slice, dropout: float) -> Any:
    # Each chunk counts its rows from 0.
    return dropout_arguments(None if seed is None else seed + rows.start, dropout)


@torch.library.custom_op(f"{_NAMESPACE}::relative_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    ranges: torch.Tensor | None,
    seed: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scaling: float,
    dropout: float,
) -> list[torch.Tensor]:
    grad_query = query.new_empty(query.shape)
    grad_key, grad_value, grad_table = (one.new_zeros(one.shape, dtype=torch.float32) for one in (key, value, table))
    for rows, keys, visible in _chunks(query, key, table, ranges):
        part = query[:, :, rows]
        relative = relative_argument(part, table, query_positions[:, rows], key_positions[:, keys], scaling, grad=True)
        part_query, part_key, part_value, _ = flash_backward(
            grad[:, :, rows],
            part,
            key[:, :, keys],
            value[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            scaling=scaling,
            ranges=visible,
            added=relative,
            dropout=_dropout(seed, rows, dropout),
        )
        from_relative = relative_gradients(relative, part, table, scaling)
        grad_query[:, :, rows] = part_query + from_relative[0]
        grad_table += from_relative[1]
        grad_key[:, :, keys] += part_key
        grad_value[:, :, keys] += part_value
    return [grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_table.to(table.dtype)]


@_backward.register_fake
def _(grad, *arguments):
    return [one.new_empty(one.shape) for one in arguments[:4]]


@torch.library.custom_op(f"{_NAMESPACE}::relative_decode", mutates_args=())
def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    ranges: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    relative = relative_argument(query, table, query_positions, key_positions, scaling)
    return flash_decode(query, key, value, scaling=scaling, ranges=ranges, added=relative)


@_decode.register_fake
def _(query, *arguments):
    return query.new_empty(query.shape)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scaling, ctx.dropout = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    return (*_backward(grad, *ctx.saved_tensors, ctx.scaling, ctx.dropout), *(None,) * 6)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "the attention kernels have no second derivative: use attn_implementation='eager' for gradients of gradients"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    *,
    ranges: torch.Tensor | None = None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal softmax attention with the logits scaling * q_i.(k_j + e[n]), n the distance of their positions.

    Differentiable in query, key, value and table.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key, value: (B, G, K, D), the same type, H a multiple of G, K at least Q.
        table: (P, D), e, in any of these types; negative distances have its first entry, larger ones its last.
        query_positions, key_positions: integers (1 or B, Q) and (1 or B, K), below 2^29.
        ranges: int32 (B, 1, Q + K, 2), what each row sees (see `kernel_flash`), or None: causal, rows aligned to the
            end of the keys.
        scaling: the factor on q.k and q.e, positive.
        dropout: the probability that a weight is dropped.

    Returns:
        (B, H, Q, D) in the type of the query; 0 in rows that see nothing.

    Raises:
        ValueError: shapes or types do not fit, scaling is not positive, or dropout is not in [0, 1].
    """
    check_inputs(query, key, value, scaling, ranges)
    check_relative(table, query_positions, key_positions, query, key)
    inputs = (query, key, value, table)
    arguments = (*inputs, query_positions, key_positions, ranges)
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    if query.shape[2] == 1 and not wanted and not dropout:
        return _decode(*arguments, scaling)
    return _forward(*arguments, dropout_seed(query, dropout), scaling, dropout)[0]
