"""PoPE, Polar Coordinate Positional Embedding (2509.10534): content sets magnitudes, position sets phases.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, R rotated channels, P = D - R plain
channels.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from transformers import initialization as init

from .attention_mask import dense_mask, is_key_ranges, readable
from .kernel_operator import in_transform
from .position_base import Parameters, PositionContext, PositionEncoding, head_dim


@dataclasses.dataclass(frozen=True)
class PoPEParameters(Parameters):
    """Parameters of `pope`.

    Attributes:
        theta: the base of the frequencies theta_c = theta^(-(c - 1) / R), c = 1..R; > 1.
        frequencies: the frequencies themselves, in radians per token, at least 0, one for each of the R polar channels.
            Several channels may have the same one, as in a model that was converted from RoPE. None: those of `theta`.
        use_delta: learn a phase shift per query head and frequency (Eq. 5).
        delta_init: `"zeros"` (for length extrapolation) or `"uniform"` on [-2 pi, 0] (best in-distribution).
        magnitude: `"softplus"` (Eq. 3), or the ablations `"relu"` and `"identity"` (raw signed features).
        partial_rotary_factor: the share of channels that is polar, in (0, 1]; the others give a plain signed product.
        scale: the factor on the sum of Eq. 6, with d channels in a head: `"1/sqrt(d)"`, or `"1/sqrt(2d)"`, as one
            public port has it (the paper is silent).
    """

    theta: float = 10000.0
    frequencies: list[float] | None = None
    use_delta: bool = True
    delta_init: Literal["zeros", "uniform"] = "zeros"
    magnitude: Literal["softplus", "relu", "identity"] = "softplus"
    partial_rotary_factor: float = 1.0
    scale: Literal["1/sqrt(d)", "1/sqrt(2d)"] = "1/sqrt(d)"

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.theta <= 1:
            yield "theta", "it must be greater than 1"
        if not 0 < self.partial_rotary_factor <= 1 or rotated_channels(config, self) < 1:
            yield "partial_rotary_factor", f"it must be in (0, 1] and leave at least one of {head_dim(config)} channels"
        elif self.frequencies is not None:
            polar = rotated_channels(config, self)
            if len(self.frequencies) != polar or min(self.frequencies) < 0:
                yield "frequencies", f"it must have {polar} numbers of at least 0, one for each polar channel"
            if self.theta != type(self).theta:
                yield "theta", "it has no effect beside frequencies; leave one of them out"


# Maximum number of positions in a cached table of cosines and sines on a CPU (64 MiB at 64 channels).
KEPT_POSITIONS = 131072

# A decoding step on a CPU multiplies so many numbers of keys per thread at once: about what stays in a core's cache.
CHUNK_NUMBERS = 1 << 18


def rotated_channels(config: Any, parameters: PoPEParameters) -> int:
    """Returns R, the number of polar channels of a head."""
    return int(head_dim(config) * parameters.partial_rotary_factor)


def pope_frequencies(config: Any, parameters: PoPEParameters, device: torch.device | None = None) -> torch.Tensor:
    """Returns the frequencies of the polar channels, by default theta^(-(c - 1) / R) for c = 1..R: float32 (R,).

    In radians per token. The paper prints the exponent without its minus sign; all public code has it.
    """
    if parameters.frequencies is not None:
        return torch.tensor(parameters.frequencies, device=device, dtype=torch.float32)
    channels = rotated_channels(config, parameters)
    return parameters.theta ** (-torch.arange(channels, device=device, dtype=torch.float32) / channels)


def fold(delta: torch.Tensor) -> torch.Tensor:
    """Maps a tensor of any shape into [-2 pi, 0]: the identity inside the interval, reflected at its bounds outside.

    The derivative is 1 or -1, so a value outside still gets a gradient, and gradients of micro-batches add up to that
    of the whole batch.
    """
    width = 2 * math.pi
    cell = torch.floor(-delta / width)
    outside = torch.where(cell % 2 == 0, delta + cell * width, -delta - (cell + 1) * width)
    return torch.where((delta >= -width) & (delta <= 0), delta, outside)


class _Softplus(torch.autograd.Function):
    """softplus whose backward needs the result only, and one tensor of memory.

    (PyTorch's own reports wrong strides to torch.compile.)
    """

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor) -> torch.Tensor:
        magnitude = nn.functional.softplus(features)
        ctx.save_for_backward(magnitude)
        return magnitude

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (magnitude,) = ctx.saved_tensors
        # The derivative is sigmoid(x) = 1 - exp(-softplus(x)).
        if torch.is_grad_enabled():
            # A second derivative is wanted: nothing may change in place.
            return grads[0] * -torch.expm1(-magnitude)
        return torch.neg(magnitude).expm1_().neg_().mul_(grads[0])


class _Turn(torch.autograd.Function):
    """(mu cos, mu sin, plain) from (mu, plain): the products are written once, and read once by the backward.

    features (B, H, T, D), cos and sin (1 or B, 1 or H, T, R), float32 or the type of the features.
    """

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        R = cos.shape[-1]
        ctx.save_for_backward(features, cos, sin)
        polar = features[..., :R]
        if torch.compiler.is_compiling():
            # ExecuTorch has no empty tensor of a length that is not known.
            return _turned(features, cos, sin)
        turned = features.new_empty(*features.shape[:-1], features.shape[-1] + R)
        torch.mul(polar, cos, out=turned[..., :R])
        torch.mul(polar, sin, out=turned[..., R : 2 * R])
        if features.shape[-1] > R:
            turned[..., 2 * R :] = features[..., R:]
        return turned

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        features, cos, sin = ctx.saved_tensors
        R = cos.shape[-1]
        real, imaginary, plain = grads[0].split((R, R, features.shape[-1] - R), dim=-1)
        grad_features = (real * cos).addcmul_(imaginary, sin)
        if plain.shape[-1]:
            grad_features = torch.cat((grad_features, plain), dim=-1)
        if not ctx.needs_input_grad[1]:
            return grad_features, None, None
        polar = features[..., :R]
        return grad_features, (real * polar).sum_to_size(cos.shape), (imaginary * polar).sum_to_size(sin.shape)


def _turned(features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What `_Turn` computes, by differentiable operations."""
    R = cos.shape[-1]
    products = [(features[..., :R] * factor).to(features.dtype) for factor in (cos, sin)]
    return torch.cat([*products, features[..., R:]] if features.shape[-1] > R else products, dim=-1)


class PhaseShift(nn.Module):
    """The learned phase shifts delta: weight (H, R), in radians."""

    def __init__(self, heads: int, channels: int, start: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, channels))
        self.start = start

    def reset(self) -> None:
        if self.start == "zeros":
            init.zeros_(self.weight)
        else:
            init.uniform_(self.weight, -2 * math.pi, 0)

    @torch.no_grad()
    def upgrade(self) -> None:
        """Clamps weights of version 1, whose forward pass clamped them."""
        self.weight.clamp_(-2 * math.pi, 0)

    def forward(self, _: Any = None) -> torch.Tensor:
        """Returns delta folded into [-2 pi, 0]: float32 (H, R)."""
        return fold(self.weight.float())


