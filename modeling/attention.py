"""Attention implementations in PyTorch, their choice, and the refusal of those that an encoding cannot use.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, V value width.
"""

import inspect
from typing import Any

import torch
from torch import nn
from transformers.integrations.flex_attention import flex_attention_forward as stock_flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from .attention_mask import causal_mask, dense_mask, is_ranges
from .position_base import PositionContext
from .position_registry import (
    auto_kernel,
    blockwise_path,
    check_available,
    supported_implementations,
    triton_attention_forward,
)

# `auto` computes so few rows on a CPU, as in decoding, with PyTorch's attention even if there is a mask.
FEW_ROWS = 4


def repeat_heads(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeats key heads for the query heads that share them: (B, G, K, D) to (B, G * groups, K, D)."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


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
    """All weights in memory: the readable specification, and the one that returns weights."""
    encodings, kind = module.encodings, module.config.attention_weights
    groups = query.shape[1] // key.shape[1]
    logits = torch.matmul(query, repeat_heads(key, groups).transpose(2, 3)) * scaling
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
    return torch.matmul(weights, repeat_heads(value, groups)).transpose(1, 2).contiguous(), weights


def hard_weights(weights: torch.Tensor, *, straight_through: bool) -> torch.Tensor:
    """Hard attention: all weight on the key with the largest one, the oldest of several.

    The choice has no gradient: with `straight_through` it gets that of the soft weights, otherwise 0.
    """
    chosen = torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
    passed = weights if straight_through else weights * 0
    return chosen + passed - passed.detach()


def _sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    context: PositionContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' `sdpa`; a bias is materialised into the mask (B, H, Q, K).

    A mask of None means what it means to Transformers: one row sees all keys, several are causal and aligned to the
    beginning of the keys.
    """
    encodings = module.encodings
    rows, keys = query.shape[2], key.shape[2]
    wider = key.shape[-1] != value.shape[-1]
    if wider and rows == 1 and dropout == 0:
        # For one row, padding all cached values would take longer than the attention.
        return blockwise_path(module, query, key, value, mask, scaling, dropout, context)
    if encodings.hooks["bias"]:
        if mask is None:
            mask = query.new_ones(rows, keys, dtype=torch.bool).tril_(keys - 1 if rows == 1 else 0)[None, None]
        logits = _mask_logits(mask) if encodings.bias_reads_mask else _no_logits(query, key)
        bias = encodings.bias(logits, query, context, scaling).to(query.dtype)
        lowest = torch.finfo(query.dtype).min
        mask = torch.where(mask, bias, lowest) if mask.dtype == torch.bool else mask + bias
    padded = _pad_value(key, value)
    output, _ = stock_sdpa_attention_forward(
        module, query, key, padded, mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output[..., : value.shape[-1]], None


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
        if "position_bias" not in inspect.signature(stock_flex_attention_forward).parameters:
            raise ValueError(
                "attn_implementation='flex_attention' needs a newer transformers for an encoding with a bias; "
                "allowed here: 'blockwise', 'sdpa', 'eager'."
            )
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
            attention_mask: what the implementation's mask function made.
            scaling: the factor on q.k.
            dropout: the probability of dropping an attention weight; 0 outside training.
            context: the context of this layer.

        Returns:
            The output (B, Q, H, V), in the dtype of `query`, and from `eager` the weights (B, H, Q, K).
        """
        encodings, arguments = module.encodings, (attention_mask, context)
        if encodings.hooks["attend"]:
            settings = {"scaling": scaling, "dropout": dropout, "implementation": implementation}
            found = encodings.attend(query, key, value, *arguments, **settings)
            if found is not None:
                return found[0].transpose(1, 2).contiguous(), found[1]
        query, key = encodings.after_cache(query, key, context)
        return _PATHS[implementation](
            module,
            query,
            key,
            value,
            attention_mask,
            scaling,
            dropout,
            context,
            **kwargs,
        )

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
    chosen, rows = encodings.default, query.shape[2]
    # PyTorch's own causal mask aligns the rows to the beginning of the keys.
    chunk = attention_mask is None and 1 < rows < key.shape[2]
    if chosen == "sdpa" and (chunk or is_ranges(attention_mask)):
        if query.device.type == "cpu" and rows > FEW_ROWS:
            # With a mask, PyTorch's attention takes memory for 5 B Q K bytes on a CPU, and computes what is masked.
            chosen = "blockwise"
        elif attention_mask is None:
            attention_mask = causal_mask(rows, key.shape[2], query.device)[None, None]
        else:
            attention_mask = dense_mask(attention_mask, rows)
    interface = ALL_ATTENTION_FUNCTIONS[chosen]
    return interface(module, query, key, value, attention_mask, scaling, dropout, context, **kwargs)


ALL_ATTENTION_FUNCTIONS = AttentionInterface()
# Local entries: two copies of this file in one process (the package and a checkpoint) keep their own.
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
    # Paged attention keeps keys as they were when they entered the cache, and has no bias.
    if family not in supported or (requested.startswith("paged|") and "flash_attention" not in supported):
        raise ValueError(
            # Transformers' own words, by which its users and tests know the error.
            f'Specified `attn_implementation="{requested}"` is not supported for '
            f"position_encoding={config.position_encoding!r}. Allowed: {', '.join(map(repr, supported))}."
        )
    if requested == "triton":
        check_available(config, [name for name in supported if name != "triton"])
    return requested
