"""Options of an attention block that work with every position encoding: norms, output gate, key/value shift.

Together they are the "Pro" block of the Forgetting Transformer (Lin et al. 2025, 2503.02130, Section 3.3).

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from .position_base import PositionContext, head_dim

# As in the authors' code.
NORM_EPS = 1e-6

# An additive mask hides a key with numbers below this: the lowest one of any type, -inf, -1e4.
HIDDEN = -5e3


class HeadLinear(nn.Linear):
    """A projection of the hidden states to numbers of each head; under tensor parallelism, to those of local heads."""

    tensor_parallel_style = "colwise"

    def __init__(self, inputs: int, outputs: int, std: float, bias: float | None = None) -> None:
        super().__init__(inputs, outputs, bias=bias is not None)
        self.std, self.bias_init = std, bias

    def reset(self) -> None:
        init.normal_(self.weight, mean=0.0, std=self.std)
        if self.bias_init is not None:
            init.constant_(self.bias, self.bias_init)


class HeadNorm(nn.Module):
    """RMSNorm of each head, with a scale for each head and channel, (heads, D), 1 at the start."""

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, channels))

    def reset(self) -> None:
        init.ones_(self.weight)

    def forward(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """Norms states (B, heads, T, D), in float32, of the heads from `first` on; returns their type."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scale = self.weight[first : first + states.shape[1], None].to(wide.dtype)
        return (F.rms_norm(wide, wide.shape[-1:], eps=NORM_EPS) * scale).to(states.dtype)


