"""Attention implementations in PyTorch, and the selection of the implementation for an encoding.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, V value width.
"""

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import AttentionInterface

from .position_registry import (
    AttentionFunctions,
    accepts_engine,
    auto_attention,
    blockwise_path,
    check_available,
    flex_path,
    max_length,
    ranges_path,
    sdpa_path,
    supported_implementations,
    triton_attention_forward,
)


def _eager(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reference implementation with all weights in memory; the only one that returns weights."""
    encodings, kind, scaling = module.encodings, module.config.attention_weights, options["scaling"]
    groups = query.shape[1] // key.shape[1]
    logits = torch.matmul(query, repeat_kv(key, groups).transpose(2, 3)) * scaling
    if encodings.hooks["bias"]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is None:
        rows, keys = query.shape[2], key.shape[2]
        mask = query.new_ones(rows, keys, dtype=torch.bool).tril_(keys - rows)
    lowest = torch.finfo(logits.dtype).min
    logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
    logits = logits + encodings.bias(logits, query, context, scaling)
    weights = nn.functional.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if kind != "softmax":
        weights = hard_weights(weights, straight_through=kind == "straight_through")
    weights = nn.functional.dropout(weights.to(query.dtype), p=options["dropout"])
    return torch.matmul(weights, repeat_kv(value, groups)).transpose(1, 2).contiguous(), weights


def hard_weights(weights: torch.Tensor, *, straight_through: bool) -> torch.Tensor:
    """Hard attention: all weight on the key with the largest one, the oldest of several.

    The gradient is that of the softmax weights with `straight_through`, else 0.
    """
    chosen = torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
    passed = weights if straight_through else weights * 0
    return chosen + passed - passed.detach()


_PATHS = {"eager": _eager, "sdpa": sdpa_path, "flex_attention": flex_path, "blockwise": blockwise_path}


def _attention(implementation: str, path: Any) -> Any:
    """Returns the attention function of an implementation in PyTorch, as Transformers calls it."""

    def attention_forward(
        layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one layer.

        Args:
            layer: the attention layer, with `encodings` and `config`.
            query: (B, H, Q, D). key: (B, G, K, D), as cached. value: (B, G, K, V).
            mask: from the implementation's mask function. context: the context of this layer.
            options: `scaling`, the factor on q.k; `dropout`, the probability of dropping an attention weight, 0 outside
                training; others are for Transformers' own functions.

        Returns:
            The output (B, Q, H, V), in the dtype of `query`, and from `eager` the weights (B, H, Q, K).
        """
        encodings = layer.encodings
        if encodings.hooks["attend"]:
            settings = {"scaling": options["scaling"], "dropout": options["dropout"], "implementation": implementation}
            found = encodings.attend(query, key, value, mask, context, **settings)
            if found is not None:
                return found[0].transpose(1, 2).contiguous(), found[1]
        query, key = encodings.after_cache(query, key, context)
        return path(layer, query, key, value, mask, context=context, **options)

    return attention_forward


eager_attention_forward = _attention("eager", _eager)

ALL_ATTENTION_FUNCTIONS = AttentionInterface() if AttentionFunctions is None else AttentionFunctions()
# Local entries, since a process can have two copies of this file (the package and a checkpoint's remote code).
for _name, _path in _PATHS.items():
    if _path is not None:
        ALL_ATTENTION_FUNCTIONS[_name] = _attention(_name, _path)
if triton_attention_forward is not None:
    ALL_ATTENTION_FUNCTIONS["triton"] = triton_attention_forward
if auto_attention is not None:
    _blockwise = ALL_ATTENTION_FUNCTIONS.get("blockwise")
    ALL_ATTENTION_FUNCTIONS["auto"] = auto_attention(_attention("sdpa", ranges_path(sdpa_path)), _blockwise)


def choose_implementation(config: Any, requested: str | None) -> str:
    """Returns the attention implementation of a model; raises ValueError if `requested` is not supported."""
    supported = supported_implementations(config)
    if requested is None:
        return supported[0]
    if accepts_engine is not None and accepts_engine(config, requested, supported, max_length(config)):
        return requested
    family = requested.removeprefix("paged|")
    if "flash" in family:
        family = "flash_attention"
    # Paged attention cannot change cached keys, and has no bias.
    if family not in supported or (requested.startswith("paged|") and "flash_attention" not in supported):
        raise ValueError(
            # Transformers' wording, which its tests match.
            f'Specified `attn_implementation="{requested}"` is not supported for position_encoding='
            f"{config.position_encoding!r} with these parameters. Allowed: {', '.join(map(repr, supported))}."
        )
    if requested == "triton":
        check_available(config, [name for name in supported if name != "triton"])
    return requested
