"""Fixed sinusoidal absolute positions, added to the token embeddings (Vaswani et al. 2017, section 3.5)."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .position_base import Parameters, PositionEncoding


@dataclasses.dataclass(frozen=True)
class SinusoidalParameters(Parameters):
    """Parameters of `sinusoidal`.

    Attributes:
        theta: the base of the wavelengths, > 1.
        scale: the amplitude, > 0; None for `initializer_range`, so that positions are as large as freshly initialised
            tokens. In the paper both are about 1: its token embeddings are multiplied by sqrt(hidden_size).
    """

    theta: float = 10000.0
    scale: float | None = None

    def resolve(self, config: Any) -> "SinusoidalParameters":
        return self if self.scale is not None else dataclasses.replace(self, scale=float(config.initializer_range))

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.theta <= 1:
            yield "theta", "it must be greater than 1"
        if self.scale is not None and self.scale <= 0:
            yield "scale", "it must be greater than 0"
        if config.hidden_size % 2:
            raise ValueError(f"hidden_size={config.hidden_size!r} must be even for position_encoding='sinusoidal'.")


class SinusoidalEmbedding(nn.Module):
    """Computes the sines from the positions at every call: no buffer, hence no limit on length."""

    def __init__(self, theta: float, scale: float) -> None:
        super().__init__()
        self.theta = theta
        self.scale = scale

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Adds scale * sin(t / theta^(2c/E)) to the even channels 2c and the cosine to the odd ones.

        Of token embeddings (B, Q, E), whose type is kept, and positions t, int64 (1 or B, Q); phases in float32.
        """
        width = hidden.shape[-1]
        channels = torch.arange(0, width, 2, device=hidden.device, dtype=torch.float32)
        phases = position_ids[..., None].float() * self.theta ** (-channels / width)
        table = torch.stack((phases.sin(), phases.cos()), dim=-1).flatten(-2)
        return hidden + (self.scale * table).to(hidden.dtype)


class SinusoidalPositionEncoding(PositionEncoding):
    """Sinusoidal absolute position encoding. No limit on length."""

    name = "sinusoidal"
    paper = "Vaswani et al. 2017 (1706.03762)"
    summary = "fixed sines and cosines of the position, added to the embeddings"
    parameters_class = SinusoidalParameters

    @classmethod
    def embedding(cls, config: Any, parameters: Any) -> nn.Module:
        return SinusoidalEmbedding(parameters.theta, parameters.scale)
