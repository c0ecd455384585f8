"""Learned tensors of the position encodings."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init


class LearnedTable(nn.Module):
    """A learned tensor: 0 at the start, or normal. A module of its own, called with an argument, for PEFT."""

    def __init__(self, *shape: int, std: float = 0.0) -> None:
        super().__init__()
        self.weight, self.std = nn.Parameter(torch.empty(shape)), std
        self.reset()

    def reset(self) -> None:
        # Zeros draw no random numbers.
        init.normal_(self.weight, std=self.std) if self.std else init.zeros_(self.weight)

    def forward(self, _: Any = None) -> torch.Tensor:
        return self.weight


class SharedTable(nn.Module):
    """One table for all layers."""

    def __init__(self, *shape: int, std: float = 0.0) -> None:
        super().__init__()
        self.table = LearnedTable(*shape, std=std)

    def forward(self, hidden: torch.Tensor, context: Any) -> torch.Tensor:
        return self.table(None)
