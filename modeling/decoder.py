"""The decoder and its language-modelling head, of both families: inputs, checks, masks and layers.

Axes: B batch, Q new tokens, K all tokens, E hidden size, V vocabulary.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_choice import supported_implementations
from .attention_mask import is_key_ranges, largest, visible_keys, with_lowest
from .forward_arguments import CACHE, CachedLayer, check_keywords, takes_cache
from .position_base import PositionContext
from .pretrained_model import refusal

# Rows of queries whose distances to all keys are in memory at once.
CHECKED_ROWS = 256


class Decoder:
    """The forward pass of the decoders of both families, which define `layers`, `norm` and `embed`."""

    # Whether position_ids (Q,) are those of all rows, as in the stock model.
    takes_one_row_of_positions = False

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(  # type: ignore[misc]
        self: Any,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Runs the decoder.

        Args:
            input_ids: int64 (B, Q), or None if `inputs_embeds` is given.
            attention_mask: (B, past + Q) with 0 for padding; 4D (B, 1, Q, K); or from `create_masks_for_generate`.
            position_ids: int64 (B, Q) or (1, Q), in GPT-2-style models also (Q,); positions that start again separate
                packed documents, where there is neither an attention_mask nor anything in the cache.
            cache: the cache, also under the name `past_key_values`.
            inputs_embeds: (B, Q, E).
            use_cache: whether to return a cache.
            token_type_ids: int64 (B, Q); GPT-2-style models add their embeddings, Llama-style ones ignore them.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`; a mask of the wrong shape; a sequence longer
                than the encoding supports; a further keyword that would have no effect (see `check_keywords`).
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        config = self.config
        check_keywords(config, kwargs, attention_mask, position_ids, cache)
        batch, length = inputs_embeds.shape[:2]
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        # Continuous batching passes positions and masks for its pages, which only the attention layers see.
        past = None if isinstance(cache, PagedAttentionCache) else cache
        if past is not None and not hasattr(past, "get_mask_sizes"):
            raise ValueError(f"{CACHE}={past!r} is not valid: it must be a Cache of Transformers, or None.")
        first = first_own_layer(self)
        past_length: Any = past.get_seq_length(first) if past is not None else 0
        if isinstance(past_length, torch.Tensor):
            # A static cache returns its live counter, which every layer's update changes.
            past_length = past_length.clone().to(inputs_embeds.device)
        consecutive = position_ids is None
        positions: Any = position_ids
        if position_ids is not None and position_ids.ndim == 1 and self.takes_one_row_of_positions:
            positions = position_ids[None]
        if consecutive:
            positions = (torch.arange(length, device=inputs_embeds.device) + past_length).unsqueeze(0)
        _check_positions(positions, batch, length)
        limits = self.shared_encodings.max_lengths
        if "positions" in limits:
            _check_positions_reach(config, limits["positions"], positions)
        key_length = past.get_mask_sizes(length, first)[0] if past is not None else length
        _check_mask(config, attention_mask, batch, length, past_length, key_length, past is None)
        _check_context_parallel(config)
        attention_mask = with_lowest(attention_mask)
        given = attention_mask if isinstance(attention_mask, torch.Tensor) else None
        context = PositionContext(positions, given, past_length, key_length, consecutive)
        # Transformers detects packed documents only without a cache; an empty cache is equivalent.
        empty = isinstance(past, DynamicCache) and isinstance(past_length, int) and past_length == 0
        make_mask = functools.partial(
            create_causal_mask,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=None if consecutive else positions,
            **{CACHE: None if empty and not consecutive else past},
        )
        if "distances" in limits:
            _check_distances(config, limits["distances"], context, make_mask)
        context = self.shared_encodings(inputs_embeds, context)
        mask: Any = make_mask(config=config)
        # Later pipeline stages get hidden states in place of embeddings.
        hidden_states = self.embed(inputs_embeds, positions, token_type_ids) if first == 0 else inputs_embeds
        for layer in self.layers[: config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_context=context,
                position_ids=positions,
                use_cache=use_cache,
                **{CACHE: cache},
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), cache)


class CausalLM:
    """The decoder with a language-modelling head, of both families."""

    # The loss takes `num_items_in_batch`.
    accepts_loss_kwargs = True
    _tp_plan: Any = {"lm_head": "colwise_gather_output"}
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan: Any = {"lm_head": "keep_full_weight"}

    def __init__(self: Any, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        setattr(self, self.base_model_prefix, self._decoder_class(config))
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rope, cache = getattr(self.config, "rope_parameters", None) or {}, kwargs.get(CACHE)
        limit = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
        if limit and cache is not None and 0 < cache.get_seq_length() <= limit < input_ids.shape[1]:
            # A longer sequence has other frequencies for all its tokens: those in the cache are computed again, as in
            # stock Phi-3.
            kwargs |= {CACHE: None, "next_sequence_length": None}
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        if CACHE in inputs and "prepare_inputs_for_generation" in vars(self):
            # PEFT 0.21, which put its own method there, looks for the cache under the old name, and would add its
            # virtual tokens at every step.
            return {**inputs, "past_key_values": inputs[CACHE]}
        return inputs

    @takes_cache
    @can_return_tuple
    def forward(  # type: ignore[misc]
        self: Any,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Runs the decoder, see `Decoder`, and the head.

        Args:
            labels: int64 (B, Q), -100 where ignored; shifted here.
            logits_to_keep: compute the logits of the last so many tokens only; 0 for all; or indices.
            kwargs: `num_items_in_batch` divides the loss by that number instead of the mean.
        """
        outputs: BaseModelOutputWithPast = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            token_type_ids=token_type_ids,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states: Any = outputs.last_hidden_state
        logits = self.lm_head(hidden_states[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.get(CACHE), outputs.hidden_states, outputs.attentions)


def first_own_layer(model: Any) -> int:
    """Returns the index of the first decoder layer that this process has: not 0 on later pipeline stages."""
    return next((index for index, layer in enumerate(model.layers) if isinstance(layer, CachedLayer)), 0)


def _check_positions(position_ids: torch.Tensor, batch: int, length: int) -> None:
    shape = tuple(position_ids.shape)
    if length == 0:
        raise ValueError("The input has no tokens: its shape is (batch, 0); allowed: at least one token.")
    if shape not in ((1, length), (batch, length)) or position_ids.is_floating_point():
        raise ValueError(
            f"position_ids has the shape {shape} and type {position_ids.dtype}; allowed: integers of the shape "
            f"({batch}, {length}) or (1, {length})."
        )


def _check_mask(
    config: Any, attention_mask: Any, batch: int, length: int, past_length: Any, key_length: int, paged: bool
) -> None:
    given = isinstance(attention_mask, torch.Tensor)
    if config._attn_implementation not in AttentionMaskInterface() and (
        isinstance(past_length, torch.Tensor) or (given and attention_mask.ndim == 2 and not attention_mask.all())
    ):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} has no mask function: it would ignore padding in "
            "attention_mask and empty slots of a static cache. Use neither, or AttentionMaskInterface.register one."
        )
    if not given:
        return
    shape = tuple(attention_mask.shape)
    if attention_mask.ndim == 2:
        if isinstance(past_length, int) and shape != (batch, past_length + length):
            raise ValueError(
                f"attention_mask has the shape {shape}; allowed: (batch, past + new tokens) = "
                f"({batch}, {past_length + length}), or a 4D mask."
            )
        return
    has_key_ranges = config._attn_implementation in ("auto", "blockwise", "triton")
    if has_key_ranges and is_key_ranges(attention_mask) and shape == (batch, 1, length + key_length, 2):
        # Made by `create_masks_for_generate` for a static cache.
        return
    fits = (
        attention_mask.ndim == 4
        and shape[0] in (1, batch)
        and shape[1] in (1, config.num_attention_heads)
        and shape[2] == length
        # A paged cache, which only the attention layers see, adds more keys.
        and (shape[3] >= key_length if paged else shape[3] == key_length)
        and (attention_mask.dtype == torch.bool or attention_mask.is_floating_point())
    )
    if not fits:
        raise ValueError(
            f"attention_mask has the shape {shape} and type {attention_mask.dtype}; allowed: 2D (batch, past + new "
            f"tokens), or 4D bool or floating (batch, 1 or heads, {length}, {key_length})."
        )


