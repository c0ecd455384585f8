"""The modules of the position encodings that a model has: one for the embeddings, those of all layers, those of one.

Axes: B batch, Q query length, E hidden size.
"""

from typing import Any

import torch
from torch import nn

from .attention_choice import layer_default, layer_kernel
from .position_base import PositionContext
from .position_plan import layer_plan, max_lengths, parse


def embedding(config: Any) -> nn.Module | None:
    """Returns the module that adds positions to the token embeddings, or None."""
    modules = [cls.embedding(config, parameters) for cls, parameters in parse(config).values()]
    return next((module for module in modules if module is not None), None)


class SharedPositionEncodings(nn.ModuleDict):
    """The parts of the encodings that exist once per model, by name."""

    def __init__(self, config: Any) -> None:
        shared = {name: cls.shared(config, parameters) for name, (cls, parameters) in parse(config).items()}
        super().__init__({name: module for name, module in shared.items() if module is not None})
        self.max_lengths = max_lengths(config)

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> PositionContext:
        """Fills `context.shared` for a forward pass over hidden states (B, Q, E); returns the context."""
        for name, module in self.items():
            context.shared[name] = module(hidden, context)
        return context


class PositionEncodings(nn.ModuleDict):
    """The encodings of one attention layer, by name.

    Attributes:
        hooks: for each hook of `PositionEncoding`, the encodings that have it. The others are not called, to keep
            decoding steps fast.
        kernel_name: see `layer_kernel`.
        default: see `layer_default`.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        parts = layer_plan(config)[layer_idx]
        super().__init__({cls.name: cls(config, parameters, layer_idx) for cls, parameters in parts})
        self.kernel_name = layer_kernel(parts)
        self.default = layer_default(parts)
        modules: list[Any] = [*self.values()]
        self.hooks = {
            hook: [part for part in modules if part.uses(hook)]
            for hook in ("before_cache", "cached_state", "after_cache", "bias", "attend", "kernel")
        }

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> Any:
        """Returns the sum of all biases; each gets the content logits. See `PositionEncoding.bias`."""
        return sum(part.bias(logits, query, context, scaling) for part in self.hooks["bias"])