class AttentionBlock(nn.Module):
    """Base of both families' attention layers: the block's options and the cache.

    Fields of the configuration: `qk_norm`, `output_norm`, `output_gate`, `key_value_shift`. With the shift, of raw keys
    k~ and values v~, with a_t, b_t = sigmoid(w . x_t) for each key head, and 0 for the token before the first of a
    document:

        k_t = a_t k~_(t-1) + (1 - a_t) k~_t, and its norm with `qk_norm`
        v_t = b_t v~_(t-1) + (1 - b_t) v~_t

    The cache holds k~, v~, a and b, and every step mixes all of them again, so cached tokens may be cropped, padded or
    masked.
    """

    num_heads: int
    encodings: Any

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        heads, channels, std = config.num_attention_heads, head_dim(config), config.initializer_range
        key_heads, hidden = config.num_key_value_heads, config.hidden_size
        self.num_key_value_groups = heads // key_heads
        self.query_norm = HeadNorm(heads, channels) if config.qk_norm else None
        self.key_norm = HeadNorm(key_heads, channels) if config.qk_norm else None
        self.output_norm = HeadNorm(heads, channels) if config.output_norm else None
        self.output_gate = HeadLinear(hidden, heads * channels, std) if config.output_gate else None
        self.key_shift = HeadLinear(hidden, key_heads, std) if config.key_value_shift else None
        self.value_shift = HeadLinear(hidden, key_heads, std) if config.key_value_shift else None

    def layer_context(self, context: PositionContext, value: torch.Tensor) -> PositionContext:
        """Returns this layer's own copy of the context, with its new values (B, G, Q, V)."""
        context = PositionContext(**{**vars(context), "value": value, "new_value": value})
        heads = value.shape[1] * self.num_key_value_groups
        if heads != self.num_heads:
            # Under tensor parallelism a rank has only some heads; what belongs to a head is looked up by its number.
            mesh = next(p.device_mesh for p in self.parameters() if hasattr(p, "device_mesh"))
            context.head_offset = mesh.get_local_rank("tp" if mesh.ndim > 1 else None) * heads
        return context

    def check_weights(self, weights: torch.Tensor | None, asked: bool | None) -> None:
        """Raises ValueError if attention weights were asked for and the implementation has none."""
        if weights is None and (self.config.output_attentions if asked is None else asked):
            raise ValueError(
                f"output_attentions=True: attn_implementation={self.config._attn_implementation!r} has no attention "
                "weights. Allowed: 'eager', by from_pretrained(..., attn_implementation='eager') or "
                "model.set_attn_implementation('eager')."
            )

    def normed(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms queries (B, H, Q, D) and new keys (B, G, Q, D); keys that are shifted are normed after that."""
        if self.query_norm is not None:
            query = self.query_norm(query, context.head_offset)
            key = key if self.key_shift is not None else self._normed_key(key, context)
        return query, key

    def _normed_key(self, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        return key if self.key_norm is None else self.key_norm(key, context.head_offset // self.num_key_value_groups)

    def cached(
        self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all keys and values, cached ones included, and fills in `context.value` and `context.states`.

        States are further channels of the cached keys, so every cache of Transformers holds, crops, reorders and
        offloads them with the keys.

        Args:
            hidden: (B, Q, E), the input of the layer.
            key: (B, G, Q, D), the new keys.
            context: the context of this layer, with the new values (B, G, Q, V).
            cache: the cache, or None.
        """
        states = self.encodings.cached_state(hidden, key, context)
        if self.key_shift is not None and self.value_shift is not None:
            shifts = torch.stack((self.key_shift(hidden), self.value_shift(hidden)), dim=-1).transpose(1, 2)
            states["shift"] = torch.sigmoid(shifts.to(torch.promote_types(shifts.dtype, torch.float32))).to(key.dtype)
        value = context.value
        if cache is not None and not states:
            key, value = cache.update(key, value, self.layer_idx)
        elif cache is not None:
            widths = [key.shape[-1], *(state.shape[-1] for state in states.values())]
            keys, value = cache.update(torch.cat((key, *states.values()), dim=-1), value, self.layer_idx)
            key, *found = keys.split(widths, dim=-1)
            states = dict(zip(states, found))
        if self.key_shift is not None:
            key_gate, value_gate = states.pop("shift").split(1, dim=-1)
            previous = context.shared["previous"]
            key = self._normed_key(_shifted(key, key_gate, *previous), context)
            value = _shifted(value, value_gate, *previous)
        context.value, context.states = value, states
        return key, value

    def finished(self, output: torch.Tensor, hidden: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Norms and gates the output of the heads, (B, Q, H, D), and merges them: (B, Q, H * D)."""
        if self.output_norm is not None:
            output = self.output_norm(output.transpose(1, 2), context.head_offset).transpose(1, 2)
        if self.output_gate is not None:
            gate = self.output_gate(hidden).view(output.shape)
            gate = torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
            output = output * gate.to(output.dtype)
        return output.reshape(*output.shape[:2], -1).contiguous()


def _shifted(states: torch.Tensor, gate: torch.Tensor, previous: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Returns gate * (the state before) + (1 - gate) * state, (B, G, K, D); the state before is 0 where none is found.

    Args:
        states: (B, G, K, D). gate: (B, G, K, 1). previous, found: (1 or B, K), see `previous_slots`.
    """
    B, G, K, D = states.shape
    # Whole rows are copied, which takes a third of the time of a gather.
    heads = torch.arange(B * G, device=states.device).view(B, G, 1) * K
    before = states.reshape(-1, D).index_select(0, (previous[:, None] + heads).flatten()).view(states.shape)
    dtype = torch.promote_types(states.dtype, torch.float32)
    gate = gate.to(dtype)
    mixed = (states.to(dtype) * (1 - gate)).addcmul(before.to(dtype), gate * found[:, None, :, None])
    return mixed.to(states.dtype)


def previous_slots(context: PositionContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the slot of the token before each key, int64 (1 or B, K), and whether there is one, bool (1 or B, K).

    Where there is none, the slot is the key's own.

    That is the last slot before it that is not padding, and in the same document: its position is smaller. Without a
    mask and without cached tokens, Transformers begins a document wherever positions do not go on by 1; so here. With a
    4D mask it is the last slot before it among those that a row which sees the key sees.
    """
    positions, mask = context.key_positions, context.attention_mask
    length = positions.shape[1]
    slots = torch.arange(length, device=positions.device)
    if mask is not None and mask.ndim == 4 and mask.dtype != torch.int32:
        visible = mask[:, 0, :, :length]
        visible = visible if visible.dtype == torch.bool else visible > HIDDEN
        # All rows that see a key see the same before it, if documents and branches have one past each.
        first_row = visible.byte().argmax(1, keepdim=True)
        previous = _before(torch.where(visible, slots, -1)).gather(1, first_row)[:, 0]
        found = previous >= 0
        return torch.where(found, previous, slots), found
    previous = (slots - 1)[None] if mask is None else _before(torch.where(context.key_mask, slots, -1))
    positions, previous = torch.broadcast_tensors(positions, previous)
    found, previous = previous >= 0, previous.clamp(min=0)
    step = positions - positions.gather(1, previous)
    alone = mask is None and context.query_positions.shape[1] == length
    found = found & (step == 1 if alone else step > 0)
    return torch.where(found, previous, slots), found


def _before(marks: torch.Tensor) -> torch.Tensor:
    """Returns the largest of the marks before each one, (..., K), and -1 for the first."""
    return F.pad(marks.cummax(-1).values[..., :-1], (1, 0), value=-1)
