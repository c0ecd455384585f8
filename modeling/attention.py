"""Attention implementations in PyTorch, and the selection of the implementation for an encoding.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, V value width.
"""

from typing import Any

import torch
from torch import nn
from transformers.integrations.flex_attention import flex_attention_forward as stock_flex_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from .attention_mask import causal_mask, dense_mask, is_ranges, ranges_mask
from .position_base import PositionContext
from .position_registry import (
    auto_kernel,
    blockwise_path,
    check_available,
    supported_implementations,
    triton_attention_forward,
)

# On a CPU, `auto` uses PyTorch's attention with a mask for this number of rows at a time.
CPU_ROWS = 128


def _eager(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    context: PositionContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reference implementation with all weights in memory; the only one that returns weights."""
    encodings, kind = module.encodings, module.config.attention_weights
    groups = query.shape[1] // key.shape[1]
    logits = torch.matmul(query, repeat_kv(key, groups).transpose(2, 3)) * scaling
    if encodings.hooks["bias"]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is None:
        mask = causal_mask(query.shape[2], key.shape[2], query.device)
    lowest = torch.finfo(logits.dtype).min
    logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
    logits = logits + encodings.bias(logits, query, context, scaling)
    weights = nn.functional.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if kind != "softmax":
        weights = hard_weights(weights, straight_through=kind == "straight_through")
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout)
    return torch.matmul(weights, repeat_kv(value, groups)).transpose(1, 2).contiguous(), weights


def hard_weights(weights: torch.Tensor, *, straight_through: bool) -> torch.Tensor:
    """Hard attention: all weight on the key with the largest one, the oldest of several.

    The gradient is that of the softmax weights with `straight_through`, else 0.
    """
    chosen = torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
    passed = weights if straight_through else weights * 0
    return chosen + passed - passed.detach()


def _sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float,
    dropout: float,
    context: PositionContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' `sdpa`; a bias is materialised into the mask (B, H, Q, K).

    A mask of None has Transformers' meaning: one row attends to all keys, several are causal and aligned to the
    beginning of the keys. `auto` gives ranges, if there is no bias.
    """
    encodings = module.encodings
    rows, keys = query.shape[2], key.shape[2]
    if is_ranges(mask):
        if query.device.type == "cpu" and not torch.compiler.is_compiling():
            return _sdpa_by_rows(module, query, key, value, mask, scaling, dropout, context, **kwargs)
        mask = dense_mask(mask, rows)
    if encodings.hooks["bias"]:
        if mask is None:
            mask = query.new_ones(rows, keys, dtype=torch.bool).tril_(keys - 1 if rows == 1 else 0)[None, None]
        logits = _mask_logits(mask) if encodings.bias_reads_mask else _no_logits(query, key)
        bias = encodings.bias(logits, query, context, scaling).to(query.dtype)
        lowest = torch.finfo(query.dtype).min
        mask = torch.where(mask, bias, lowest) if mask.dtype == torch.bool else mask + bias
    # For one row, padding all cached values would take longer than the attention.
    padded = value if rows == 1 else _pad_value(key, value)
    output, _ = stock_sdpa_attention_forward(
        module, query, key, padded, mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output[..., : value.shape[-1]], None


def _sdpa_by_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: torch.Tensor,
    *rest: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`_sdpa` on a CPU for some rows at a time, with the keys that they see.

    A mask for all rows would take memory for 5 B Q K bytes, and what it hides would be computed.
    """
    outputs = []
    Q = query.shape[2]
    for start in range(0, Q, CPU_ROWS):
        rows = slice(start, min(start + CPU_ROWS, Q))
        # Rows of padding see nothing, and attention needs a key.
        first, last = int(ranges[:, :, rows, 0].min()), int(ranges[:, :, rows, 1].max())
        keys = slice(min(first, key.shape[2] - 1), max(first + 1, last))
        mask = dense_mask(torch.cat((ranges[:, :, rows], ranges[:, :, Q:]), dim=2), rows.stop - rows.start)[..., keys]
        output, _ = _sdpa(module, query[:, :, rows], key[:, :, keys], value[:, :, keys], mask, *rest, **kwargs)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _flex(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float,
    dropout: float,
    context: PositionContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Transformers' `flex_attention`; a bias is materialised (B, H, Q, K) and added by its score function."""
    if module.encodings.hooks["bias"]:
        bias = module.encodings.bias(_no_logits(query, key), query, context, scaling).to(query.dtype)
        # Broadcast dimensions would be read out of bounds.
        kwargs["position_bias"] = bias.expand(query.shape[0], query.shape[1], -1, -1).contiguous()
    output, weights = stock_flex_attention_forward(
        module, query, key, _pad_value(key, value), mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return output[..., : value.shape[-1]], weights


def _pad_value(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # PyTorch leaves its fused path when values are narrower than keys.
    width = key.shape[-1] - value.shape[-1]
    return torch.cat((value, value.new_zeros(*value.shape[:-1], width)), dim=-1) if width else value


def _mask_logits(mask: torch.Tensor) -> torch.Tensor:
    """Logits (B, 1 or H, Q, K), float32, from which a bias reads what is masked."""
    if mask.dtype != torch.bool:
        return mask.float()
    masked = torch.finfo(torch.float32).min
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, masked)


def _no_logits(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    # For a bias that reads nothing of the logits but their shape.
    return query.new_empty(0).expand(query.shape[0], query.shape[1], query.shape[2], 0)


_PATHS = {"eager": _eager, "sdpa": _sdpa, "flex_attention": _flex}
if blockwise_path is not None:
    _PATHS["blockwise"] = blockwise_path


def _attention(implementation: str) -> Any:
    """Returns the attention function of an implementation in PyTorch, as Transformers calls it."""

    def attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        context: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one layer.

        Args:
            module: the attention layer, with `encodings` and `config`.
            query: (B, H, Q, D). key: (B, G, K, D), as cached. value: (B, G, K, V).
            attention_mask: from the implementation's mask function.
            scaling: the factor on q.k.
            dropout: the probability of dropping an attention weight; 0 outside training.
            context: the context of this layer.

        Returns:
            The output (B, Q, H, V), in the dtype of `query`, and from `eager` the weights (B, H, Q, K).
        """
        encodings = module.encodings
        if encodings.hooks["attend"]:
            settings = {"scaling": scaling, "dropout": dropout, "implementation": implementation}
            found = encodings.attend(query, key, value, attention_mask, context, **settings)
            if found is not None:
                return found[0].transpose(1, 2).contiguous(), found[1]
        query, key = encodings.after_cache(query, key, context)
        return _PATHS[implementation](module, query, key, value, attention_mask, scaling, dropout, context, **kwargs)

    return attention_forward


eager_attention_forward = _attention("eager")


def auto_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    context: PositionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The Triton kernel where it is supported, else the layer's fast implementation in PyTorch. Returns no weights."""
    encodings = module.encodings
    if auto_kernel is not None:
        output = auto_kernel(module, query, key, value, attention_mask, scaling, dropout, context)
        if output is not None:
            return output, None
    rows, keys = query.shape[2], key.shape[2]
    if encodings.default == "sdpa" and attention_mask is None and 1 < rows < keys:
        # PyTorch's own causal mask aligns the rows to the beginning of the keys. (No ranges for an int.)
        offset = torch.full((), keys - rows, device=query.device)
        attention_mask = ranges_mask(1, rows, keys, offset, device=query.device)
    interface = ALL_ATTENTION_FUNCTIONS[encodings.default]
    return interface(module, query, key, value, attention_mask, scaling, dropout, context, **kwargs)


ALL_ATTENTION_FUNCTIONS = AttentionInterface()
# Local entries, since a process can have two copies of this file (the package and a checkpoint's remote code).
for _name in _PATHS:
    ALL_ATTENTION_FUNCTIONS[_name] = _attention(_name)
if triton_attention_forward is not None:
    ALL_ATTENTION_FUNCTIONS["triton"] = triton_attention_forward
ALL_ATTENTION_FUNCTIONS["auto"] = auto_attention_forward


def choose_implementation(config: Any, requested: str | None) -> str:
    """Returns the attention implementation of a model.

    Raises:
        ValueError: `requested` does not support the position encoding, or is not available.
    """
    supported = supported_implementations(config)
    if requested is None:
        return supported[0]
    family = requested.removeprefix("paged|")
    if "flash" in family:
        family = "flash_attention"
    # Paged attention cannot change cached keys, and has no bias.
    if family not in supported or (requested.startswith("paged|") and "flash_attention" not in supported):
        raise ValueError(
            # Transformers' wording, which its tests match.
            f'Specified `attn_implementation="{requested}"` is not supported for '
            f"position_encoding={config.position_encoding!r}. Allowed: {', '.join(map(repr, supported))}."
        )
    if requested == "triton":
        check_available(config, [name for name in supported if name != "triton"])
    return requested
