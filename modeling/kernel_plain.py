"""Plain causal attention in Triton: for the layers that a kernel's encoding does not serve.

The kernels are those of `kernel_flash`; what is here makes operators of them.

Supports and does not support: what `kernel_flash` does, and no gradients of gradients.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim.
"""

import hashlib
from typing import Any

import torch

from .kernel_flash import (
    check_inputs,
    flash_backward_columns,
    flash_backward_rows,
    flash_decode,
    flash_forward,
    row_products,
)

# Remote code can put two copies of this file into one process; an operator's name must belong to one of them.
_NAMESPACE = "whatwhere_" + hashlib.sha256(__name__.encode()).hexdigest()[:16]


@torch.library.custom_op(f"{_NAMESPACE}::plain_forward", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranges: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_forward(query, key, value, scaling=scaling, ranges=ranges)


@_forward.register_fake
def _(query, key, value, ranges, scaling):
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::plain_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (grad, query, key, value, lse, row_products(grad, out))
    grad_query, _ = flash_backward_rows(*tensors, scaling=scaling, ranges=ranges)
    return grad_query, *flash_backward_columns(*tensors, scaling=scaling, ranges=ranges)


@_backward.register_fake
def _(grad, query, key, value, ranges, out, lse, scaling):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@torch.library.custom_op(f"{_NAMESPACE}::plain_decode", mutates_args=())
def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranges: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    return flash_decode(query, key, value, scaling=scaling, ranges=ranges)


@_decode.register_fake
def _(query, key, value, ranges, scaling):
    return query.new_empty(query.shape)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scaling = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return *_backward(grad, *ctx.saved_tensors, ctx.scaling), None, None


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
    ranges: torch.Tensor | None = None,
    scaling: float,
) -> torch.Tensor:
    """Causal softmax attention, differentiable.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key, value: (B, G, K, D), the same type, H a multiple of G, K at least Q.
        ranges: int32 (B, 1, Q + K, 2), what each row sees (see `kernel_flash`), or None: causal, rows aligned to the
            end of the keys.
        scaling: the factor on q.k, positive.

    Returns:
        (B, H, Q, D) in the type of the query; 0 in rows that see nothing.

    Raises:
        ValueError: shapes or types do not fit, or scaling is not positive.
    """
    check_inputs(query, key, value, scaling, ranges)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if query.shape[2] == 1 and not wanted:
        return _decode(query, key, value, ranges, scaling)
    return _forward(query, key, value, ranges, scaling)[0]
