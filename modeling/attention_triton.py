"""Attention by the Triton kernels: their mask, what they serve, and what they refuse.

The kernels' mask, "limits", is linear in the length: int32 (B, 1, Q + K, 2). Query row i sees key slot j exactly if
`low <= j < high` for `low, high = limits[b, 0, i]`, and slot j is not padding: `limits[b, 0, Q + j, 0] != 0`. That
says causality, padding, packed documents, holes in a mask and the empty slots of a static cache. It has four dimensions
because Transformers hands a 4D mask, as `generate` prepares it for a static cache, to the model unchanged.

Supports: float32, bfloat16, float16; heads of up to 256 channels; grouped heads; autocast; torch.compile. Does not
support: dropout of attention weights, a user's own 4D mask, attention weights as an output, gradients of gradients.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim.
"""

import functools
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function
from transformers.utils import logging

from .position_encoding import PositionContext

logger = logging.get_logger(__name__)

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Attention functions that get keys as they are in the cache, before `rotate_cached`.
ROTATING = ("triton", "auto")


@functools.cache
def import_error() -> str:
    """Imports the kernels; returns the reason if that fails, else an empty string."""
    try:
        from .kernel_cope import cope_attention  # noqa: F401
        from .kernel_pope import pope_attention  # noqa: F401
    except ImportError as error:
        reason = str(error) or type(error).__name__
        logger.info("No Triton kernels: %s.", reason)
        return reason
    return ""


@torch.compiler.assume_constant_result
def interpreted() -> bool:
    """Returns True if the kernels run in Triton's interpreter; asked where they can be imported."""
    from .kernel_launch import INTERPRETED

    return INTERPRETED


@functools.cache
def _runs_on(device: torch.device) -> bool:
    if device.type not in ("cuda", "cpu", "meta") or import_error():
        return False
    if device.type == "cpu":
        return interpreted()
    # Of NVIDIA's GPUs, Triton needs Ampere or newer.
    return device.type == "meta" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result
def runs_on(device: torch.device) -> bool:
    """Returns True if the kernels can run on the device: a GPU, or the CPU in Triton's interpreter."""
    return _runs_on(device)


def runs_by_default(device: torch.device) -> bool:
    """Returns True if attn_implementation="auto" means the kernels on the device; never in the slow interpreter."""
    return device.type == "cuda" and runs_on(device) and not interpreted()


def is_limits(attention_mask: Any) -> bool:
    """Returns True if a mask has the kernels' form."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4 and attention_mask.dtype == torch.int32


def limits_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that the kernels read, made without waiting for the device.

    Returns:
        None for plain causal attention with the rows at the end of the keys, else limits. A row that is padding itself
        sees nothing; the others begin at the first slot of their document that is not padding to the left.

    Raises:
        ValueError: a mask function of the user's, which need not be causal.
    """
    if use_vmap:
        raise ValueError(
            "attn_implementation='triton' does not serve or_mask_function and and_mask_function; allowed: causal "
            "attention with padding and packed documents. Use attn_implementation='eager'."
        )
    packed = mask_function is not causal_mask_function
    filled = isinstance(q_offset, int) and q_offset + q_length == kv_length and kv_offset == 0
    if filled and attention_mask is None and not packed:
        return None
    slots = torch.arange(kv_length, device=device)
    # The slot of each row, (Q,) and on the device even if the cache counts there.
    rows = torch.arange(q_length, device=device) + q_offset - kv_offset
    own = rows.clamp(max=kv_length - 1)
    valid = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if attention_mask is not None:
        given = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        valid = torch.nn.functional.pad(given, (0, kv_length - given.shape[-1]))
    low = (valid.cumsum(-1) == 0).sum(-1, keepdim=True)
    if packed and kv_length > 1:
        # Documents are contiguous: a slot that does not see its neighbour begins a new one.
        batch = torch.arange(batch_size, device=device)[:, None]
        same = mask_function(batch, torch.zeros_like(batch), slots[None, 1:] + kv_offset, slots[None, :-1] + kv_offset)
        begins = torch.nn.functional.pad(~same.expand(batch_size, -1), (1, 0))
        first = torch.where(begins, slots, 0).cummax(-1).values
        low = torch.maximum(low, first[:, own])
    low = low.expand(batch_size, q_length)
    high = torch.where(valid[:, own], (rows + 1).clamp(max=kv_length), low)
    limits = torch.stack((low, torch.maximum(high, low)), dim=-1)
    flags = torch.stack((valid, torch.zeros_like(valid)), dim=-1)
    return torch.cat((limits.to(torch.int32), flags.to(torch.int32)), dim=1)[:, None]


