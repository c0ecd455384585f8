"""Stick-breaking attention by the kernel of flash-linear-attention (the package `fla-core`, 0.6), on a GPU.

It computes what `position_stick_breaking` computes, but for some calls; see `_fused_supports`.

Axes: B batch, H query heads, T tokens, D head dim.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.utils import logging

from .attention_blockwise import autocast_inputs
from .attention_mask import is_key_ranges, readable
from .kernel_operator import in_transform

logger = logging.get_logger(__name__)

# Devices on which flash-linear-attention is used.
FUSED_DEVICES = ("cuda",)


@functools.cache
def _fused_attention() -> Callable[..., Any] | None:
    """Returns the kernel of flash-linear-attention, or None with one warning if it is not installed."""
    try:
        from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn
    except ImportError as error:
        reason = str(error)
    else:
        if "scale" in inspect.signature(parallel_stickbreaking_attn).parameters:
            return parallel_stickbreaking_attn
        reason = "it is older than 0.6"
    logger.warning_once(
        "Stick-breaking attention is faster on a GPU with flash-linear-attention: `pip install fla-core`. PyTorch "
        f"computes it now ({reason})."
    )
    return None


def _fused_supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout: float) -> bool:
    """Returns True if flash-linear-attention supports the call. It has no decoding and no dropout, for example."""
    device, dtype = query.device, query.dtype
    if device.type not in FUSED_DEVICES or in_transform() or not readable(query):
        return False
    if device.type == "cuda":
        # Triton needs Ampere or newer. `_documents` waits for the device, which a CUDA graph cannot.
        old = torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
        if old or (mask is not None and torch.cuda.is_current_stream_capturing()):
            return False
    # It multiplies float32 numbers in TF32.
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return (
        dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not (exact and device.type == "cuda")
        and dtype == key.dtype == value.dtype
        and query.shape[2] == key.shape[2]
        and max(query.shape[3], value.shape[3]) <= 256
        and (mask is None or is_key_ranges(mask))
        and dropout == 0
        and _fused_attention() is not None
    )


def _documents(key_ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the tokens that are not padding, in B * T, and where documents begin and end among them, for Q = K = T.

    None if that does not describe what the rows see, or everything is padding.
    """
    B, T = key_ranges.shape[0], key_ranges.shape[2] // 2
    (low, high), valid = key_ranges[:, 0, :T].unbind(-1), key_ranges[:, 0, T:, 0] != 0
    newest = torch.arange(1, T + 1, device=key_ranges.device)
    differs = ((high > low) != valid) | (valid & (high != newest))
    tokens = valid.flatten().nonzero()[:, 0]
    if not len(tokens) or bool(differs.any()):
        return None
    document = low + T * torch.arange(B, device=key_ranges.device)[:, None]
    _, lengths = torch.unique_consecutive(document.flatten()[tokens], return_counts=True)
    return tokens, F.pad(lengths.cumsum(0), (1, 0))


class _FirstDerivative(torch.autograd.Function):
    """The identity, with an error for gradients of gradients: the kernel has none."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "stick-breaking attention by flash-linear-attention has no second derivative: use "
                "attn_implementation='eager' for gradients of gradients"
            )
        return grads


def fused_stick_breaking_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None = None, scaling: float,
    inclusive: bool = False, dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Stick-breaking attention by flash-linear-attention, or None where it does not compute the call.

    Arguments and results are those of `stick_breaking_attention`, but for the remainder's type, that of the query.
    Documents are packed as sequences of different lengths; padding is left out.
    """
    query, key, value = autocast_inputs(query, key, value)
    documents = None
    if not _fused_supports(query, key, value, mask, dropout):
        return None
    if mask is not None:
        documents = _documents(mask)
        if documents is None:
            return None
    B, H, T, _ = query.shape
    # (B, T, H, D), as projections leave them in memory.
    inputs = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    attend: Any = _fused_attention()
    if documents is None:
        output, remainder = attend(*inputs, scale=scaling, attend_current=inclusive)
    else:
        tokens, bounds = documents
        inputs = [tensor.flatten(0, 1)[tokens][None] for tensor in inputs]
        packed, left = attend(*inputs, scale=scaling, attend_current=inclusive, cu_seqlens=bounds)
        output = packed.new_zeros(B * T, *packed.shape[2:]).index_copy(0, tokens, packed[0]).unflatten(0, (B, T))
        remainder = left.new_ones(B * T, H).index_copy(0, tokens, left[0]).unflatten(0, (B, T))
    output, remainder = _FirstDerivative.apply(output, remainder)
    return output.transpose(1, 2), remainder.transpose(1, 2)
