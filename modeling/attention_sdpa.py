"""Attention by PyTorch's own functions, `sdpa` and `flex_attention`, as Transformers calls them; for `attend`.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, V value width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.flex_attention import flex_attention_forward as stock_flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa_attention_forward

from .attention_mask import dense_mask, is_key_ranges, readable

# On a CPU, attention gets a mask for this number of rows at a time.
CPU_ROWS = 128


def sdpa_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Transformers' `sdpa`; a bias is materialised into the mask (B, H, Q, K).

    A mask of None has Transformers' meaning: one row attends to all keys, several are causal and aligned to the
    beginning of the keys. From `auto` it may be key ranges, see `attention_mask`.
    """
    if mask is None or not is_key_ranges(mask):
        return _sdpa(layer, query, key, value, mask, context, **options)
    Q = query.shape[2]
    if query.device.type != "cpu" or not readable(mask):
        return _sdpa(layer, query, key, value, dense_mask(mask, Q), context, **options)
    # A mask for all rows would take memory for 5 B Q K bytes, and what it hides would be computed.
    outputs = []
    for start in range(0, Q, CPU_ROWS):
        rows = slice(start, min(start + CPU_ROWS, Q))
        # Rows of padding see nothing, and attention needs a key.
        first, last = int(mask[:, :, rows, 0].min()), int(mask[:, :, rows, 1].max())
        keys = slice(min(first, key.shape[2] - 1), max(first + 1, last))
        dense = dense_mask(torch.cat((mask[:, :, rows], mask[:, :, Q:]), dim=2), rows.stop - rows.start)
        part = query[:, :, rows], key[:, :, keys], value[:, :, keys], dense[..., keys]
        outputs.append(_sdpa(layer, *part, context, **options)[0])
    return torch.cat(outputs, dim=1), None


@torch.compiler.assume_constant_result
def gpu_backend(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, width: int, value_width: int, dropout: float
) -> str:
    """Returns how PyTorch computes causal attention fast on a GPU, for queries and keys of this width.

    "cudnn": with values of their own width; "flash": with values padded to the width of keys; "": not at all.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return ""
    query, key, padded = (torch.empty(1, n, 128, width, dtype=dtype, device=device) for n in (heads, groups, groups))
    # Backends refuse some widths in training only.
    query.requires_grad_()
    options = None, dropout, True, heads != groups
    if cuda.can_use_cudnn_attention(cuda.SDPAParams(query, key, padded[..., :value_width].contiguous(), *options)):
        return "cudnn"
    return "flash" if cuda.can_use_flash_attention(cuda.SDPAParams(query, key, padded, *options)) else ""


def _sdpa(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    encodings = layer.encodings
    rows, keys = query.shape[2], key.shape[2]
    if encodings.hooks["bias"]:
        if mask is None:
            mask = query.new_ones(rows, keys, dtype=torch.bool).tril(keys - 1 if rows == 1 else 0)[None, None]
        logits = _no_logits(query, key)
        if any(part.bias_reads == "mask" for part in encodings.hooks["bias"]):
            masked = torch.finfo(torch.float32).min
            logits = torch.where(mask, 0.0, masked) if mask.dtype == torch.bool else mask.float()
        bias = encodings.bias(logits, query, context, options["scaling"]).to(query.dtype)
        lowest = torch.finfo(query.dtype).min
        mask = torch.where(mask, bias, lowest) if mask.dtype == torch.bool else mask + bias
    H, D = query.shape[1], query.shape[-1]
    G, V = value.shape[1], value.shape[-1]
    if mask is None and rows == keys and rows > 1 and D != V:
        dropout = options.get("dropout", 0.0)
        if gpu_backend(query.device, query.dtype, H, G, D, V, dropout) == "cudnn":
            # PyTorch prefers backends that need padded values, and Transformers would repeat keys that heads share.
            given: dict[str, Any] = {"dropout_p": dropout, "scale": options["scaling"], "enable_gqa": H != G}
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
                output = F.scaled_dot_product_attention(query, key, value, is_causal=True, **given)
            return output.transpose(1, 2).contiguous(), None
    # For one row, padding all cached values would take longer than the attention.
    padded = value if rows == 1 else _pad_value(key, value)
    output, _ = stock_sdpa_attention_forward(layer, query, key, padded, mask, **options)
    return output[..., : value.shape[-1]], None


def flex_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Transformers' `flex_attention`; a bias is materialised (B, H, Q, K) and added by its score function."""
    if layer.encodings.hooks["bias"]:
        bias = layer.encodings.bias(_no_logits(query, key), query, context, options["scaling"]).to(query.dtype)
        # Broadcast dimensions would be read out of bounds.
        options["position_bias"] = bias.expand(query.shape[0], query.shape[1], -1, -1).contiguous()
    output, weights = stock_flex_attention_forward(layer, query, key, _pad_value(key, value), mask, **options)
    return output[..., : value.shape[-1]], weights


def _pad_value(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # PyTorch leaves its fused path when values are narrower than keys.
    width = key.shape[-1] - value.shape[-1]
    return torch.cat((value, value.new_zeros(*value.shape[:-1], width)), dim=-1) if width else value


def _no_logits(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    # For a bias that reads nothing of the logits but their shape.
    return query.new_empty(0).expand(query.shape[0], query.shape[1], query.shape[2], 0)
