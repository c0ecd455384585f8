"""Attention functions of engines, which they put into Transformers' own table.

vLLM and SGLang add a name, and keep keys and values themselves: the function gets those of the new tokens. DeepSpeed's
Ulysses replaces `sdpa` or flash attention: the function gathers the tokens that other processes have.

Axes: B batch, H query heads, Q query length, V value width.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

_USE = "Use 'none', 'absolute', 'sinusoidal', 'rope' or"
_STOCK = "transformers.integrations."
_NAMES = ("eager", "sdpa", "flex_attention", "auto", "blockwise", "triton")


class AttentionFunctions(AttentionInterface):
    """Own functions by name, and those in Transformers' table; of a name in both, the one that an engine put there."""

    def __getitem__(self, name: str) -> Any:
        given = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name, AttentionInterface._global_mapping.get(name))
        if name in self._local_mapping and getattr(given, "__module__", _STOCK).startswith(_STOCK):
            return self._local_mapping[name]
        return _foreign(name, ALL_ATTENTION_FUNCTIONS[name])


def _foreign(name: str, function: Any) -> Any:
    """Returns a function in Transformers' table with the interface of `attention`."""

    def attention_forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        encoding, encodings = module.config.position_encoding, module.encodings
        if encodings.default != "sdpa" or (encodings.hooks["after_cache"] and name in _NAMES):
            raise ValueError(
                f"An engine replaced attn_implementation={name!r} (sequence parallelism does), which does not support "
                f"position_encoding={encoding!r} then. {_USE} train without it."
            )
        query, key = encodings.after_cache(query, key, context)
        width = query.shape[-1]
        layer = (kwargs.get("attention_instances") or {}).get(module.layer_idx)
        # The names that vLLM and SGLang have for the width of the keys and values that they keep.
        size = getattr(layer, "head_size", getattr(layer, "head_dim", width))
        if size != width:
            raise ValueError(
                f"position_encoding={encoding!r} needs {width} channels of a head in the cache of attn_implementation="
                f"{name!r}, which has {size}: set its head size to {width}."
            )
        # Engines expect one width.
        padded = nn.functional.pad(value, (0, width - value.shape[-1])) if value.shape[-1] < width else value
        output, weights = function(module, query, key, padded, mask, **kwargs)
        # Some return (B * Q, H * V).
        output = output.reshape(query.shape[0], query.shape[2], query.shape[1], -1)
        return output[..., : value.shape[-1]], weights

    return attention_forward


def accepts_engine(config: Any, name: str, supported: list[str]) -> bool:
    """Returns whether `name` is one that an engine added; raises ValueError if it is not supported."""
    known = name in _NAMES or "flash" in name or name.startswith("paged|")
    if known or name not in ALL_ATTENTION_FUNCTIONS:
        return False
    if "sdpa" not in supported or "blockwise" in supported:
        raise ValueError(
            f"attn_implementation={name!r} gives an engine queries, keys and values only; position_encoding="
            f"{config.position_encoding!r} needs more. {_USE} 'pope', or generate()."
        )
    reason = batch_dependence(config)
    if reason:
        raise ValueError(
            f"{reason} (position_encoding={config.position_encoding!r}) does not work with attn_implementation="
            f"{name!r}: keys would depend on other tokens of the engine's batch. Use generate()."
        )
    return True


def batch_dependence(config: Any) -> str | None:
    """Returns the setting by which a key, as an engine keeps it, depends on other tokens of a batch, or None."""
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope_type in ("dynamic", "longrope"):
        return f"rope_type={rope_type!r}"
    return "key_value_shift=True" if config.key_value_shift else None
