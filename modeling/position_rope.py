"""RoPE, by Transformers' own implementation, with all of its `rope_parameters`."""

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from .position_encoding import PositionContext, PositionEncoding, SharedPositionEncoding


class RotaryTables(SharedPositionEncoding):
    """Cosines and sines of the new tokens, once per forward pass."""

    def __init__(self, config: Any, parameters: Any) -> None:
        super().__init__(config, parameters)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, each (1 or B, Q, D), dtype of `hidden`."""
        return self.rotary_emb(hidden, position_ids=context["query_positions"])


class RotaryPositionEncoding(PositionEncoding):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864): q and k are rotated by their position.

    Set by the configuration's `rope_parameters` (`rope_theta`; `rope_type` default, linear, dynamic, yarn, ...).
    Runs at any length; without scaling, quality falls off beyond the trained one.
    """

    name = "rope"
    paper = "Su et al. 2021 (2104.09864)"
    summary = "queries and keys rotated by their position; linear, dynamic, YaRN, llama3 scaling"
    shared_class = RotaryTables
    stock_implementations = ("sdpa", "flex_attention", "flash_attention")

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = context[self.name]
        return apply_rotary_pos_emb(query, key, cos, sin)
