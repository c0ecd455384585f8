"""Arguments of the forward passes: the cache under both of its names, and keywords that must not be ignored.

Transformers 5.24 renamed `past_key_values` to `cache`, in calls and in outputs. Forward passes here take both names in
every version. Their other keywords are passed on to attention functions, as in Transformers: one that would change the
result there, but has no effect here, is an error.
"""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import TransformersKwargs

from .position_registry import supported_implementations

# The name of the cache in the installed version.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
_NAMES = ("cache", "past_key_values")
_ARGUMENTS = (
    *_NAMES,
    "attention_mask",
    "input_ids",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "position_ids",
    "token_type_ids",
    "use_cache",
)
# Keywords that have a meaning in other models or in older versions, and what to use instead.
_REFUSED = {
    **dict.fromkeys(
        ("cache_params", "layer_past", "mems", "past", "past_key_value", "state"), f"the cache is {CACHE!r}"
    ),
    "attention_bias": "add it to a 4D attention_mask",
    "cache_position": "positions are position_ids, and the cache knows its own length",
    "decoder_input_ids": "the models are decoders: use input_ids",
    "encoder_attention_mask": "the models have no cross-attention",
    "encoder_hidden_states": "the models have no cross-attention",
    "head_mask": "heads cannot be masked",
    "padding_mask": "use attention_mask",
    "position_embeddings": "positions are position_ids",
    "position_bias": "add it to a 4D attention_mask",
}
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def takes_cache(forward: Callable) -> Callable:
    """Lets a forward pass with the argument `cache` take it as `past_key_values` too; its signature has one name."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        old = kwargs.pop("past_key_values", None)
        if old is not None:
            kwargs["cache"] = _one_of(kwargs.get("cache"), old)
        return forward(*args, **kwargs)

    shown = [p.replace(name=CACHE) if name == "cache" else p for name, p in signature.parameters.items()]
    wrapped.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return wrapped


class CachedLayer(GradientCheckpointingLayer):
    """A decoder layer that takes the cache under both names; gradient checkpointing finds it under the version's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in _NAMES if kwargs.get(name) is not None]
        if given:
            kwargs[CACHE] = given[0] if len(given) == 1 else _one_of(*given)
        return super().__call__(*args, **kwargs)


def _one_of(cache: Any, old: Any) -> Any:
    """Returns the cache of a call with both names: PEFT's prefix tuning gives a filled one beside an empty one."""
    if cache is None or cache is old:
        return old
    filled = [one for one in (cache, old) if one.get_seq_length()]
    if len(filled) > 1:
        raise ValueError("cache and past_key_values are two names of one argument: give one of them.")
    return filled[0] if filled else cache


def check_keywords(config: Any, kwargs: dict[str, Any], attention_mask: Any, position_ids: Any) -> None:
    """Raises ValueError for further keywords of a forward pass that would be ignored although they have a meaning."""
    for name, value in kwargs.items():
        if value is None or name in _ARGUMENTS or name in TransformersKwargs.__optional_keys__:
            continue
        if name in _REFUSED:
            raise ValueError(f"{name}={_shown(value)} has no effect: {_REFUSED[name]}. It must be None.")
        if isinstance(value, (Cache, PagedAttentionCache)):
            raise ValueError(f"{name}={_shown(value)} is a cache, and has no effect: give it as {CACHE}.")
        if not torch.compiler.is_compiling() and (near := _nearest(name)):
            raise ValueError(f"{name}={_shown(value)} has no effect. Did you mean {near!r}?")
    dense = attention_mask is not None and attention_mask.ndim == 4
    if kwargs.get("is_causal") is False and not dense:
        plain = "blockwise" not in (supported := supported_implementations(config)) and "sdpa" in supported
        if not plain or config._attn_implementation in ("auto", "blockwise", "eager", "triton"):
            use = "attn_implementation='sdpa' or a" if plain else "a"
            raise ValueError(
                f"is_causal=False is not supported for position_encoding={config.position_encoding!r} with "
                f"attn_implementation={config._attn_implementation!r}. Use {use} 4D attention_mask."
            )
    packed = [name for name in _PACKED if kwargs.get(name) is not None]
    if packed and not dense and (attention_mask is not None or position_ids is None):
        raise ValueError(
            f"{packed[0]}={_shown(kwargs[packed[0]])} alone does not separate packed documents: give position_ids that "
            "start again at 0 in each document, and no attention_mask."
        )


@functools.cache
def _nearest(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.85)), None)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of the shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