def _check_context_parallel(config: Any) -> None:
    # PyTorch replaces the function while it shards the tokens.
    if "context_parallel" not in str(torch.nn.functional.scaled_dot_product_attention.__module__):
        return
    if config._attn_implementation != "sdpa" or "blockwise" in supported_implementations(config):
        raise ValueError(
            f"Context parallelism does not support position_encoding={config.position_encoding!r} with "
            f"attn_implementation={config._attn_implementation!r}. Use attn_implementation='sdpa' and 'none', "
            "'absolute', 'sinusoidal', 'rope' or 'pope'."
        )


def _check_positions_reach(config: Any, limit: int, positions: torch.Tensor) -> None:
    """Raises ValueError for positions beyond the table of an encoding."""
    if torch.compiler.is_compiling():
        # A compiled graph cannot read the length; on a GPU this stops the process.
        torch._assert_async(((positions >= 0) & (positions < limit)).all(), _too_long(config, limit))
        return
    highest, lowest = largest(positions), largest(-positions)
    if lowest is not None and lowest > 0:
        raise refusal(
            f"position_ids has the position {-lowest}; position_encoding={config.position_encoding!r} supports 0 to "
            f"{limit - 1}."
        )
    if highest is not None and highest >= limit:
        raise refusal(_too_long(config, limit, highest + 1))


def _check_distances(config: Any, limit: int, context: PositionContext, make_mask: Callable[..., Any]) -> None:
    """Raises ValueError if a query sees a key beyond the distances of an encoding."""
    queries, keys, shown = context.query_positions, context.key_positions, context.key_mask
    # No distance is larger, whatever is visible to which query.
    bound = queries.amax(-1) - (keys if shown is None else torch.where(shown, keys, queries.amax())).amin(-1)
    if torch.compiler.is_compiling():
        torch._assert_async((bound < limit).all(), _too_long(config, limit))
        return
    if (found := largest(bound)) is None or found < limit:
        return
    config_of_mask = copy.copy(config)
    config_of_mask._attn_implementation_internal = "blockwise"
    mask = make_mask(config=config_of_mask)
    (_, Q), K = queries.shape, keys.shape[1]
    for start in range(0, Q, CHECKED_ROWS):
        rows = slice(start, min(start + CHECKED_ROWS, Q))
        visible = visible_keys(mask, rows, Q, K, keys.device)
        distance = torch.where(visible, queries[:, rows, None] - keys[:, None], 0)
        if (found := largest(distance) or 0) >= limit:
            raise refusal(_too_long(config, limit, found + 1))


def _too_long(config: Any, limit: int, length: int | None = None) -> str:
    which = "A sequence" if length is None else f"A sequence of {length} tokens"
    return (
        f"{which} is longer than position_encoding={config.position_encoding!r} supports ({limit} tokens). Shorten it, "
        "or use an encoding other than 'absolute' and 'relative'."
    )
