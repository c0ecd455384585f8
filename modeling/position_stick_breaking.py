"""Stick-breaking attention (Tan, Shen, Yang, Courville, Panda 2024, 2410.17980): replaces softmax, needs no positions.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D key width, V value width; N = B * G;
C a chunk of N; n = H // G heads that share a key head; R rows of a block; W columns of its window (newest key first,
see `attention_blockwise`).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_blockwise import (
    DIRECT_ROWS,
    MASKED,
    Block,
    _add_product,
    _Attention,
    _product,
    _reversed,
    _without_autocast,
    autocast_inputs,
    block_rows,
    check_inputs,
    compute_dtype,
)
from .attention_mask import causal_mask, dense_mask, is_ranges
from .kernel_operator import Operator
from .learned_table import LearnedTable
from .position_base import Parameters, PositionContext, PositionEncoding

# Above it softplus(x) is taken as x (the paper's stabilised softplus).
LINEAR = 15.0

# An additive mask hides a key with numbers below this: the lowest one of any type, -inf, -1e4.
HIDDEN = -1e3

# A stick is spent when exp(-this) of it is left: far below what its output resolves in that type. (Where exp(-x) leaves
# the range of normal numbers, processors take a hundred times as long.)
SPENT = {torch.float32: 40.0, torch.float64: 80.0}


@dataclasses.dataclass(frozen=True)
class StickBreakingParameters(Parameters):
    """Parameters of stick-breaking attention.

    Attributes:
        inclusive: a token may attend to itself (j <= i). False: only to older ones (j < i), as in the paper.
        remainder: what the rest of the stick, 1 - sum_j A_ij, is multiplied with: "none"; "value", the value of the
            query's own token; "head_bias", a learned vector of each head, and then a GroupNorm of each head's output
            follows, as in the released model.
    """

    inclusive: bool = False
    remainder: Literal["none", "value", "head_bias"] = "none"

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        if config.attention_weights != "softmax":
            raise ValueError(
                f"attention_weights={config.attention_weights!r} is not valid with position_encoding='stick_breaking', "
                "which has weights of its own: it must be 'softmax', the default."
            )
        return iter(())


def break_stick(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights (..., K) and what is left, (...), of logits z (..., K), `MASKED` where hidden, oldest key first.

    log A_ij = z_ij - sum of softplus(z_ik) over k = j..i: the paper's log-space form, with beta_ij = sigmoid(z_ij).
    """
    spent = F.softplus(logits, threshold=LINEAR).flip(-1).cumsum(-1)
    return torch.exp(logits - spent.flip(-1)), torch.exp(-spent[..., -1])


def _without_own(mask: torch.Tensor) -> torch.Tensor:
    """Hides the newest key that each row sees, its own token, in a 4D mask (..., Q, K), bool or additive."""
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    own = mask.shape[-1] - 1 - seen.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return mask.scatter(-1, own, False if mask.dtype == torch.bool else float("-inf"))


