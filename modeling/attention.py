"""Attention implementations: the eager reference, the choice and refusal of an implementation, mask registration.

Axes: B batch, H query heads, G key heads (H % G == 0), Q query length, K key length, D head dim.
"""

import inspect
from typing import Any

import torch
from torch import nn
from transformers.integrations.flex_attention import flex_attention_forward as stock_flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

from .attention_blockwise import blockwise_attention
from .attention_triton import (
    check_available,
    dense_mask,
    is_limits,
    kernel_attention_forward,
    limits_mask,
    obstacle,
    runs_by_default,
    segments,
    triton_attention_forward,
)
from .position_encoding import PositionContext
from .position_encodings import pytorch_implementation, supported_implementations

logger = logging.get_logger(__name__)


def repeat_heads(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeats key heads for the query heads that share them: (B, G, K, D) to (B, G * groups, K, D)."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def eager_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_context: PositionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with all weights in memory: the readable specification, and the one that returns weights.

    Args:
        module: the attention layer; `module.position_encoding` gives the biases.
        query: (B, H, Q, D). key: (B, G, K, D). value: (B, G, K, Dv).
        attention_mask: additive float mask (B, 1, Q, K), or boolean with True for visible, or None for causal.
        scaling: the factor on q.k.
        dropout: the probability of dropping an attention weight.
        position_context: what the model computed once for all layers.

    Returns:
        The output (B, Q, H, Dv) and the weights (B, H, Q, K), in the dtype of `query`.
    """
    encoding = module.position_encoding
    if encoding.replacements:
        return _attend_instead(module, query, key, value, attention_mask, scaling, dropout, position_context, False)
    groups = query.shape[1] // key.shape[1]
    logits = torch.matmul(query, repeat_heads(key, groups).transpose(2, 3)) * scaling
    if encoding.biases:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if attention_mask is None:
        attention_mask = causal_mask(query.shape[2], key.shape[2], query.device)
    if attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    else:
        logits = logits + attention_mask
    if encoding.biases:
        logits = logits + encoding.bias(logits, query, position_context, scaling)
    weights = nn.functional.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if encoding.attention_weights != "softmax":
        weights = hard_weights(weights, straight_through=encoding.attention_weights == "straight_through")
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    output = torch.matmul(weights, repeat_heads(value, groups))
    return output.transpose(1, 2).contiguous(), weights


def hard_weights(weights: torch.Tensor, *, straight_through: bool) -> torch.Tensor:
    """Hard attention: all weight on the key with the largest one, the oldest of several.

    The choice has no gradient: with `straight_through` it gets that of the soft weights, otherwise 0.
    """
    chosen = torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
    passed = weights if straight_through else weights * 0
    return chosen + passed - passed.detach()


def _attend_instead(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    position_context: PositionContext | None,
    blockwise: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `attend` of the layer's encoding does in place of softmax attention: output (B, Q, H, V) and weights."""
    output, weights = module.position_encoding.attend(
        query,
        key,
        value,
        attention_mask,
        position_context,
        scaling=scaling,
        dropout=dropout if module.training else 0.0,
        blockwise=blockwise,
    )
    return output.transpose(1, 2).contiguous(), weights


def causal_mask(query_length: int, key_length: int, device: torch.device) -> torch.Tensor:
    """Returns a boolean (Q, K) mask, True where visible; queries are aligned to the end of the keys."""
    return torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril(key_length - query_length)


def blockwise_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_context: PositionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in blocks of queries, with memory O(Q * block): see `attention_blockwise`. Returns no weights."""
    if module.position_encoding.replacements:
        output, _ = _attend_instead(module, query, key, value, attention_mask, scaling, dropout, position_context, True)
        return output, None
    terms = module.position_encoding.block_terms(position_context, scaling)
    output = blockwise_attention(query, key, value, mask=attention_mask, scaling=scaling, terms=terms, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None


def _pad_value(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # PyTorch leaves its fused path when values are narrower than keys.
    width = key.shape[-1] - value.shape[-1]
    return torch.cat((value, value.new_zeros(*value.shape[:-1], width)), dim=-1) if width else value


def sdpa_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_context: PositionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' `sdpa`; a bias that needs no content logits is materialised into the mask (B, H, Q, K).

    A mask of None means what it means to Transformers: one row sees all keys, several are causal and aligned to the
    beginning of the keys.
    """
    encoding = module.position_encoding
    wider = key.shape[-1] != value.shape[-1]
    if wider and query.shape[2] == 1 and not module.training:
        # One row is no work for a fused kernel, but padding all cached values would be.
        return blockwise_attention_forward(module, query, key, value, attention_mask, scaling)
    if encoding.biases:
        if attention_mask is None:
            # Transformers makes no mask for one row, which sees all keys, and for rows aligned to the beginning of the
            # keys: where a static cache was empty, the keys after them are slots that hold nothing yet.
            rows, keys = query.shape[2], key.shape[2]
            diagonal = keys - 1 if rows == 1 else 0
            attention_mask = query.new_ones(rows, keys, dtype=torch.bool).tril_(diagonal)[None, None]
        logits = _mask_logits(attention_mask) if encoding.biases_from_mask else _no_logits(query, key)
        bias = encoding.bias(logits, query, position_context, scaling).to(query.dtype)
        if attention_mask.dtype == torch.bool:
            attention_mask = torch.where(attention_mask, bias, torch.finfo(query.dtype).min)
        else:
            attention_mask = attention_mask + bias
    padded = _pad_value(key, value) if wider else value
    output, _ = stock_sdpa_attention_forward(
        module, query, key, padded, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output[..., : value.shape[-1]] if wider else output, None


def flex_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    position_context: PositionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Transformers' `flex_attention`; a bias is materialised (B, H, Q, K) and added by its score function."""
    encoding = module.position_encoding
    if encoding.biases:
        if "position_bias" not in inspect.signature(stock_flex_attention_forward).parameters:
            raise ValueError(
                "attn_implementation='flex_attention' needs a newer transformers for an encoding with a bias; "
                "allowed here: 'blockwise', 'sdpa', 'eager'."
            )
        bias = encoding.bias(_no_logits(query, key), query, position_context, scaling).to(query.dtype)
        # Broadcast dimensions would be read out of bounds.
        kwargs["position_bias"] = bias.expand(query.shape[0], query.shape[1], -1, -1).contiguous()
    output, weights = stock_flex_attention_forward(
        module, query, key, _pad_value(key, value), attention_mask, scaling=scaling, **kwargs
    )
    return output[..., : value.shape[-1]], weights


def _mask_logits(attention_mask: torch.Tensor) -> torch.Tensor:
    """Logits (B, 1 or H, Q, K), float32, from which an encoding that `biases_from_mask` reads what is masked."""
    if attention_mask.dtype != torch.bool:
        return attention_mask.float()
    masked = torch.finfo(torch.float32).min
    return torch.zeros(attention_mask.shape, device=attention_mask.device).masked_fill_(~attention_mask, masked)


def _no_logits(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    # Only encodings whose bias ignores the content logits list a stock implementation; they read its shape.
    return query.new_empty(0).expand(query.shape[0], query.shape[1], query.shape[2], 0)


def _is_filled(q_length: int, kv_length: int, q_offset: int | torch.Tensor, kv_offset: int) -> bool:
    """Returns True if the rows are at the end of the keys; a static cache counts by a tensor, and has empty slots."""
    return isinstance(q_offset, int) and q_offset + q_length == kv_length and kv_offset == 0


def blockwise_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that `blockwise_attention` reads; never (Q, K) large when every key slot is filled.

    Returns:
        None for plain causal attention, int32 (B, K) with the document of every slot and -1 for padding, or, with a
        static cache, a boolean (B, 1, Q, K) mask.
    """
    if use_vmap or not _is_filled(q_length, kv_length, q_offset, kv_offset):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
    packed = mask_function is not causal_mask_function
    if attention_mask is None and not packed:
        return None
    segments = torch.zeros(batch_size, kv_length, dtype=torch.int32, device=device)
    if packed and kv_length > 1:
        # Documents are contiguous: a slot that does not see its neighbour begins a new one.
        slots = torch.arange(kv_length, device=device)
        batch = torch.arange(batch_size, device=device)[:, None]
        same = mask_function(batch, torch.zeros_like(batch), slots[None, 1:], slots[None, :-1])
        segments[:, 1:] = (~same.expand(batch_size, -1)).cumsum(-1)
    if attention_mask is not None:
        segments = segments.masked_fill(~attention_mask[:, :kv_length].bool(), -1)
    return segments


def auto_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_context: PositionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The Triton kernel of the encoding for a call on a GPU that it serves, else the encoding's PyTorch path.

    Keys come as they are in the cache; for the rest see `eager_attention_forward`. Returns no weights.
    """
    encoding = module.position_encoding
    if runs_by_default(query.device):
        problem = obstacle(module, query, attention_mask, dropout)
        if problem is None:
            return kernel_attention_forward(module, query, key, value, attention_mask, scaling, position_context)
        if dropout > 0 and not torch.compiler.is_compiling():
            what, number, allowed = problem
            logger.warning_once(
                f"attn_implementation='auto' takes {encoding.pytorch_implementation!r}: the kernels do not serve "
                f"{what}={number}; allowed: {allowed}."
            )
        # Elsewhere the mask is that of the PyTorch path already, None too: rows may be at the beginning of the keys.
        attention_mask = pytorch_mask(attention_mask, query, key, encoding.pytorch_implementation)
    if encoding.cached_rotations:
        query, key = encoding.rotate_cached(query, key, position_context)
    segmented = attention_mask is not None and attention_mask.ndim == 2
    interface = PYTORCH_PATHS["blockwise" if segmented else encoding.pytorch_implementation][0]
    return interface(module, query, key, value, attention_mask, scaling, dropout, position_context, **kwargs)


def pytorch_mask(attention_mask: Any, query: torch.Tensor, key: torch.Tensor, implementation: str) -> Any:
    """Returns what a PyTorch path reads in place of the kernels' mask; other masks as they are.

    Args:
        attention_mask: limits, None for causal with the rows at the end of the keys, or a user's 4D mask.
        query: (B, H, Q, D). key: (B, G, K, D).
        implementation: "blockwise" or "sdpa".
    """
    query_length, key_length = query.shape[2], key.shape[2]
    if is_limits(attention_mask):
        if implementation == "blockwise" and query_length == key_length:
            return segments(attention_mask, query_length)
        return dense_mask(attention_mask, query_length)
    if attention_mask is None and implementation == "sdpa" and 1 < query_length < key_length:
        # PyTorch's own causal mask aligns the rows to the beginning of the keys.
        return causal_mask(query_length, key_length, query.device)[None, None]
    return attention_mask


def auto_mask(*, config: Any, device: torch.device | str = "cpu", **kwargs: Any) -> Any:
    """The mask of `auto_attention_forward`: the kernels' on a GPU that runs them, else that of the PyTorch path."""
    if runs_by_default(torch.device(device)) and not kwargs.get("use_vmap"):
        return limits_mask(device=device, **kwargs)
    return PYTORCH_PATHS[pytorch_implementation(config)][1](config=config, device=device, **kwargs)


def segments_or_sdpa_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of `sdpa` where that needs none, or can not do without; else the segments of `blockwise`.

    PyTorch's attention with a mask takes memory for 5 B Q K bytes on a CPU, and computes what is masked.

    Returns:
        None or bool (B, 1, Q, K) for `sdpa`; int32 (B, K) for `blockwise`.
    """
    geometry = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset, **kwargs}
    geometry |= {"mask_function": mask_function, "attention_mask": attention_mask, "use_vmap": use_vmap}
    if use_vmap or not _is_filled(q_length, kv_length, q_offset, kv_offset):
        return sdpa_mask(**geometry)
    if q_length in (1, kv_length) and mask_function is causal_mask_function and _hides_nothing(attention_mask):
        return None
    mask = blockwise_mask(**geometry)
    if mask is not None:
        return mask
    return torch.zeros(kwargs["batch_size"], kv_length, dtype=torch.int32, device=kwargs["device"])


def _hides_nothing(attention_mask: torch.Tensor | None) -> bool:
    """Returns True if a 2D mask is known to have no padding; what is compiled or traced must not ask for its values."""
    if attention_mask is None:
        return True
    unknown = torch.compiler.is_compiling() or torch.jit.is_tracing() or attention_mask.is_meta
    return not unknown and bool(attention_mask.all())


# The attention function and the mask function of what "auto" takes without kernels.
PYTORCH_PATHS: dict[str, tuple[Any, Any]] = {
    "sdpa": (sdpa_attention_forward, segments_or_sdpa_mask),
    "blockwise": (blockwise_attention_forward, blockwise_mask),
}

ALL_ATTENTION_FUNCTIONS = AttentionInterface()
# Local entries: two copies of this file in one process (the package and a checkpoint) keep their own.
ALL_ATTENTION_FUNCTIONS["blockwise"] = blockwise_attention_forward
ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
ALL_ATTENTION_FUNCTIONS["flex_attention"] = flex_attention_forward
ALL_ATTENTION_FUNCTIONS["triton"] = triton_attention_forward
ALL_ATTENTION_FUNCTIONS["auto"] = auto_attention_forward
# Transformers looks masks up globally; without an entry padding would be ignored.
AttentionMaskInterface.register("blockwise", blockwise_mask)
AttentionMaskInterface.register("triton", limits_mask)
AttentionMaskInterface.register("auto", auto_mask)


def choose_implementation(config: Any, requested: str | None) -> str:
    """Returns the attention implementation of a model.

    Raises:
        ValueError: `requested` does not serve the position encoding, or can not run here.
    """
    supported = supported_implementations(config)
    if requested is None:
        return supported[0]
    family = requested.removeprefix("paged|")
    if "flash" in family:
        family = "flash_attention"
    # Paged attention keeps keys as they were when they entered the cache, and knows no bias.
    if family not in supported or (requested.startswith("paged|") and "flash_attention" not in supported):
        raise ValueError(
            # Transformers' own words, by which its users and tests know the error.
            f'Specified `attn_implementation="{requested}"` is not supported: it does not serve '
            f"position_encoding={config.position_encoding!r}. "
            f"Allowed: {', '.join(map(repr, supported))}."
        )
    if requested == "triton":
        check_available(config, [name for name in supported if name != "triton"])
    return requested
