"""RoPE, by Transformers' own implementation, with all of its `rope_parameters`."""

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import rotate_half

from .position_base import Parameters, PositionContext, PositionEncoding


@dataclasses.dataclass(frozen=True)
class RotaryParameters(Parameters):
    """None of its own: RoPE is set by the configuration's `rope_parameters`."""

    unknown_key_hint = "RoPE is set by the field rope_parameters, for example rope_parameters={'rope_theta': 10000.0}."


class RotaryTables(nn.Module):
    """Cosines and sines of the new tokens, once per forward pass."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # The one that knows partial_rotary_factor; otherwise it is Llama's.
        self.rotary_emb = GPTNeoXRotaryEmbedding(config=config)

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, each (1 or B, Q, R), dtype of `hidden`; R channels of a head are rotated."""
        return self.rotary_emb(hidden, position_ids=context.query_positions)


class RotaryPositionEncoding(PositionEncoding):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864): q and k are rotated by their position.

    Set by the configuration's `rope_parameters` (`rope_theta`; `rope_type` default, linear, dynamic, yarn, ...;
    `partial_rotary_factor`: the share of a head's channels, the first ones, that is rotated). Runs at any length;
    without scaling, quality falls off beyond the trained one.
    """

    name = "rope"
    paper = "Su et al. 2021 (2104.09864)"
    summary = "queries and keys rotated by their position; linear, dynamic, YaRN, llama3 scaling; all or some channels"
    parameters_class = RotaryParameters

    @classmethod
    def shared(cls, config: Any, parameters: Any) -> RotaryTables:
        return RotaryTables(config)

    def before_cache(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = context.shared[self.name]
        return rotated(query, cos, sin), rotated(key, cos, sin)


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first R channels of states (B, H, Q, D); cos and sin (1 or B, Q, R)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    R = cos.shape[-1]
    if states.shape[-1] == R:
        return states * cos + rotate_half(states) * sin
    turned, plain = states[..., :R], states[..., R:]
    return torch.cat((turned * cos + rotate_half(turned) * sin, plain), dim=-1)