def _direct(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    strict: bool,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All weights at once, by ordinary differentiable operations: the specification, and the fast way for a few rows.

    Of a 4D mask the own keys are taken out already. Returns the output, the remainder and the weights.
    """
    B, H, Q, D = query.shape
    G, K, V = key.shape[1], key.shape[2], value.shape[3]
    dtype = compute_dtype(query.dtype)
    with _without_autocast(query.device):
        logits = query.reshape(B, G, H // G * Q, D) @ key.transpose(2, 3)
        logits = (logits.to(dtype) * scaling).view(B, H, Q, K)
        if mask is not None and mask.is_floating_point():
            logits = (logits + mask.to(dtype)).clamp(min=MASKED)
            logits = logits.masked_fill(mask <= HIDDEN, MASKED)
        else:
            visible = causal_mask(Q, K, query.device)[None, None] if mask is None else mask
            if mask is None or is_ranges(mask):
                visible = dense_mask(visible, Q) if is_ranges(visible) else visible
                visible = _without_own(visible) if strict else visible
            logits = logits.masked_fill(~visible, MASKED)
        weights, remainder = break_stick(logits)
        weights = F.dropout(weights, dropout).to(query.dtype)
        output = weights.to(value.dtype).view(B, G, H // G * Q, K) @ value
        return output.view(B, H, Q, V), remainder, weights


class _Window:
    """The keys of a block up to where the stick of every row is spent; those further left are not touched.

    The window of one block is a good guess for the next. Sticks that are never spent (all logits far below 0) need all
    keys: correct, and slower.
    """

    def __init__(self, attention: _Attention, strict: bool) -> None:
        self.attention = attention
        size = attention.block_size
        # Row r of a block has its own key in column R - 1 - r.
        own = torch.eye(size, dtype=attention.dtype, device=attention.device).flip(1)
        self.own_logits = own * MASKED if strict else None
        if strict and not attention.aligned:
            # The own key is the newest that a row sees.
            attention.high, self.own_logits = attention.high - 1, None
        self.limit = SPENT[attention.dtype]
        self.least = math.exp(-self.limit)
        # With logits near 0, of which each takes 0.7 of the limit.
        self.guess = size + 96

    def open(self, block: Block) -> tuple[slice, torch.Tensor, torch.Tensor]:
        """Returns the window's columns, the logits (C, n, R, W), and the sums of softplus from the newest key on."""
        attention, columns = self.attention, block.columns
        all_columns = columns.stop - columns.start
        R = block.rows.stop - block.rows.start
        width = min(all_columns, self.guess) if attention.by_data else all_columns
        while True:
            part = dataclasses.replace(
                block,
                columns=slice(columns.start, columns.start + width),
                visible=None if block.visible is None else block.visible[..., :width],
                additive=None if block.additive is None else block.additive[..., :width],
            )
            logits = attention.logits(part, keep=False)
            # Of a 4D mask the own keys are taken out already.
            if self.own_logits is not None and attention.mask is None:
                near = min(R, width)
                logits[..., :near].add_(attention._future(self.own_logits, R, near))
            spent = attention.buffer(1, *logits.shape)
            torch.ops.aten.softplus.out(logits, 1.0, LINEAR, out=spent)
            spent.cumsum_(-1)
            if not attention.by_data:
                return part.columns, logits, spent
            done = spent[..., -1] >= self.limit
            if attention.low is not None:
                # The rest of the columns is hidden from a row whose document begins in the window.
                first = attention.low[block.batch, block.rows]
                done |= (first >= attention.K - part.columns.stop)[:, None]
            if width == all_columns or bool(done.all()):
                break
            width = min(all_columns, width + width // 2)
        # The first row of a block spends last, as a rule.
        spending = int((spent[:, :, 0] < self.limit).sum(-1).max())
        if spending < width:
            self.guess = (spending * 9 // 128 + 2) * 16
        elif not bool(done.all()):
            self.guess = max(self.guess, 2 * all_columns)
        return part.columns, logits, spent

    def weights(self, logits: torch.Tensor, spent: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Returns the weights (C, n, R, W), those below exp(-limit) as 0."""
        # The exponential of numbers far below 0 would be slow.
        torch.sub(logits, spent, out=out).clamp_(min=-self.limit - 1).exp_()
        return torch.threshold_(out, self.least, 0.0)


def _forward(
    tensors: Sequence[Any], strict: bool, block_size: int, scaling: float, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, mask, seed = tensors
    with torch.no_grad(), _without_autocast(query.device):
        attention = _Attention(query, key, value, mask, (), seed, scaling, dropout, block_size)
        window = _Window(attention, strict)
        N, n, Q, V = attention.N, attention.n, attention.Q, attention.V
        out = query.new_zeros(*query.shape[:3], V)
        remainder = torch.ones(query.shape[:3], dtype=attention.dtype, device=query.device)
        out_view, remainder_view = out.view(N, n, Q, V), remainder.view(N, n, Q)
        for block in attention.blocks():
            chunk = block.chunk
            columns, logits, spent = window.open(block)
            C, n, R, W = logits.shape
            remainder_view[chunk, :, block.rows] = torch.exp(-spent[..., -1])
            weights = window.weights(logits, spent, out=logits)
            if dropout > 0:
                weights.mul_(attention.keep_mask(block, weights))
            rows = _product(weights.view(C, n * R, W).to(value.dtype), attention.value[chunk, columns])
            out_view[chunk, :, block.rows] = rows.view(C, n, R, V).to(out.dtype)
        return out, remainder


def _backward(
    grads: Sequence[Any], tensors: Sequence[Any], results: Sequence[torch.Tensor], strict: bool, block_size: int,
    scaling: float, dropout: float,
) -> list[torch.Tensor]:  # fmt: skip
    (query, key, value, mask, seed), (grad, grad_remainder) = tensors, grads
    with torch.no_grad(), _without_autocast(query.device):
        attention = _Attention(query, key, value, mask, (), seed, scaling, dropout, block_size)
        window = _Window(attention, strict)
        N, n, Q, K, D, V = attention.N, attention.n, attention.Q, attention.K, attention.D, attention.V
        grad_query = torch.zeros(N, n, Q, D, dtype=attention.dtype, device=query.device)
        grad_key = torch.zeros(N, K, D, dtype=attention.dtype, device=query.device)
        grad_value = torch.zeros(N, K, V, dtype=attention.dtype, device=query.device)
        grad = grad.reshape(N, n, Q, V)
        grad_remainder = grad.new_zeros(N, n, Q) if grad_remainder is None else grad_remainder.reshape(N, n, Q)
        for block in attention.blocks():
            chunk = block.chunk
            columns, logits, spent = window.open(block)
            C, n, R, W = logits.shape
            left = torch.exp(-spent[..., -1]).mul_(grad_remainder[chunk, :, block.rows])
            weights = window.weights(logits, spent, out=attention.buffer(2, C, n, R, W))
            grad_rows = grad[chunk, :, block.rows].reshape(C, n * R, V)
            key_part, value_part = attention.key[chunk, columns], attention.value[chunk, columns]
            shares = _product(grad_rows, value_part.transpose(1, 2), out=attention.buffer(3, C, n * R, W))
            shares = shares.view(C, n, R, W)
            dropped = weights
            if dropout > 0:
                keep = attention.keep_mask(block, weights)
                shares.mul_(keep)
                dropped = keep.mul_(weights)
            dropped = dropped.view(C, n * R, W).to(value.dtype)
            _add_product(grad_value[chunk, columns], dropped.transpose(1, 2), grad_rows)
            # d(log A_ij); its sum over j <= k, and the remainder's part, is the gradient of -softplus(z_ik).
            shares.mul_(weights)
            older = torch.cumsum(shares, -1, out=spent)
            total = older[..., -1:] + left[..., None]
            older.neg_().add_(total).add_(shares)
            grad_logits = shares.sub_(torch.ops.aten.softplus_backward(older, logits, 1.0, LINEAR))
            grad_logits = grad_logits.view(C, n * R, W).to(query.dtype)
            grad_query[chunk, :, block.rows] = _product(grad_logits, key_part).mul_(scaling).view(C, n, R, D)
            flat = block.query.reshape(C, n * R, D)
            _add_product(grad_key[chunk, columns], grad_logits.transpose(1, 2), flat)
        return [
            grad_query.view(query.shape).to(query.dtype),
            _reversed(grad_key.mul_(scaling).view(key.shape), key.shape).to(key.dtype),
            _reversed(grad_value.view(value.shape), value.shape).to(value.dtype),
        ]


_SETTINGS = "bool strict, int block_size, float scaling, float dropout"
_attention = Operator("stick_breaking", _SETTINGS, _forward, _backward, saved=slice(0))


def stick_breaking_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scaling: float,
    inclusive: bool = False,
    dropout: float = 0.0,
    block_size: int | None = None,
    direct: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Stick-breaking attention, in memory proportional to the length; touches only keys for which some stick is left.

    Hidden keys (padding, other documents, other branches of a tree) take nothing: beta 0, log(1 - beta) 0.

    Args:
        query: (B, H, Q, D), float16, bfloat16, float32 or float64.
        key: (B, G, K, D), H a multiple of G, K at least Q. Query row i has key slot K - Q + i without a 4D mask.
        value: (B, G, K, V).
        mask: None, ranges, or a 4D mask, as in `blockwise_attention`. With a 4D mask the newest key that a row sees
            is its own token, as in the masks of static caches and of trees.
        scaling: the factor on q.k.
        inclusive: tokens may attend to themselves.
        dropout: probability of dropping a weight; the remainder is that of all weights.
        block_size: query rows per block; None: chosen by the device.
        direct: True: all weights at once. None: so if there are at most 4 query rows.

    Returns:
        The output (B, H, Q, V) in the type of the query, the remainder 1 - sum_j A_ij (B, H, Q), float32 (float64 for
        float64), and with `direct=True` the weights (B, H, Q, K), otherwise None. Rows that see nothing give 0, and a
        remainder of 1.
    """
    check_inputs(query, key, value, mask.detach() if direct and mask is not None else mask)
    query, key, value = autocast_inputs(query, key, value)
    if mask is not None and not is_ranges(mask) and not inclusive:
        mask = _without_own(mask)
    if direct or (direct is None and query.shape[2] <= DIRECT_ROWS):
        output, remainder, weights = _direct(query, key, value, mask, scaling, not inclusive, dropout)
        return output, remainder, weights if direct else None
    seed = torch.randint(1 << 62, (1,), dtype=torch.int64) if dropout > 0 else None
    rows = block_size or block_rows(query.device)
    output, remainder = _attention((query, key, value), (mask, seed), not inclusive, rows, scaling, dropout)
    return output, remainder, None


class HeadNorm(nn.Module):
    """GroupNorm with one group for each head: weight and bias (H, D)."""

    def __init__(self, heads: int, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, channels))
        self.bias = nn.Parameter(torch.zeros(heads, channels))
        self.eps = eps

    def reset(self) -> None:
        init.ones_(self.weight)
        init.zeros_(self.bias)

    def forward(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """Normalises states (B, heads, Q, D), those of the heads from `first` on, over their channels."""
        heads = slice(first, first + states.shape[1])
        normed = F.layer_norm(states, states.shape[-1:], eps=self.eps)
        return normed * self.weight[heads, None].to(states.dtype) + self.bias[heads, None].to(states.dtype)


class StickBreaking(PositionEncoding):
    """Stick-breaking attention: each key, from the newest to the oldest, gets a share of the remaining weight.

        beta_ij = sigmoid(z_ij), z_ij the scaled, masked logit
        A_ij = beta_ij * product of (1 - beta_ik) over j < k < i (with `inclusive`: j <= i, and j < k <= i)
        output_i = sum_j A_ij v_j + (1 - sum_j A_ij) * what the remainder gets

    Recency is built in, so there are no positions and no limit on length. Weights sum to at most 1; with the default
    the first token of a text attends to nothing, and gets 0. Computed in log space, in float32. The blockwise path
    touches only the keys up to where the sticks are spent (less than 1e-17 is left).
    """

    name = "stick_breaking"
    paper = "Tan et al. 2024 (2410.17980)"
    summary = "replaces softmax: each key, from the newest to the oldest, gets a share of the remaining weight"
    parameters_class = StickBreakingParameters
    softmax = False

    def __init__(self, config: Any, parameters: StickBreakingParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        learned = parameters.remainder == "head_bias"
        heads = config.num_attention_heads
        self.head_bias = LearnedTable(heads, self.head_dim) if learned else None
        self.norm = HeadNorm(heads, self.head_dim) if learned else None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        context: PositionContext,
        *,
        scaling: float,
        dropout: float,
        implementation: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, remainder, weights = stick_breaking_attention(
            query,
            key,
            value,
            mask=mask,
            scaling=scaling,
            inclusive=self.parameters_.inclusive,
            dropout=dropout,
            direct=None if implementation == "blockwise" else True,
        )
        return self._add_remainder(output, remainder, context), weights

    def kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: PositionContext,
        **options: Any,
    ) -> torch.Tensor:
        from .kernel_scan import stick_attention

        output, remainder = stick_attention(query, key, value, inclusive=self.parameters_.inclusive, **options)
        return self._add_remainder(output, remainder, context)

    def _add_remainder(self, output: torch.Tensor, remainder: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns outputs (B, H, Q, D) with what the remainder (B, H, Q) is multiplied with."""
        if self.parameters_.remainder == "none":
            return output
        heads, dtype = output.shape[1], output.dtype
        output = output.to(remainder.dtype)
        if self.head_bias is not None and self.norm is not None:
            first = context.head_offset
            bias = self.head_bias(None)[first : first + heads, None]
            output = self.norm(output + remainder[..., None] * bias, first)
        else:
            own = context.new_value
            output = output + remainder[..., None] * own.repeat_interleave(heads // own.shape[1], dim=1)
        return output.to(dtype)
