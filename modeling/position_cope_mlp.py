"""CoPE_MLP: CoPE with a network of the position in place of the table (Golovneva et al., 2405.18719, Appendix C).

Axes: B batch, H query heads, Q query length, K key length, D head dim, N hidden units; S = N + 2 pieces of a function
of the position.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import initialization as init

from .cope_bias import CoPEBias
from .position_base import Parameters, PositionContext, PositionEncoding


@dataclasses.dataclass(frozen=True)
class CoPEMLPParameters(Parameters):
    """Parameters of CoPE_MLP.

    Attributes:
        hidden_units: N, 32 to 256 in the paper, 64 in its Table 7.
        num_positions: contextual positions are clamped to num_positions - 1; the network sees p / (num_positions - 1).
        layers: "all", or "first": the first layer only, the others have no positions.
    """

    hidden_units: int = 64
    num_positions: int = 64
    layers: Literal["all", "first"] = "all"

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        for name, least in (("hidden_units", 1), ("num_positions", 2)):
            if getattr(self, name) < least:
                yield name, f"it must be at least {least}"

    def in_layer(self, layer_idx: int) -> bool:
        return self.layers == "all" or layer_idx == 0


class PositionMLP(nn.Module):
    """e(p) = output relu(weight x + bias), x = p / (num_positions - 1): weight (N,), bias (N,), output (D, N).

    The output has no bias: the same number for all keys of a row is invisible to softmax.
    """

    def __init__(self, head_dim: int, hidden_units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_units))
        self.bias = nn.Parameter(torch.empty(hidden_units))
        self.output = nn.Parameter(torch.empty(head_dim, hidden_units))
        self.reset()

    def reset(self) -> None:
        """Output 0, as CoPE's table; unit n begins at x = n / N: so that all knots are evenly in [0, 1)."""
        units = self.weight.shape[0]
        init.ones_(self.weight)
        init.copy_(self.bias, -torch.arange(units) / units)
        init.zeros_(self.output)

    def forward(self, _: Any = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.weight, self.bias, self.output


def _activity(weight: torch.Tensor, bias: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where the network bends, and which hidden units are active between.

    Weight and bias, (N,), are for p itself. Returns the knots from left to right and `last`, (N + 1,): p is in piece s
    if s of them are smaller. And 1 where a unit is active in a piece, else 0, (N, S): up to `last` in the pieces before
    the last one, there in the last one.
    """
    knots = torch.where(weight == 0, last, -bias / weight).clamp(max=last)
    order = knots.argsort()
    place = order.argsort()
    pieces = torch.arange(len(order) + 1, device=order.device)
    right = pieces > place[:, None]
    # Without `where`, which ONNX Runtime does not have for booleans.
    active = (right & (weight > 0)[:, None]) | (~right & (weight < 0)[:, None]) | ((weight == 0) & (bias > 0))[:, None]
    at_last = (weight * last + bias > 0)[:, None]
    knots = torch.cat((knots[order], knots.new_full((1,), last)))
    return knots, torch.cat((active, at_last), 1).to(weight.dtype)


def _values_and_slopes(
    weight: torch.Tensor, bias: torch.Tensor, active: torch.Tensor, last: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the line of each unit in each piece, (N, S) both: in the last one, the value at the largest position."""
    slopes = torch.cat((weight[:, None] * active[:, :-1], torch.zeros_like(weight)[:, None]), 1)
    values = torch.cat((bias[:, None] * active[:, :-1], ((weight * last + bias) * active[:, -1])[:, None]), 1)
    return values, slopes


class CoPEMLPBias(CoPEBias):
    """The bias of CoPE_MLP: tensors are weight (N,), bias (N,) and output (D, N) of `PositionMLP`.

    Settings: the factor on q.e, and the largest position.

    As a function of p the network is linear between its knots, which all rows share: so what a row needs is a table of
    S values and S slopes, as in CoPE, and no hidden unit is evaluated anywhere.
    """

    name = "cope_mlp"
    differentiable = (True, True, True)
    required = 3

    @staticmethod
    def bias(content: torch.Tensor, query: torch.Tensor, tensors: Sequence, settings: Sequence) -> torch.Tensor:
        scale, last = settings
        weight, bias, output = (tensor.to(content.dtype) for tensor in tensors)
        weight = weight / last
        with torch.no_grad():
            knots, active = _activity(weight, bias, int(last))
        positions = torch.sigmoid(content).flip(-1).cumsum(-1).flip(-1)
        values, slopes = _values_and_slopes(weight, bias, active, last)
        piece = torch.bucketize(positions.detach(), knots)
        # The sum of the two cancels: products in half precision would not do.
        with torch.autocast(content.device.type, enabled=False):
            units = query.to(content.dtype) @ output * scale
            return (units @ values).gather(-1, piece) + positions * (units @ slopes).gather(-1, piece)

    def pieces(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias, self.output = (tensor.to(self.attention.dtype) for tensor in self.tensors)
        self.last = int(self.settings[1])
        weight = weight / self.last
        self.knots, self.active = _activity(weight, bias, self.last)
        values, self.slopes = _values_and_slopes(weight, bias, self.active, self.last)
        # Less the value at the largest position, a constant of the row.
        self.values = values - values[:, -1:]
        return self.output @ self.values * self.scale, self.output @ self.slopes * self.scale

    def locate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.bucketize(positions, self.knots), positions

    def gradients(self) -> list[torch.Tensor]:
        pairs = self.grad_interleaved.mul(self.scale).view(len(self.output), -1, 2)
        # Nothing that is learned is in the last piece.
        from_values, from_slopes = pairs[:, :-1].unbind(-1)
        values, slopes, active = self.values[:, :-1], self.slopes[:, :-1], self.active[:, :-1]
        grad_output = from_values @ values.T + from_slopes @ slopes.T
        grad_values, grad_slopes = self.output.T @ from_values, self.output.T @ from_slopes
        constant = grad_values.sum(1) * self.active[:, -1]
        grad_bias = (grad_values * active).sum(1) - constant
        grad_weight = (grad_slopes * active).sum(1) - self.last * constant
        return [grad_weight / self.last, grad_bias, grad_output]


class CoPEMLP(PositionEncoding):
    """CoPE_MLP: contextual positions, embedded by a network with one hidden layer instead of by interpolation.

        p_ij as in CoPE: the sum of sigmoid(s_ik) for k = j..i, at most num_positions - 1 (Eq. 3, 4)
        e(p) = output relu(weight p / (num_positions - 1) + bias), for all heads of a layer
        logit = s_ij + q_i . e(p_ij) * scaling

    The paper gives the number of hidden units and no more. The activation, the input's scale and the start are ours: at
    the start the output weights alone can give any function that is linear between N + 1 equidistant positions.
    """

    name = "cope_mlp"
    paper = "Golovneva et al. 2024 (2405.18719), Appendix C"
    summary = "CoPE with a small network of the count in place of the table (CoPE_MLP); in all layers or the first"
    parameters_class = CoPEMLPParameters
    block_bias = CoPEMLPBias

    def __init__(self, config: Any, parameters: CoPEMLPParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        self.network = PositionMLP(self.head_dim, parameters.hidden_units)

    def bias_inputs(self, context: PositionContext, scaling: float) -> tuple[tuple[torch.Tensor, ...], tuple]:
        return self.network(None), (scaling, self.parameters_.num_positions - 1)