def valid_slots(limits: torch.Tensor, query_length: int) -> torch.Tensor:
    """Returns which key slots of limits (B, 1, Q + K, 2) are not padding: bool (B, K)."""
    return limits[:, 0, query_length:, 0] != 0


def dense_mask(limits: torch.Tensor, query_length: int) -> torch.Tensor:
    """Returns limits (B, 1, Q + K, 2) as the mask of Transformers' `sdpa`: bool (B, 1, Q, K), True where visible."""
    low, high = limits[:, :, :query_length].unsqueeze(-2).unbind(-1)
    valid = valid_slots(limits, query_length)[:, None, None]
    slots = torch.arange(valid.shape[-1], device=limits.device)
    return (slots >= low) & (slots < high) & valid


def segments(limits: torch.Tensor, query_length: int) -> torch.Tensor:
    """Returns limits (B, 1, 2 * Q, 2), made by `limits_mask` with a row for each key, as `blockwise`'s int32 (B, Q)."""
    # All rows of a document begin at the same slot, which no other document has.
    return limits[:, 0, :query_length, 0].masked_fill(~valid_slots(limits, query_length), -1)


def obstacle(module: Any, query: torch.Tensor, attention_mask: Any, dropout: float) -> tuple[str, str, str] | None:
    """Returns why the kernels do not serve a call: what, its value, what is allowed; or None if they do."""
    if not runs_on(query.device):
        allowed = (
            "a GPU (compute capability 8.0 or newer, or ROCm), or a CPU with TRITON_INTERPRET=1 set before the start"
        )
        return "device", repr(str(query.device)), allowed
    if query.dtype not in DTYPES:
        return "dtype", str(query.dtype), ", ".join(map(str, DTYPES))
    if query.shape[-1] > MAX_HEAD_DIM:
        return "head_dim", str(query.shape[-1]), f"at most {MAX_HEAD_DIM}"
    if dropout > 0:
        field = "attn_pdrop" if hasattr(module.config, "attn_pdrop") else "attention_dropout"
        return f"{field} in training", repr(dropout), "0.0"
    if attention_mask is not None and not is_limits(attention_mask):
        value = f"{tuple(attention_mask.shape)} of type {attention_mask.dtype}"
        return "attention_mask of your own with the shape", value, "None, or 2D (batch, past + new tokens)"
    return None


def check_available(config: Any, others: list[str]) -> None:
    """Checks what is known of attn_implementation="triton" when a model is built.

    Args:
        config: the configuration of the model.
        others: the implementations to name in an error.

    Raises:
        ValueError: Triton is not installed, or the heads are too wide.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim > MAX_HEAD_DIM:
        problem = f"does not serve head_dim={head_dim}; allowed: at most {MAX_HEAD_DIM}"
    elif import_error():
        problem = f"needs Triton, which can not be imported ({import_error()}): `pip install triton`"
    else:
        return
    raise ValueError(f'attn_implementation="triton" {problem}. Allowed here: {", ".join(map(repr, others))}.')


def kernel_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    position_context: PositionContext | None,
) -> tuple[torch.Tensor, None]:
    """Calls the kernel of the layer's encoding; see `triton_attention_forward`."""
    if torch.is_autocast_enabled(query.device.type):
        # Rotated queries and keys may be float32 beside values of autocast's type.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    encoding = module.position_encoding
    output = encoding.kernel_attention(query, key, value, position_context, limits=attention_mask, scaling=scaling)
    return output.transpose(1, 2).contiguous(), None


def triton_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_context: PositionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by the Triton kernel of the layer's encoding, or an error.

    Args:
        module: the attention layer; `module.position_encoding` has the kernel.
        query: (B, H, Q, D). key, value: (B, G, K, D), keys as they are in the cache.
        attention_mask: limits, or None for causal.
        scaling: the factor on q.k.
        dropout: must be 0.
        position_context: what the model computed once for all layers.

    Returns:
        The output (B, Q, H, D), in the dtype of `query`, and None: a kernel has no weights.

    Raises:
        ValueError: the kernels do not serve the call.
    """
    problem = obstacle(module, query, attention_mask, dropout)
    if problem is None and kwargs.get("output_attentions"):
        problem = "output_attentions", "True", "False, or attn_implementation='eager'"
    if problem is not None:
        what, value_text, allowed = problem
        raise ValueError(
            f"attn_implementation='triton' does not serve {what}={value_text}; allowed: {allowed}. "
            "attn_implementation='auto' takes another path where the kernels can not serve."
        )
    return kernel_attention_forward(module, query, key, value, attention_mask, scaling, position_context)
