"""Learned absolute positions: one embedding per position, added to the token embeddings (GPT-2)."""

import dataclasses
from typing import Any

import torch
from torch import nn

from .position_base import Parameters, PositionEncoding


class AbsoluteEmbedding(nn.Embedding):
    """The table; its weight has the shape (max_position_embeddings, hidden_size), as GPT-2's `wpe`."""

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Adds the embeddings of positions, int64 (1 or B, Q), to those of the tokens, (B, Q, E); keeps their type."""
        return hidden + super().forward(position_ids).to(hidden.device)


@dataclasses.dataclass(frozen=True)
class AbsoluteParameters(Parameters):
    """`absolute` has no parameters."""

    def max_length(self, config: Any) -> int:
        return config.max_position_embeddings


class AbsolutePositionEncoding(PositionEncoding):
    """Learned absolute position embedding (Gehring et al. 2017; GPT-2). Supports `max_position_embeddings` tokens."""

    name = "absolute"
    paper = "Radford et al. 2019 (GPT-2)"
    summary = "one learned vector per position, added to the embeddings"
    parameters_class = AbsoluteParameters

    @classmethod
    def embedding(cls, config: Any, parameters: Any) -> nn.Module:
        return AbsoluteEmbedding(config.max_position_embeddings, config.hidden_size)
