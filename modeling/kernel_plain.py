"""Causal softmax attention in Triton, with a bias or without: FoX, ALiBi, relative positions (Shaw et al., 1803.02155).

The kernels are those of `kernel_flash`; these are their operators. With relative positions the kernels read z[i, n] =
scaling * q_i.e[n] for every distance n. PyTorch computes z, and from its gradient those of query and table, for a chunk
of rows at a time: z of all rows would be quadratic. The gradient of z is added by atomics: it is deterministic if the
positions of the keys that a row sees are distinct.

For what is supported see `kernel_flash`; gradients of gradients are not supported.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D channels of queries and keys, V channels of
values, P entries of the table of relative positions.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .kernel_bias import check_bias, decay_argument, relative_argument, relative_gradients
from .kernel_flash import (
    check_inputs,
    chunk_rows,
    dropout_seed,
    flash_backward,
    flash_decode,
    flash_forward,
    row_parts,
    row_products,
)
from .kernel_operator import Operator

# With relative positions a chunk is a multiple of so many rows.
CHUNK_ROWS = 128


def _parts(
    tensors: Sequence[Any], scaling: float, dropout: float = 0.0, *, grad: bool = False, decoding: bool = False
) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yields rows, keys and options of `kernel_flash`: one part, or with relative positions one for each chunk.

    tensors: query, key, value, a decay with a gradient (2), the table of relative positions; a decay without one (2),
    the positions of rows and keys, key ranges, and the seed of dropout. The first 6 may get a gradient.
    """
    query, key, _, *decay, table, row_decay, key_decay, row_positions, key_positions, key_ranges, seed = tensors
    size = query.shape[2] if table is None else chunk_rows(query, 8 * table.shape[0], CHUNK_ROWS)
    for rows, keys, options in row_parts(query, key, size, key_ranges=key_ranges, seed=seed, dropout=dropout):
        if table is None:
            both = decay if row_decay is None else (row_decay, key_decay)
            logit_bias = decay_argument(*both, near=not decoding)
        else:
            positions = row_positions[:, rows], key_positions[:, keys]
            logit_bias = relative_argument(query[:, :, rows], table, *positions, scaling, grad=grad)
        yield rows, keys, {**options, "scaling": scaling, "logit_bias": logit_bias}


def _forward(tensors: Sequence[Any], scaling: float, dropout: float) -> Sequence[torch.Tensor]:
    query, key, value, *_ = tensors
    parts = [
        flash_forward(query[:, :, rows], key[:, :, keys], value[:, :, keys], **options)
        for rows, keys, options in _parts(tensors, scaling, dropout)
    ]
    return parts[0] if len(parts) == 1 else [torch.cat(part, dim=2) for part in zip(*parts)]


def _backward(
    grads: Sequence[Any], tensors: Sequence[Any], results: Sequence[torch.Tensor], scaling: float, dropout: float
) -> list[torch.Tensor]:
    (query, key, value, *decay, table), (out, lse), (grad, _) = tensors[:6], results, grads
    parts, delta = _parts(tensors, scaling, dropout, grad=True), row_products(grad, out)
    if table is None:
        ((_, _, options),) = parts
        options["decay_gradient"] = decay[0] is not None
        *gradients, of_decay = flash_backward(grad, query, key, value, lse, delta, **options)
        return [*gradients, *(one.to(numbers.dtype) for one, numbers in zip(of_decay or (), decay))]
    grad_query = query.new_empty(query.shape)
    grad_key, grad_value, grad_table = (one.new_zeros(one.shape, dtype=torch.float32) for one in (key, value, table))
    for rows, keys, options in parts:
        part = query[:, :, rows]
        part_query, part_key, part_value, _ = flash_backward(
            *(grad[:, :, rows], part, key[:, :, keys], value[:, :, keys], lse[:, :, rows], delta[:, :, rows]), **options
        )
        from_relative = relative_gradients(options["logit_bias"], part, table, scaling)
        grad_query[:, :, rows] = part_query + from_relative[0]
        grad_table += from_relative[1]
        grad_key[:, :, keys] += part_key
        grad_value[:, :, keys] += part_value
    return [grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_table.to(table.dtype)]


def _decode(tensors: Sequence[Any], scaling: float, dropout: float) -> torch.Tensor:
    ((_, _, options),) = _parts(tensors, scaling, decoding=True)
    return flash_decode(*tensors[:3], **options)


_attention = Operator("plain", "float scaling, float dropout", _forward, _backward, _decode)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    decay: tuple[torch.Tensor, torch.Tensor] | None = None,
    relative: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    key_ranges: torch.Tensor | None = None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal softmax attention, differentiable in query, key, value, the decay and the table of relative positions.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key, value: (B, G, K, D) and (B, G, K, V), the same type, H a multiple of G, K at least Q, V <= D <= 2 V.
        decay: numbers c of the rows (1 or B, H, Q) and of the keys (1 or B, H, K), float64 or float32; c_i - c_j, or 0
            if that is positive, is added to the logit of row i and key j. Numbers that require a gradient have the
            batch size B, and must not grow: their gradient does not see the 0.
        relative: relative positions: a table e (P, D) of the distances of positions, in any of the query's types, and
            the positions of rows and keys, integers (1 or B, Q) and (1 or B, K), below 2^29; scaling * q_i.e[distance]
            is added to the logits. Negative distances have the first entry, larger ones the last. Not with a decay.
        scaling: the factor on q.k and q.e; for it, `key_ranges` and `dropout` see `kernel_flash`.

    Returns:
        (B, H, Q, V) in the type of the query; 0 in rows that see nothing.
    """
    check_inputs(query, key, value, scaling, key_ranges, as_wide=False)
    check_bias(decay, relative, query, key)
    both, (table, *positions) = decay or (None, None), relative or (None, None, None)
    learned = any(one is not None and one.requires_grad for one in both)
    first = (query, key, value, *(both if learned else (None, None)), table)
    others = (*((None, None) if learned else both), *positions, key_ranges, dropout_seed(query, dropout))
    return _attention(first, others, scaling, dropout)[0]
