"""Options of an attention block that work with every position encoding: norms, output gate, key/value shift.

Together they are the "Pro" block of the Forgetting Transformer (Lin et al. 2025, 2503.02130, Section 3.3).

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_mask import is_hidden
from .head_linear import HeadLinear
from .position_base import PositionContext, head_dim


class HeadNorm(nn.Module):
    """RMSNorm of each head, with a scale for each head and channel, (heads, D), 1 at the start."""

    def __init__(self, heads: int, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(heads, channels)), eps

    def reset(self) -> None:
        init.ones_(self.weight)

    def forward(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """Norms states (B, heads, T, D), in float32, of the heads from `first` on; returns their type."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scale = self.weight[first : first + states.shape[1], None].to(wide.dtype)
        return (F.rms_norm(wide, wide.shape[-1:], eps=self.eps) * scale).to(states.dtype)


class AttentionOptions(nn.Module):
    """The options of one attention layer; fields of the configuration set them.

    `qk_norm`: RMSNorm of queries and keys of each head, with `qk_norm_eps`. `output_norm`: RMSNorm of the output of
    each head, with 1e-6 as in the authors' code. `output_gate`: the output times sigmoid(W_g x). `key_value_shift`: of
    raw keys k~ and values v~, with a_t, b_t = sigmoid(w . x_t) for each key head, and 0 for the token before the first
    of a document,

        k_t = a_t k~_(t-1) + (1 - a_t) k~_t, and its norm with `qk_norm`
        v_t = b_t v~_(t-1) + (1 - b_t) v~_t

    The cache contains k~, v~, a and b, and every step mixes all of them, so that cached tokens can be cropped, padded
    or masked.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        hidden, channels, std = config.hidden_size, head_dim(config), config.initializer_range
        self.groups = heads // key_heads
        self.query_norm = HeadNorm(heads, channels, config.qk_norm_eps) if config.qk_norm else None
        self.key_norm = HeadNorm(key_heads, channels, config.qk_norm_eps) if config.qk_norm else None
        self.output_norm = HeadNorm(heads, channels) if config.output_norm else None
        self.output_gate = HeadLinear(hidden, heads * channels, std) if config.output_gate else None
        self.key_shift = HeadLinear(hidden, key_heads, std) if config.key_value_shift else None
        self.value_shift = HeadLinear(hidden, key_heads, std) if config.key_value_shift else None

    def normed(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalises queries (B, H, Q, D) and new keys (B, G, Q, D); shifted keys are normalised after the shift."""
        if self.query_norm is not None:
            query = self.query_norm(query, context.head_offset)
            key = key if self.key_shift is not None else self._normed_key(key, context)
        return query, key

    def _normed_key(self, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        return key if self.key_norm is None else self.key_norm(key, context.head_offset // self.groups)

    def cached_state(self, hidden: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Returns a and b of new tokens, (B, G, Q, 2), which are cached with their keys."""
        if self.key_shift is None or self.value_shift is None:
            return {}
        shifts = torch.stack((self.key_shift(hidden), self.value_shift(hidden)), dim=-1).transpose(1, 2)
        return {"shift": torch.sigmoid(shifts.to(torch.promote_types(shifts.dtype, torch.float32))).to(dtype)}

    def shifted(
        self, key: torch.Tensor, value: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixes all keys and values, (B, G, K, D) each, with those of the token before."""
        if "shift" not in context.states:
            return key, value
        key_gate, value_gate = context.states.pop("shift").split(1, dim=-1)
        previous = context.once("previous", lambda: previous_slots(context))
        key = self._normed_key(_shifted(key, key_gate, *previous), context)
        return key, _shifted(value, value_gate, *previous)

    def finished(self, output: torch.Tensor, hidden: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Norms and gates the output of the heads, (B, Q, H, D)."""
        if self.output_norm is not None:
            output = self.output_norm(output.transpose(1, 2), context.head_offset).transpose(1, 2)
        if self.output_gate is not None:
            gate = self.output_gate(hidden).view(output.shape)
            gate = torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
            output = output * gate.to(output.dtype)
        return output


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

    This is the last slot before the key that is not padding and is in the same document (has a smaller position), or
    the key's own slot if there is none. Without a mask and without cached tokens, a document begins wherever positions
    do not increase by 1, as in Transformers. With a 4D mask, only slots that are visible together with the key count.
    """
    positions, mask = context.key_positions, context.attention_mask
    length = positions.shape[1]
    slots = torch.arange(length, device=positions.device)
    if mask is not None and mask.ndim == 4 and mask.dtype != torch.int32:
        visible = ~is_hidden(mask[:, 0, :, :length])
        # All rows that attend to a key have the same visible slots before it, if each document or branch has one past.
        first_row = visible.byte().argmax(1, keepdim=True)
        previous = _before(torch.where(visible, slots, -1)).gather(1, first_row)[:, 0]
        found = previous >= 0
        return torch.where(found, previous, slots), found
    shown = context.key_mask
    previous = (slots - 1)[None] if shown is None else _before(torch.where(shown, slots, -1))
    positions, previous = torch.broadcast_tensors(positions, previous)
    found, previous = previous >= 0, previous.clamp(min=0)
    step = positions - positions.gather(1, previous)
    alone = mask is None and context.query_positions.shape[1] == length
    found = found & (step == 1 if alone else step > 0)
    return torch.where(found, previous, slots), found


def _before(marks: torch.Tensor) -> torch.Tensor:
    """Returns the largest of the marks before each one, (..., K), and -1 for the first."""
    return F.pad(marks.cummax(-1).values[..., :-1], (1, 0), value=-1)