class ShiftTables(nn.Module):
    """Cosines and sines of phase shifts; a module, so that an engine can store them once for all tokens."""

    def forward(self, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return delta.cos(), delta.sin()


class PolarTables(nn.Module):
    """Cosines and sines of all query and key positions, once per forward pass.

    On a CPU, those of the positions 0, 1, 2, ... are kept: in a decoding step they would cost as much as a layer.
    """

    def __init__(self, config: Any, parameters: PoPEParameters) -> None:
        super().__init__()
        self.config, self.parameters_ = config, parameters
        # Given frequencies by device, float32 (R,): a copy in each forward pass could not be part of a CUDA graph.
        self.given: dict[torch.device, torch.Tensor] = {}
        # cos and sin, float32 (positions, R); depends on nothing but the frequencies, which do not change.
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def _of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, float32 (1 or B, 1, T, R), of int64 positions (1 or B, T)."""
        if positions.device.type != "cpu" or not readable(positions) or positions.numel() == 0:
            return self._compute(positions[:, None])
        lowest, highest = map(int, positions.aminmax())
        length = highest + 1
        if lowest < 0 or length > KEPT_POSITIONS:
            return self._compute(positions[:, None])
        if self.kept is None or self.kept[0].shape[0] < length:
            # Autograd cannot save inference tensors, and this forward pass may be followed by a training step.
            with torch.inference_mode(False), torch.no_grad():
                self.kept = self._compute(torch.arange(min(KEPT_POSITIONS, max(256, 2 * length))))
        first = int(positions[0, 0])
        if torch.equal(positions, torch.arange(first, first + positions.shape[1])[None]):
            consecutive = slice(first, first + positions.shape[1])
            return self.kept[0][None, None, consecutive], self.kept[1][None, None, consecutive]
        return self.kept[0][positions[:, None]], self.kept[1][positions[:, None]]

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(positions.device.type, enabled=False):
            phases = positions[..., None].float() * self.frequencies(positions)
            return phases.cos(), phases.sin()

    def frequencies(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the frequencies of the polar channels, float32 (R,), on the device of the positions."""
        device = positions.device
        if self.parameters_.frequencies is None or not readable(positions):
            return pope_frequencies(self.config, self.parameters_, device)
        if device not in self.given:
            with torch.inference_mode(False):
                self.given[device] = pope_frequencies(self.config, self.parameters_, device)
        return self.given[device]

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> tuple[torch.Tensor, ...]:
        """Returns cos and sin of the queries, then of the keys: float32 (1 or B, 1, Q or K, R)."""
        query_positions, key_positions = context.query_positions, context.key_positions
        key_tables = self._of(key_positions)
        query_tables = key_tables if query_positions is key_positions else self._of(query_positions)
        return *query_tables, *key_tables


class PoPE(PositionEncoding):
    """Polar Coordinate Positional Embedding (Gopalakrishnan et al. 2025, arXiv 2509.10534, Eq. 3 to 7).

    The logit of a query at position t and a key at position s is

        sum_c mu(q)_c mu(k)_c cos((s - t) theta_c + delta_c) * scaling

    with magnitudes mu = softplus, one frequency per channel, and a learned delta per query head and frequency, folded
    into [-2 pi, 0] (see `fold`). The scaling is the attention's own, 1/sqrt(D), unless `scale` differs.
    The cache holds the unrotated magnitudes, D numbers a key; delta sits on the query's phase, so that heads which
    share a key share its cache. After rotation queries and keys are D + R wide.

    The position of a cached key is derived from the attention mask, assuming that cached tokens were consecutive.
    """

    name = "pope"
    paper = "Gopalakrishnan et al. 2025 (2509.10534)"
    summary = "content sets magnitudes, position sets phases"
    parameters_class = PoPEParameters

    def __init__(self, config: Any, parameters: PoPEParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        self.rotated = rotated_channels(config, parameters)
        self.delta = None
        if parameters.use_delta:
            self.delta = PhaseShift(config.num_attention_heads, self.rotated, parameters.delta_init)
            self.shift_tables = ShiftTables()

    @classmethod
    def shared(cls, config: Any, parameters: PoPEParameters) -> PolarTables:
        return PolarTables(config, parameters)

    def before_cache(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replaces the first R channels by their magnitudes (Eq. 3)."""
        turned = self._magnitude(query)
        return turned if self.parameters_.scale == "1/sqrt(d)" else turned * math.sqrt(0.5), self._magnitude(key)

    def _magnitude(self, features: torch.Tensor) -> torch.Tensor:
        kind = self.parameters_.magnitude
        if kind == "identity":
            return features
        polar, plain = features[..., : self.rotated], features[..., self.rotated :]
        if kind == "relu":
            polar = torch.relu(polar)
        else:
            softplus = nn.functional.softplus if in_transform() else _Softplus.apply
            polar = softplus(polar.float()).to(features.dtype)
        return torch.cat((polar, plain), dim=-1) if plain.shape[-1] else polar

    @classmethod
    def added_channels(cls, config: Any, parameters: PoPEParameters) -> int:
        return rotated_channels(config, parameters)

    def after_cache(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries (B, H, Q, D + R) and keys (B, G, K, D + R): real parts, imaginary parts, plain channels."""
        *_, key_cos, key_sin = context.shared[self.name]
        query_tables = self._query_tables(query, context)
        key_tables = key_cos.to(key.dtype), key_sin.to(key.dtype)
        turn = _turned if in_transform() else _Turn.apply
        return turn(query, *query_tables), turn(key, *key_tables)

    def _query_tables(self, query: torch.Tensor, context: PositionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin of the queries' phases, delta included: (1 or B, 1 or H, Q, R), in their type."""
        query_cos, query_sin, *_ = context.shared[self.name]
        if self.delta is not None:
            # The key's phase is s theta + delta (Eq. 7); on the query that is t theta - delta.
            first = context.head_offset
            delta = self.delta(None)[first : first + query.shape[1], None]
            delta_cos, delta_sin = self.shift_tables(delta)
            query_cos, query_sin = (
                torch.addcmul(query_cos * delta_cos, query_sin, delta_sin),
                torch.addcmul(query_sin * delta_cos, query_cos, delta_sin, value=-1),
            )
        return query_cos.to(query.dtype), query_sin.to(query.dtype)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
    ) -> tuple[torch.Tensor, None] | None:
        """Decodes one new token on a CPU, where writing all rotated keys takes longer than the attention."""
        fast = query.shape[2] == 1 and query.device.type == "cpu" and options["implementation"] in ("sdpa", "blockwise")
        if not fast or options["dropout"] > 0 or torch.is_grad_enabled() or not readable(query):
            return None
        *_, key_cos, key_sin = context.shared[self.name]
        query_tables = self._query_tables(query, context)
        return decode_on_cpu(query, key, value, mask, query_tables, (key_cos, key_sin), options["scaling"]), None

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: PositionContext, **options: Any
    ) -> torch.Tensor:
        from .kernel_pope import pope_attention

        first = context.head_offset
        shift = None if self.delta is None else self.delta(None)[first : first + query.shape[1]]
        tables = context.shared[self.name]
        if query.dtype != torch.float32:
            # The kernel reads halves beside features that are no finer.
            tables = context.once("pope, half", lambda: [table.half() for table in context.shared[self.name]])
        phases = [table.squeeze(1) for table in tables]
        return pope_attention(query, key, value, (*phases, shift), **options)


def decode_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    query_tables: tuple[torch.Tensor, torch.Tensor],
    key_tables: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
) -> torch.Tensor:
    """Attention of one query (B, H, 1, D) to all keys (B, G, K, D), some keys at a time; rotated keys are not written.

    `query` and `key` are magnitudes, the tables cos and sin as in `_Turn`. The mask is None for all keys, key ranges,
    or (B, 1 or H, 1, K), bool or additive. Returns (B, H, 1, V), in the type of the query.
    """
    B, G, K, D = key.shape
    H, R = query.shape[1], query_tables[0].shape[-1]
    n = H // G
    dtype = torch.promote_types(query.dtype, torch.float32)
    real, imaginary = ((query[..., :R] * table).to(dtype).reshape(B, G, n, R) for table in query_tables)
    plain = query[..., R:].to(dtype).reshape(B, G, n, D - R)
    chunks = max(1, round(key.numel() / (CHUNK_NUMBERS * torch.get_num_threads())))
    products = []
    with torch.autocast("cpu", enabled=False):
        for part, cos, sin in zip(*(tensor.tensor_split(chunks, dim=2) for tensor in (key, *key_tables))):
            polar = part[..., :R]
            if n == 1:
                # With one query to a key, rotating the query back by each key's phase takes fewer passes.
                product = (cos * real).addcmul_(sin, imaginary).mul_(polar).sum(-1, keepdim=True)
            else:
                product = (polar * cos) @ real.transpose(2, 3) + (polar * sin) @ imaginary.transpose(2, 3)
            if R < D:
                product += part[..., R:].to(dtype) @ plain.transpose(2, 3)
            products.append(product)
        logits = torch.cat(products, dim=2).transpose(2, 3).reshape(B, H, 1, K) * scaling
        if mask is not None:
            mask = dense_mask(mask, 1) if is_key_ranges(mask) else mask
            lowest = torch.finfo(dtype).min
            logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
        weights = torch.softmax(logits, dim=-1).to(value.dtype)
        return (weights.view(B, G, n, K) @ value).view(B, H, 1, -1).to(query.dtype)
