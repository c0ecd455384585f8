"""Plain causal attention in Triton, and attention with a decay: FoX, ALiBi.

The kernels are those of `kernel_flash`; these are their operators.

For what is supported see `kernel_flash`; gradients of gradients are not supported.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D channels of queries and keys, V channels of
values.
"""

import hashlib
from typing import Any

import torch

from .kernel_flash import check_inputs, dropout_arguments, dropout_seed, flash_backward, flash_decode, flash_forward
from .kernel_terms import check_decay, decay_argument

# Remote code can put two copies of this file into one process; an operator's name must belong to one of them.
_NAMESPACE = "whatwhere_" + hashlib.sha256(__name__.encode()).hexdigest()[:16]


@torch.library.custom_op(f"{_NAMESPACE}::plain_forward", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_decay: torch.Tensor | None,
    key_decay: torch.Tensor | None,
    ranges: torch.Tensor | None,
    seed: torch.Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = {"ranges": ranges, "added": decay_argument(row_decay, key_decay)}
    return flash_forward(query, key, value, scaling=scaling, **options, dropout=dropout_arguments(seed, dropout))


@_forward.register_fake
def _(query, key, value, row_decay, key_decay, ranges, seed, scaling, dropout):
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::plain_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_decay: torch.Tensor | None,
    key_decay: torch.Tensor | None,
    ranges: torch.Tensor | None,
    seed: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scaling: float,
    dropout: float,
    decay_gradient: bool,
) -> list[torch.Tensor]:
    options: dict[str, Any] = {"ranges": ranges, "added": decay_argument(row_decay, key_decay)}
    options["dropout"] = dropout_arguments(seed, dropout)
    options["decay_gradient"] = decay_gradient
    *results, of_decay = flash_backward(grad, query, key, value, out, lse, scaling=scaling, **options)
    return [*results, *(of_decay or ())]


@_backward.register_fake
def _(grad, query, key, value, row_decay, key_decay, ranges, seed, out, lse, scaling, dropout, decay_gradient):
    results = [one.new_empty(one.shape) for one in (query, key, value)]
    both = (row_decay, key_decay) if decay_gradient else ()
    return [*results, *(query.new_empty(query.shape[:2] + one.shape[2:], dtype=torch.float32) for one in both)]


@torch.library.custom_op(f"{_NAMESPACE}::plain_decode", mutates_args=())
def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_decay: torch.Tensor | None,
    key_decay: torch.Tensor | None,
    ranges: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    return flash_decode(query, key, value, scaling=scaling, ranges=ranges, added=decay_argument(row_decay, key_decay))


@_decode.register_fake
def _(query, key, value, row_decay, key_decay, ranges, scaling):
    return query.new_empty(*query.shape[:3], value.shape[3])


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scaling, ctx.dropout = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    tensors = ctx.saved_tensors
    wanted = any(ctx.needs_input_grad[3:5])
    results = _backward(grad, *tensors, ctx.scaling, ctx.dropout, wanted)
    of_decay = [one.to(numbers.dtype) for one, numbers in zip(results[3:], tensors[3:5])] or (None, None)
    return (*results[:3], *of_decay, *(None,) * 4)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "the attention kernels have no second derivative: use attn_implementation='eager' for gradients of gradients"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    decay: tuple[torch.Tensor, torch.Tensor] | None = None,
    ranges: torch.Tensor | None = None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal softmax attention, differentiable in query, key, value and the decay.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key, value: (B, G, K, D) and (B, G, K, V), the same type, H a multiple of G, K at least Q, V <= D <= 2 V.
        decay: numbers c of the rows (1 or B, H, Q) and of the keys (1 or B, H, K), float64 or float32; c_i - c_j, or 0
            if that is positive, is added to the logit of row i and key j. Numbers that require a gradient have the
            batch size B.
        ranges: int32 (B, 1, Q + K, 2), what each row sees (see `kernel_flash`), or None: causal, rows aligned to the
            end of the keys.
        scaling: the factor on q.k, positive.
        dropout: the probability that a weight is dropped.

    Returns:
        (B, H, Q, V) in the type of the query; 0 in rows that see nothing.

    Raises:
        ValueError: shapes or types do not fit, scaling is not positive, or dropout is not in [0, 1].
    """
    check_inputs(query, key, value, scaling, ranges)
    check_decay(decay, query, key)
    inputs = (query, key, value, *(decay or (None, None)))
    wanted = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in inputs)
    if query.shape[2] == 1 and not wanted and not dropout:
        return _decode(*inputs, ranges, scaling)
    return _forward(*inputs, ranges, dropout_seed(query, dropout), scaling, dropout)[0]
