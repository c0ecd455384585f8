"""PoPE attention in Triton: magnitudes are turned into pairs inside the kernels, and nothing wider than D is written.

The kernels are those of `kernel_flash`, with polar scores; what is here makes operators of them. The backward pass is
deterministic: no atomics, the shift's gradient is summed by PyTorch.

Supports and does not support: what `kernel_flash` does, and no gradients of gradients.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, R rotated channels.
"""

import hashlib
from typing import Any

import torch

from .kernel_flash import (
    Polar,
    flash_backward_columns,
    flash_backward_rows,
    flash_decode,
    flash_forward,
    row_products,
)

# Remote code can put two copies of this file into one process; an operator's name must belong to one of them.
_NAMESPACE = "whatwhere_" + hashlib.sha256(__name__.encode()).hexdigest()[:16]


def _polar(query: torch.Tensor, phases: tuple[torch.Tensor, ...], shift: torch.Tensor | None) -> Polar:
    """The tables as the kernels read them: halves for half precision, which is no finer."""
    dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
    cos_q, sin_q, cos_k, sin_k = [table.to(dtype) for table in phases]
    return Polar(cos_q, sin_q, cos_k, sin_k, shift)


@torch.library.custom_op(f"{_NAMESPACE}::pope_forward", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_q: torch.Tensor,
    sin_q: torch.Tensor,
    cos_k: torch.Tensor,
    sin_k: torch.Tensor,
    shift: torch.Tensor | None,
    ranges: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    polar = _polar(query, (cos_q, sin_q, cos_k, sin_k), shift)
    return flash_forward(query, key, value, scaling=scaling, ranges=ranges, polar=polar)


@_forward.register_fake
def _(query, key, value, cos_q, sin_q, cos_k, sin_k, shift, ranges, scaling):
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::pope_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_q: torch.Tensor,
    sin_q: torch.Tensor,
    cos_k: torch.Tensor,
    sin_k: torch.Tensor,
    shift: torch.Tensor | None,
    ranges: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scaling: float,
) -> list[torch.Tensor]:
    settings: dict[str, Any] = {
        "scaling": scaling,
        "ranges": ranges,
        "polar": _polar(query, (cos_q, sin_q, cos_k, sin_k), shift),
    }
    tensors = (grad, query, key, value, lse, row_products(grad, out))
    grad_query, grad_shift = flash_backward_rows(*tensors, **settings)
    grad_key, grad_value = flash_backward_columns(*tensors, **settings)
    results = [grad_query, grad_key, grad_value]
    return results if grad_shift is None else [*results, grad_shift]


@_backward.register_fake
def _(grad, query, key, value, cos_q, sin_q, cos_k, sin_k, shift, ranges, out, lse, scaling):
    wanted = (query, key, value) if shift is None else (query, key, value, shift)
    return [tensor.new_empty(tensor.shape) for tensor in wanted]


@torch.library.custom_op(f"{_NAMESPACE}::pope_decode", mutates_args=())
def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_q: torch.Tensor,
    sin_q: torch.Tensor,
    cos_k: torch.Tensor,
    sin_k: torch.Tensor,
    shift: torch.Tensor | None,
    ranges: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    polar = _polar(query, (cos_q, sin_q, cos_k, sin_k), shift)
    return flash_decode(query, key, value, scaling=scaling, ranges=ranges, polar=polar)


@_decode.register_fake
def _(query, key, value, cos_q, sin_q, cos_k, sin_k, shift, ranges, scaling):
    return query.new_empty(query.shape)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scaling = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    results = _backward(grad, *ctx.saved_tensors, ctx.scaling)
    grad_shift = results[3] if len(results) > 3 else None
    return (*results[:3], None, None, None, None, grad_shift, None, None)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "the PoPE kernels have no second derivative: use attn_implementation='eager' for gradients of gradients"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def _check(query: torch.Tensor, key: torch.Tensor, tables: tuple[torch.Tensor, ...], shift: Any) -> None:
    B, H, Q, D = query.shape
    K, R = key.shape[2], tables[0].shape[-1]
    for table, length in zip(tables, (Q, Q, K, K)):
        if table.dim() != 3 or table.shape[0] not in (1, B) or table.shape[1:] != (length, R) or not 0 < R <= D:
            shapes = [tuple(one.shape) for one in tables]
            raise ValueError(
                f"tables={shapes!r} are not valid: they must be twice (1 or {B}, {Q}, R), then twice (1 or {B}, {K}, "
                f"R), with R from 1 to {D}."
            )
        if table.requires_grad:
            raise ValueError(
                f"tables that require_grad={table.requires_grad!r} are not valid: the PoPE kernels give no gradient to "
                "them; it must be False, or use the 'eager' attention implementation."
            )
    if shift is not None and shift.shape != (H, R):
        raise ValueError(f"shift={tuple(shift.shape)!r} is not valid: it must be {(H, R)!r}.")


def pope_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    *,
    ranges: torch.Tensor | None = None,
    scaling: float,
) -> torch.Tensor:
    """PoPE attention (2509.10534, Eq. 4 to 7): differentiable in query, key, value and shift.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16: R magnitudes, then plain channels.
        key: (B, G, K, D), the same type, H a multiple of G, K at least Q: the same.
        value: (B, G, K, D), the same type.
        tables: cosines and sines of the queries (1 or B, Q, R), cosines and sines of the keys (1 or B, K, R), float32,
            or float16 beside half precision; then the shift (H, R), subtracted from the phases of the queries, float32,
            or None.
        ranges: int32 (B, 1, Q + K, 2), what each row sees (see `kernel_flash`), or None: causal, rows aligned to the
            end of the keys.
        scaling: the factor on the scores, positive.

    Returns:
        (B, H, Q, D) in the type of the query (that of autocast where it is on); 0 in rows that see nothing.

    Raises:
        ValueError: shapes or types do not fit, a table requires a gradient, or scaling is not positive.
    """
    *phases, shift = tables
    _check(query, key, (phases[0], phases[1], phases[2], phases[3]), shift)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    shift = None if shift is None else shift.float()
    arguments = (query, key, value, *phases, shift, ranges, scaling)
    wanted = (query, key, value) if shift is None else (query, key, value, shift)
    if query.shape[2] == 1 and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in wanted)):
        return _decode(*arguments)
    return _forward(*arguments)[0]
