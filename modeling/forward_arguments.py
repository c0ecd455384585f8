"""Arguments of the forward passes: the cache under both of its names, and keywords that must not be ignored.

Transformers 5.24 renamed `past_key_values` to `cache`, in calls and in outputs. Forward passes here take both names in
every version. Other keywords are passed on to the attention functions, as in Transformers, where most mean nothing.
Three kinds would change the result elsewhere and have no effect here; they are errors: the names in `_ELSEWHERE`, a
cache under any other name, and a misspelt argument.
"""

import difflib
import functools
import inspect
import warnings
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
_CACHE_NAMES = ("cache", "past_key_values")
_ARGUMENTS = (
    *_CACHE_NAMES,
    "attention_mask",
    "input_ids",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "position_ids",
    "token_type_ids",
    "use_cache",
)
# What other models, engines and older versions of Transformers call masks, positions, caches and documents.
_ELSEWHERE = frozenset(
    [
        "attention_bias",
        "attn_bias",
        "attn_mask",
        "attn_mask_startend_row_indices",
        "block_mask",
        "causal_mask",
        "cross_attention_mask",
        "cross_attn_head_mask",
        "decoder_attention_mask",
        "decoder_head_mask",
        "encoder_attention_mask",
        "global_attention_mask",
        "head_mask",
        "input_mask",
        "key_padding_mask",
        "loss_mask",
        "mask",
        "mask_mod",
        "masks",
        "pad_mask",
        "padding_mask",
        "perm_mask",
        "score_mod",
        "sliding_window",
        "softcap",
        "softmax_scale",
        "window_size",
        "cache_position",
        "decoder_position_ids",
        "input_pos",
        "pos_ids",
        "position",
        "position_bias",
        "position_embeddings",
        "positions",
        "relative_position_bias",
        "rope_deltas",
        "start_pos",
        "cache_params",
        "caches",
        "decoder_cache",
        "decoder_input_ids",
        "decoder_inputs_embeds",
        "encoder_cache",
        "encoder_hidden_states",
        "encoder_outputs",
        "inference_params",
        "kv_cache",
        "kv_caches",
        "layer_past",
        "mems",
        "past",
        "past_key_value",
        "past_key_values_length",
        "past_kv",
        "past_length",
        "shared_kv_states",
        "cu_doc_lens",
        "cu_seq_lens",
        "cu_seqlens",
        "cu_seqlens_k",
        "cu_seqlens_q",
        "doc_ids",
        "document_id",
        "document_ids",
        "document_mask",
        "max_seqlen_k",
        "max_seqlen_q",
        "segment_ids",
        "seq_lens",
        "seqlens",
        "sequence_id",
        "sequence_ids",
    ]
)
# Where documents begin that are packed in one row, and what belongs to it.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def takes_cache(forward: Callable) -> Callable:
    """Lets a forward pass with the argument `cache` take it as `past_key_values` too; its signature has one name."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if CACHE == "cache" and "past_key_values" in kwargs and not torch.compiler.is_compiling():
            # As Transformers' own models, which also warn in versions that call it `cache`.
            warnings.warn(
                "`past_key_values` is deprecated and will be removed in version 5.40.0 for "
                f"`{type(args[0]).__name__}.{forward.__name__}`. Use `cache` instead.",
                FutureWarning,
                stacklevel=2,
            )
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
        given = [kwargs.pop(name) for name in _CACHE_NAMES if kwargs.get(name) is not None]
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
        if isinstance(value, (Cache, PagedAttentionCache)) or name in _ELSEWHERE:
            takes = ", ".join(one for one in _ARGUMENTS if one not in _CACHE_NAMES or one == CACHE)
            raise ValueError(f"{name}={_shown(value)} has no effect: the model does not take it. It takes {takes}.")
        if near := _nearest_argument(name):
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
def _nearest_argument(name: str) -> str | None:
    # `max_length` is not a misspelt `max_length_q`.
    names = [*_ARGUMENTS, *(one for one in TransformersKwargs.__optional_keys__ if not one.startswith("max_length"))]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.83)), None)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of the shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
