"""Attention by the Triton kernels: what they support, and the error where they do not.

Supports: float32, bfloat16, float16; heads of up to 256 channels; grouped heads; autocast; torch.compile; padding,
packed documents, static caches and dropout. Does not support: a user's own 4D mask, attention weights as an output,
gradients of gradients.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim.
"""

import functools
import os
from typing import Any

import torch
from transformers.utils import logging

from .attention_mask import is_key_ranges
from .attention_sdpa import gpu_backend
from .kernel_operator import only_deterministic
from .position_base import head_dim

logger = logging.get_logger(__name__)

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# What `auto` runs on a GPU where both are possible, by the encoding whose kernel it is: this kernel ("triton"), or the
# encoding's rotation and PyTorch's attention ("sdpa"). All others: "triton". `whatwhere gpu-check` measures both.
# Two passes of a backward in our kernel have 3 + 11 units of products, PyTorch with keys of width 2 D has 3 + 8.
WAYS = {"pope": {"training": "sdpa", "prompt": "sdpa", "decoding": "triton"}}


@functools.cache
def import_error() -> str:
    """Returns why Triton cannot be imported, or an empty string."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        reason = str(error) or type(error).__name__
        logger.info("No Triton kernels: %s.", reason)
        return reason
    return ""


@torch.compiler.assume_constant_result
def interpreted() -> bool:
    """Returns True if the kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "False")


@functools.cache
def _runs_on(device: torch.device) -> bool:
    if device.type not in ("cuda", "cpu", "meta") or import_error():
        return False
    if device.type == "cpu":
        return interpreted()
    # On NVIDIA's GPUs, Triton needs Ampere or newer.
    return device.type == "meta" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result
def runs_on(device: torch.device) -> bool:
    """Returns True if the kernels can run on the device: a GPU, or the CPU in Triton's interpreter."""
    return _runs_on(device)


def runs_by_default(device: torch.device) -> bool:
    """Returns True if attn_implementation="auto" uses the kernels on the device; never in the slow interpreter."""
    return device.type == "cuda" and runs_on(device) and not interpreted()


def unsupported(encodings: Any, query: torch.Tensor, attention_mask: Any) -> str | None:
    """Returns what the kernels do not support in a call, its value, and what is allowed; None if they support it."""
    if not runs_on(query.device):
        allowed = "a GPU (compute capability 8.0 or newer, or ROCm), or a CPU with TRITON_INTERPRET=1 set at the start"
        return f"device={str(query.device)!r}; allowed: {allowed}"
    if query.dtype not in DTYPES:
        return f"dtype={query.dtype}; allowed: {', '.join(map(str, DTYPES))}"
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim={query.shape[-1]}; allowed: at most {MAX_HEAD_DIM}"
    if attention_mask is not None and not is_key_ranges(attention_mask):
        return (
            f"an attention_mask of the shape {tuple(attention_mask.shape)} and type {attention_mask.dtype}; allowed: "
            "None, or 2D (batch, past + new tokens)"
        )
    if torch.is_grad_enabled() and only_deterministic():
        names = [part.name for part in encodings.hooks["kernel"] if not part.deterministic_kernel]
        if names:
            return (
                f"torch.use_deterministic_algorithms(True) in training with {names[0]!r}; allowed: False, or "
                "attn_implementation='blockwise' or 'eager'"
            )
    return None


def check_available(config: Any, others: list[str]) -> None:
    """Raises ValueError, which names the `others` implementations, if Triton is missing or heads are too wide."""
    if head_dim(config) > MAX_HEAD_DIM:
        problem = f"does not support head_dim={head_dim(config)}; allowed: at most {MAX_HEAD_DIM}"
    elif import_error():
        problem = f"needs Triton, which cannot be imported ({import_error()}): `pip install triton`"
    else:
        return
    raise ValueError(f'attn_implementation="triton" {problem}. Allowed here: {", ".join(map(repr, others))}.')


def run_kernel(
    encodings: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: Any, **options: Any
) -> torch.Tensor:
    """Returns the output (B, H, Q, D) of the kernel of a layer's encodings; see `PositionEncoding.kernel`."""
    # The first encoding of a sum gets what the others add.
    for part in reversed(encodings.hooks["kernel"]):
        found = part.kernel(query, key, value, context, **options)
        if isinstance(found, torch.Tensor):
            return found
        options |= found
    from .kernel_plain import plain_attention

    return plain_attention(query, key, value, **options)


def kernel_attention(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_ranges: Any,
    context: Any,
    options: dict,
) -> torch.Tensor:
    """Calls the kernel of the layer; returns (B, Q, H, D). For the arguments see `attention`."""
    if torch.is_autocast_enabled(query.device.type):
        # Rotated queries and keys may be float32 beside values of autocast's type.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    given = {"key_ranges": key_ranges, "scaling": options["scaling"], "dropout": options.get("dropout", 0.0)}
    return run_kernel(layer.encodings, query, key, value, context, **given).transpose(1, 2).contiguous()


def triton_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention by the Triton kernel of the layer; for arguments and result see `attention`.

    Raises:
        ValueError: the kernels do not support the call.
    """
    problem = unsupported(layer.encodings, query, mask)
    if problem is None and options.get("output_attentions"):
        problem = "output_attentions=True; allowed: False, or attn_implementation='eager'"
    if problem is not None:
        raise ValueError(
            f"attn_implementation='triton' does not support {problem}. attn_implementation='auto' uses PyTorch where "
            "the kernels are not supported."
        )
    return kernel_attention(layer, query, key, value, mask, context, options), None


def _rotates(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict) -> bool:
    """Returns True if `auto` leaves a call to the rotation of the encoding and PyTorch's attention."""
    rows, encodings = query.shape[2], layer.encodings
    phase = "decoding" if rows == 1 else "training" if layer.training else "prompt"
    if WAYS.get(encodings.kernel_name, {}).get(phase) != "sdpa" or encodings.default != "sdpa":
        return False
    # With padding, documents or a cache, PyTorch needs a mask of rows x keys.
    if mask is not None or rows != key.shape[2]:
        return False
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    added = sum(part.added_channels(layer.config, part.parameters_) for part in encodings.hooks["after_cache"])
    width, heads, groups = key.shape[-1] + added, query.shape[1], key.shape[1]
    return gpu_backend(query.device, dtype, heads, groups, width, value.shape[-1], options.get("dropout", 0.0)) != ""


def auto_kernel(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, options: dict
) -> torch.Tensor | None:
    """Returns the output of the layer's kernel for attn_implementation="auto", or None where it is not used."""
    if (
        not runs_by_default(query.device)
        or unsupported(layer.encodings, query, mask)
        or _rotates(layer, query, key, value, mask, options)
    ):
        return None
    return kernel_attention(layer, query, key, value, mask, context, options)


class TritonAttention:
    """The functions of this file for the registry, in one entry."""

    forward = staticmethod(triton_attention_forward)
    kernel = staticmethod(auto_kernel)
    check_available = staticmethod(check_available)
