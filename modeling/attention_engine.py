"""Attention functions of engines, which they put into Transformers' own table.

vLLM and SGLang add a name, and keep keys and values themselves: the function gets those of the new tokens. DeepSpeed's
Ulysses replaces `sdpa` or flash attention: the function gathers the tokens that other processes have.

These functions get queries and keys after the position encodings. A function with the attribute `takes_context` is
called as those of `attention` are, and can serve every encoding: `vllm_attention` has one.

Axes: B batch, H query heads, Q query length, V value width.
"""

import sys
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TRANSFORMERS_FUNCTIONS

_USE = "Use 'none', 'absolute', 'sinusoidal', 'rope' or"
_STOCK = "transformers.integrations."
_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "auto", "blockwise", "triton")


def is_stock(function: Any) -> bool:
    """Returns True for Transformers' own attention functions, and for None."""
    return function is None or getattr(function, "__module__", _STOCK).startswith(_STOCK)


def engine_attention_forward(
    name: str, function: Any, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
    context: Any, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention by a function in Transformers' table, under this name. For the other arguments see `attention`."""
    encoding, encodings = layer.config.position_encoding, layer.encodings
    if encodings.default != "sdpa" or (encodings.hooks["after_cache"] and name in _IMPLEMENTATIONS):
        if name in _IMPLEMENTATIONS:
            raise ValueError(
                f"An engine replaced attn_implementation={name!r} (sequence parallelism does), which does not support "
                f"position_encoding={encoding!r} then. {_USE} train without it."
            )
        raise ValueError(f"attn_implementation={name!r} does not support position_encoding={encoding!r}.")
    for part in encodings.hooks["after_cache"]:
        query, key = part.after_cache(query, key, context)
    _check_cache(layer, name, query, key, options.get("attention_instances") or {})
    width = query.shape[-1]
    # Engines expect one width.
    padded = nn.functional.pad(value, (0, width - value.shape[-1])) if value.shape[-1] < width else value
    output, weights = function(layer, query, key, padded, mask, **options)
    # Some return (B * Q, H * V).
    output = output.reshape(query.shape[0], query.shape[2], query.shape[1], -1)
    return output[..., : value.shape[-1]], weights


def _check_cache(module: Any, name: str, query: torch.Tensor, key: torch.Tensor, layers: dict) -> None:
    """Raises ValueError if an engine's cache does not fit; the engine would reshape queries and keys unchecked."""
    # vLLM puts its layer into the module; older versions and SGLang give all layers to the call.
    layer = getattr(module, "attn", layers.get(module.layer_idx))
    given = {"query heads": query.shape[1], "key heads": key.shape[1], "channels of a head": query.shape[-1]}
    # The names that vLLM and SGLang have for them.
    names = (("num_heads", "tp_q_head_num"), ("num_kv_heads", "tp_k_head_num"), ("head_size", "head_dim"))
    for (what, number), (one, other) in zip(given.items(), names):
        kept = getattr(layer, one, getattr(layer, other, number))
        if kept != number:
            raise ValueError(
                f"The cache of attn_implementation={name!r} is for {kept} {what}; position_encoding="
                f"{module.config.position_encoding!r} of this model has {number}. (Engines cannot split the heads of "
                "the GPT-2 family between devices.)"
            )


def accepts_engine(config: Any, name: str, supported: list[str], max_length: int | None) -> bool:
    """Returns whether `name` is one that an engine added; raises ValueError if it is not supported.

    `supported` are the implementations and `max_length` the longest sequence that support the configuration.
    """
    known = name in _IMPLEMENTATIONS or "flash" in name or name.startswith("paged|")
    if known or name not in TRANSFORMERS_FUNCTIONS:
        return False
    encoding = config.position_encoding
    if getattr(TRANSFORMERS_FUNCTIONS[name], "takes_context", False):
        # It checks what it supports itself.
        return True
    # An engine that keeps keys itself needs no masks, and keeps keys of the width of a head.
    widened = "sdpa" in supported and "blockwise" not in supported and name in AttentionMaskInterface()
    if "flash_attention_2" not in supported and not widened:
        setting = "" if config.attention_weights == "softmax" else f"attention_weights={config.attention_weights!r}, "
        if name == "vllm":
            raise ValueError(
                f"{setting}position_encoding={encoding!r} needs the package whatwhere beside vLLM: run `pip install .` "
                "in a clone of its repository."
            )
        raise ValueError(
            f"attn_implementation={name!r} gives an engine queries, keys and values of a head's width only; {setting}"
            f"position_encoding={encoding!r} needs more. {_USE} generate()."
        )
    reason = batch_dependence(config)
    if reason:
        raise ValueError(
            f"{reason} (position_encoding={encoding!r}) does not work with attn_implementation={name!r}: keys would "
            "depend on other tokens of the engine's batch. Use generate()."
        )
    # An engine ends if a request fails in the forward pass.
    current = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", lambda: None)()
    length = getattr(getattr(current, "model_config", None), "max_model_len", None)
    if length and max_length and length > max_length:
        raise ValueError(
            f"max_model_len={length} is longer than position_encoding={encoding!r} supports ({max_length} tokens)."
        )
    return True


def batch_dependence(config: Any) -> str | None:
    """Returns the setting by which a key, as an engine keeps it, depends on other tokens of a batch, or None."""
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope_type in ("dynamic", "longrope"):
        return f"rope_type={rope_type!r}"
    return "key_value_shift=True" if config.key_value_shift else None
