"""Arguments of the forward passes: the cache under both of its names, and keywords that must not be ignored.

Transformers 5.24 renamed `past_key_values` to `cache`, in calls and in outputs. Forward passes here take both names in
every version. Other keywords are passed on to the attention functions, as in Transformers. A keyword whose name stands
for a mask, positions or a cache in other models would have no effect here, and is an error; so is a misspelt one.
"""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import TransformersKwargs

from .attention_choice import supported_implementations
from .attention_mask import readable

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
# Parts of names that other models, engines and older versions give to masks, positions, caches and the like.
_MEANINGFUL = (
    *("attn", "bias", "cache", "decoder", "document", "encoder", "kv", "mask", "past", "position"),
    *("segment", "seq", "softcap", "softmax", "window"),
)
# Where documents begin that are packed in one row, and what belongs to it.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def takes_cache(forward: Callable) -> Callable:
    """Lets a forward pass with the argument `cache` take it as `past_key_values` too; its signature has one name."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        old = kwargs.pop("past_key_values", None)
        if old is not None:
            kwargs["cache"] = one_cache(kwargs.get("cache"), old)
        return forward(*args, **kwargs)

    shown = [p.replace(name=CACHE) if name == "cache" else p for name, p in signature.parameters.items()]
    # Not of `wrapped` itself: compilation ahead of time, as in vLLM, binds arguments to the signature of its code.
    forward.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return wrapped


class CachedLayer(GradientCheckpointingLayer):
    """A decoder layer that takes the cache under both names; gradient checkpointing finds it under the version's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in _NAMES if kwargs.get(name) is not None]
        if given:
            kwargs[CACHE] = given[0] if len(given) == 1 else one_cache(*given)
        return super().__call__(*args, **kwargs)


def one_cache(cache: Any, old: Any) -> Any:
    """Returns the cache of a call with both names: PEFT's prefix tuning gives a filled one beside an empty one."""
    if cache is None or cache is old:
        return old
    filled = [one for one in (cache, old) if one.get_seq_length()]
    if len(filled) > 1:
        raise ValueError("cache and past_key_values are two names of one argument: give one of them.")
    return filled[0] if filled else cache


def check_keywords(config: Any, kwargs: dict[str, Any], mask: Any, positions: Any, cache: Any) -> None:
    """Raises ValueError for further keywords of a forward pass that would be ignored although they have a meaning."""
    for name, value in kwargs.items():
        if value is None or name in _ARGUMENTS or name in _PACKED or name in TransformersKwargs.__optional_keys__:
            continue
        if isinstance(value, (Cache, PagedAttentionCache)) or any(part in name for part in _MEANINGFUL):
            takes = ", ".join(one for one in _ARGUMENTS if one not in _NAMES or one == CACHE)
            raise ValueError(f"{name}={_shown(value)} has no effect: the model does not take it. It takes {takes}.")
        if near := _nearest(name):
            raise ValueError(f"{name}={_shown(value)} has no effect. Did you mean {near!r}?")
    if mask is not None and mask.ndim == 4:
        return
    if kwargs.get("is_causal") is False:
        plain = "blockwise" not in (supported := supported_implementations(config)) and "sdpa" in supported
        if not plain or config._attn_implementation in ("auto", "blockwise", "eager", "triton"):
            use = "attn_implementation='sdpa' or a" if plain else "a"
            raise ValueError(
                f"is_causal=False is not supported for position_encoding={config.position_encoding!r} with "
                f"attn_implementation={config._attn_implementation!r}. Use {use} 4D attention_mask."
            )
    if not isinstance(cache, PagedAttentionCache):
        _check_packed(kwargs, mask, positions, cache)


def _check_packed(kwargs: dict[str, Any], mask: Any, positions: Any, cache: Any) -> None:
    """Raises ValueError if keywords separate packed documents that `position_ids` do not: only these have an effect."""
    name = next((name for name in _PACKED if kwargs.get(name) is not None), None)
    if name is None or not readable(kwargs[name]):
        return
    separate = mask is None and positions is not None
    if cache is not None:
        separate &= isinstance(cache, DynamicCache) and cache.get_seq_length() == 0
    if separate:
        ends, flat = kwargs[name], positions.flatten()
        first = ends[1:-1].long() if ends.ndim == 1 else (ends.flatten().diff() != 0).nonzero().flatten() + 1
        first = first[(first > 0) & (first < len(flat))]
        separate = bool((flat[first] != flat[first - 1] + 1).all())
    if not separate:
        raise ValueError(
            f"{name}={_shown(kwargs[name])} does not separate packed documents by itself: give position_ids that start "
            "again at 0 in each document, no attention_mask, and no filled cache."
        )


@torch.compiler.assume_constant_result
def _nearest(name: str) -> str | None:
    names = [*_ARGUMENTS, *TransformersKwargs.__optional_keys__]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.83)), None)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of the shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
