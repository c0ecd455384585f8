"""The attention layer of both families: projections, encodings, options, and the cache.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, QuantizedCache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TRANSFORMERS_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .attention_choice import choose_attention
from .forward_arguments import CACHE, one_cache
from .position_base import PositionContext
from .position_modules import PositionEncodings
from .position_registry import PARTS


class _LayerFunctions:
    """The attention functions of layers. A forward pass chooses one only if the implementation has changed."""

    def __getitem__(self, layer: "AttentionBlock") -> Callable[..., Any]:
        """Returns the function of a layer; chooses it again if the implementation, or Transformers' table, changed."""
        name, (chosen, function) = layer.config._attn_implementation or "eager", layer.chosen_for
        table = TRANSFORMERS_FUNCTIONS
        given = table._local_mapping.get(name, table._global_mapping.get(name))
        if name != chosen or given is not function:
            attention = choose_attention(layer, name, given)
            if torch.compiler.is_compiling():
                # Compiled code must not change attributes of the layer.
                return attention
            layer.attention, layer.chosen_for = attention, (name, given)
        return layer.attention


# Engines look for a name that is assigned from this one, and for `scaling=self.`, in the source of `forward`.
ALL_ATTENTION_FUNCTIONS = _LayerFunctions()


class AttentionBlock(nn.Module):
    """Base of both families' attention layers, which define `scaling`, `dropout`, `project` and `output`."""

    scaling: float
    dropout: float

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.encodings = PositionEncodings(config, layer_idx)
        self.options = PARTS["options"](config) if config.attention_options else None
        # The first head of this process, where an engine has split the heads between devices itself.
        self.first_head: int | None = None
        # The attention function, and the implementation and the entry of Transformers' table that it was chosen for.
        self.attention: Any = None
        self.chosen_for: tuple[Any, Any] = (None, None)
        self.attention = ALL_ATTENTION_FUNCTIONS[self]

    def __getstate__(self) -> dict[str, Any]:
        # Functions of engines cannot always be copied; a copy chooses again.
        return {**self.__dict__, "attention": None, "chosen_for": (None, None)}

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns queries (B, H, Q, D), keys and values (B, G, Q, D) of hidden states (B, Q, E)."""
        raise NotImplementedError

    def output(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the output of all heads, (B, Q, H * D), as hidden states (B, Q, E)."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_context: PositionContext,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.project(hidden_states)
        context = self.layer_context(position_context, value)
        if self.options is not None:
            query, key = self.options.normed(query, key, context)
        context.query, context.key = query, key
        for part in self.encodings.hooks["before_cache"]:
            query, key = part.before_cache(query, key, context)
        if past_key_values is not None:
            cache = one_cache(cache, past_key_values)
        key, value = self.update_cache(hidden_states, key, context, cache, kwargs)
        attention = ALL_ATTENTION_FUNCTIONS[self]
        dropout = self.dropout if self.training else 0.0
        output, weights = attention(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, context=context, **kwargs
        )
        asked = kwargs.get("output_attentions")
        if weights is None and (self.config.output_attentions if asked is None else asked):
            raise ValueError(
                f"output_attentions=True: attn_implementation={self.config._attn_implementation!r} has no attention "
                "weights. Allowed: 'eager', by from_pretrained(..., attn_implementation='eager') or "
                "model.set_attn_implementation('eager')."
            )
        if self.options is not None:
            output = self.options.finished(output, hidden_states, context)
        return self.output(output.reshape(*output.shape[:2], -1).contiguous()), weights

    def layer_context(self, context: PositionContext, value: torch.Tensor) -> PositionContext:
        """Returns this layer's own copy of the context, with its new values (B, G, Q, V)."""
        context = PositionContext(**{**vars(context), "value": value, "new_value": value})
        heads = value.shape[1] * self.num_key_value_groups
        if heads != self.num_heads:
            # Under tensor parallelism a rank has only some heads; parameters of heads are indexed by global numbers.
            mesh = next((p.device_mesh for p in self.parameters() if hasattr(p, "device_mesh")), None)
            if self.first_head is not None:
                context.head_offset = self.first_head
            elif mesh is not None:
                context.head_offset = mesh.get_local_rank("tp" if mesh.ndim > 1 else None) * heads
            elif self.encodings.hooks["after_cache"] or self.options is not None:
                raise ValueError(
                    f"position_encoding={self.config.position_encoding!r} has parameters for each head here, and does "
                    "not support an engine's own tensor parallelism. Use one device, or data parallelism."
                )
        return context

    def update_cache(
        self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext, cache: Cache | None, kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all keys (B, G, K, D) and values, cached ones included; fills in `context.value` and `.states`.

        States are cached in additional channels of the keys. Raises ValueError for a cache that cannot hold them.
        `kwargs` are those of the attention function; continuous batching describes its pages in them.
        """
        value, parts = context.value, self.encodings.hooks["cached_state"]
        states = {part.name: part.cached_state(hidden, key, context) for part in parts}
        if self.options is not None:
            states |= self.options.cached_state(hidden, key.dtype)
        if isinstance(cache, PagedAttentionCache):
            if self.encodings.default != "sdpa" or self.encodings.hooks["after_cache"] or states:
                raise ValueError(
                    f"A PagedAttentionCache cannot hold position_encoding={self.config.position_encoding!r}. Call "
                    "generate_batch(), or use a DynamicCache."
                )
            if CACHE != "cache":
                # Attention functions update the pages.
                kwargs["cache"], cache = cache, None
        # Older versions take no such argument.
        options: Any = {"kwargs": kwargs} if CACHE == "cache" else {}
        if cache is not None and not states:
            key, value = cache.update(key, value, self.layer_idx, **options)
        elif cache is not None:
            widths = [key.shape[-1], *(state.shape[-1] for state in states.values())]
            layer = next(iter(getattr(cache, "layers", ())[self.layer_idx :]), None)
            if isinstance(cache, QuantizedCache) or getattr(layer, "k_head_dim", sum(widths)) != sum(widths):
                raise ValueError(
                    f"This {type(cache).__name__} cannot hold position_encoding={self.config.position_encoding!r}: its "
                    f"keys need {sum(widths)} channels, of which {sum(widths[1:])} are exact numbers for {[*states]}. "
                    "Allowed: a DynamicCache, or a StaticCache that gets its width from its first update."
                )
            held = getattr(layer, "keys", None)
            if held is not None and held.ndim == 4 and held.shape[-1] != sum(widths):
                raise ValueError(
                    f"The keys in this {type(cache).__name__} have {held.shape[-1]} channels; position_encoding="
                    f"{self.config.position_encoding!r} needs {sum(widths)}, with those for {[*states]}. PEFT's prefix "
                    "tuning makes keys without them. Allowed: prompt tuning, p-tuning, IA3, LoRA."
                )
            keys, value = cache.update(torch.cat((key, *states.values()), dim=-1), value, self.layer_idx, **options)
            key, *found = keys.split(widths, dim=-1)
            states = dict(zip(states, found))
        context.states = states
        if self.options is not None:
            key, value = self.options.shifted(key, value, context)
        context.value = value
        return key, value
