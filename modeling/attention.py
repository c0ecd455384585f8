"""The attention functions of a layer: `attend` for all implementations in PyTorch, `auto`, and `eager`.

Each is called as `function(layer, query, key, value, mask, context, **options)`, and returns the output and the weights
or None:

    layer: the attention layer, with `encodings` and `config`.
    query: (B, H, Q, D). key: (B, G, K, D), as cached. value: (B, G, K, V).
    mask: from the implementation's mask function. context: the context of this layer.
    options: `scaling`, the factor on q.k; `dropout`, the probability of dropping an attention weight, 0 outside
        training; others are for Transformers' own functions.
    output: (B, Q, H, V), in the dtype of `query`. weights: (B, H, Q, K), from `eager` only.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim, V value width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv

from .attention_mask import key_ranges_mask


def attend(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any,
    *, implementation: str, function: Callable[..., Any], **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention in PyTorch: the encodings' `attend`, else their `after_cache`, then the implementation's function."""
    hooks = layer.encodings.hooks
    for part in hooks["attend"]:
        settings = {"scaling": options["scaling"], "dropout": options["dropout"], "implementation": implementation}
        found = part.attend(query, key, value, mask, context, **settings)
        if found is not None:
            return found[0].transpose(1, 2).contiguous(), found[1]
    for part in hooks["after_cache"]:
        query, key = part.after_cache(query, key, context)
    return function(layer, query, key, value, mask, context, **options)


def auto_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any,
    *, kernel: Callable[..., torch.Tensor | None] | None, implementation: str, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`auto`: the Triton kernel of the layer where there is one that supports the call, else `attend`; no weights."""
    if kernel is not None and _may_have_kernels(query.device):
        output = kernel(layer, query, key, value, mask, context, options)
        if output is not None:
            return output, None
    rows, keys = query.shape[2], key.shape[2]
    if implementation == "sdpa" and mask is None and 1 < rows < keys:
        # PyTorch's own causal mask aligns the rows to the beginning of the keys. With an int as offset,
        # `key_ranges_mask` would return None.
        offset = torch.full((), keys - rows, device=query.device)
        mask = key_ranges_mask(1, rows, keys, offset, device=query.device)
    return attend(layer, query, key, value, mask, context, implementation=implementation, **options)


def _may_have_kernels(device: torch.device) -> bool:
    return device.type != "cpu"


def eager_attention_forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reference implementation with all weights in memory, for `attend`; the only one that returns weights."""
    encodings, kind, scaling = layer.encodings, layer.config.attention_weights, options["scaling"]
    groups = query.shape[1] // key.shape[1]
    logits = torch.matmul(query, repeat_kv(key, groups).transpose(2, 3)) * scaling
    if encodings.hooks["bias"]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is None:
        rows, keys = query.shape[2], key.shape[2]
        mask = query.new_ones(rows, keys, dtype=torch.bool).tril(keys - rows)
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
    chosen = torch.zeros_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 1.0)
    passed = weights if straight_through else weights * 0
    return chosen + passed - passed.detach()
