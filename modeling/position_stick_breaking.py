"""Stick-breaking attention (Tan, Shen, Yang, Courville, Panda 2024, 2410.17980): replaces softmax, needs no positions.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D key width, V value width; N = B * G;
C a chunk of N; n = H // G heads that share a key head; R rows of a block; W columns of its near keys (newest key first,
see `attention_blockwise`).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_blockwise import (
    DIRECT_ROWS,
    HIDDEN_LOGIT,
    BiasInputs,
    Block,
    BlockBias,
    attend_in_blocks,
    autocast_inputs,
    check_blockwise_inputs,
    direct_attention,
)
from .attention_fla import fused_stick_breaking_attention
from .attention_mask import causal_mask, dense_mask, is_hidden, is_key_ranges
from .learned_table import LearnedTable
from .position_base import Parameters, PositionContext, PositionEncoding

# Above it softplus(x) is taken as x (the paper's stabilised softplus).
LINEAR = 15.0

# A remainder of less than exp(-this) is negligible: far below what the output resolves in that type.
NEGLIGIBLE_REMAINDER = {torch.float32: 40.0, torch.float64: 80.0}


@dataclasses.dataclass(frozen=True)
class StickBreakingParameters(Parameters):
    """Parameters of stick-breaking attention.

    Attributes:
        inclusive: a token may attend to itself (j <= i). False: only to older ones (j < i), as in the paper.
        remainder: what gets the weight that no key has, 1 - sum_j A_ij: "none"; "value": the value of the query's own
            token; "head_bias": a learned vector of each head. With "head_bias", a GroupNorm of each head's output
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
    """Returns weights (..., K) and what is left, (...), of logits z (..., K), `HIDDEN_LOGIT` if hidden, oldest first.

    log A_ij = z_ij - sum of softplus(z_ik) over k = j..i: the paper's log-space form, with beta_ij = sigmoid(z_ij).
    """
    sums = F.softplus(logits, threshold=LINEAR).flip(-1).cumsum(-1)
    return torch.exp(logits - sums.flip(-1)), torch.exp(-sums[..., -1])


def _without_own(mask: torch.Tensor) -> torch.Tensor:
    """Hides the newest key that each row sees, its own token, in a 4D mask (..., Q, K), bool or additive."""
    own = mask.shape[-1] - 1 - (~is_hidden(mask)).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return mask.scatter(-1, own, False if mask.dtype == torch.bool else float("-inf"))


class StickBias(BlockBias):
    """Stick-breaking attention as a bias: the weights are exp(z - sums of softplus). Setting: 1 if own keys are hidden.

    Only the near keys of a block are computed: those up to where the remainder of every row is negligible. Their number
    in one block is the first guess for the next. If a remainder never gets negligible, because all logits are far below
    0, all keys are near keys: correct, and slower.
    """

    name = "stick_breaking"
    reads_content = True
    fades = True
    softmax = False

    def prepare(self) -> None:
        (strict,), size = self.settings, self.attention.block_size
        # Row r of a block has its own key in column R - 1 - r; of a 4D mask the own keys are taken out already.
        own = torch.eye(size, dtype=self.attention.dtype, device=self.attention.device).flip(1)
        self.own_logits = own * HIDDEN_LOGIT if strict and self.attention.mask is None else None
        if strict and not self.attention.aligned:
            # The own key is the newest that a row sees.
            self.attention.high, self.own_logits = self.attention.high - 1, None
        self.limit = NEGLIGIBLE_REMAINDER[self.attention.dtype]
        # With logits near 0, of which each takes 0.7 of the limit.
        self.guess = size + 96

    def logits(self, block: Block, *, keep: bool) -> tuple[Block, torch.Tensor, torch.Tensor]:
        """Returns the block with its near keys, its logits, and the remainders (C, n, R)."""
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
            logits = attention.content(part)
            if self.own_logits is not None:
                near = min(R, width)
                logits[..., :near].add_(attention._future(self.own_logits, R, near))
            sums = attention.buffer(2, *logits.shape)
            torch.ops.aten.softplus.out(logits, 1.0, LINEAR, out=sums)
            sums.cumsum_(-1)
            if not attention.by_data:
                break
            done = sums[..., -1] >= self.limit
            if attention.low is not None:
                # The rest of the columns is hidden from a row whose document begins in the near keys.
                first = attention.low[block.batch, block.rows]
                done |= (first >= attention.K - part.columns.stop)[:, None]
            if width == all_columns or bool(done.all()):
                self._guess_next(sums, all_columns, bool(done.all()))
                break
            width = min(all_columns, width + width // 2)
        left = torch.exp(-sums[..., -1])
        if not keep:
            return part, logits.sub_(sums), left
        self.state = (logits, sums, left)
        return part, torch.sub(logits, sums, out=attention.buffer(3, *logits.shape)), left

    def _guess_next(self, sums: torch.Tensor, all_columns: int, done: bool) -> None:
        # The first row of a block usually needs the most keys.
        needed = int((sums[:, :, 0] < self.limit).sum(-1).max())
        if needed < sums.shape[-1]:
            self.guess = (needed * 9 // 128 + 2) * 16
        elif not done:
            self.guess = max(self.guess, 2 * all_columns)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        (logits, sums, left), of_left = self.state, self.attention.grad_numbers
        self.state = ()
        # d(log A_ij); its sum over j <= k, and the remainder's part, is the gradient of -softplus(z_ik).
        older = torch.cumsum(grad, -1, out=sums)
        total = older[..., -1:].clone()
        if of_left is not None:
            total.add_(left.mul_(of_left[block.chunk, :, block.rows])[..., None])
        older.neg_().add_(total).add_(grad)
        grad.sub_(torch.ops.aten.softplus_backward(older, logits, 1.0, LINEAR))
        return None


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
    """Stick-breaking attention, in memory proportional to the length; only keys with weights are read.

    Hidden keys (padding, other documents, other branches of a tree) take nothing: beta 0, log(1 - beta) 0.

    Args:
        query, key, value, scaling, block_size, direct: see `blockwise_attention`.
        mask: None, key ranges, or a 4D mask, as there. With a 4D mask the newest key that a row sees is its own token,
            as in the masks of static caches and of trees.
        inclusive: tokens may attend to themselves.
        dropout: probability of dropping a weight; the remainder is that of all weights.

    Returns:
        The output (B, H, Q, V) in the type of the query, the remainder 1 - sum_j A_ij (B, H, Q), float32 (float64 for
        float64), and with `direct=True` the weights (B, H, Q, K), otherwise None. Rows that see nothing give 0, and a
        remainder of 1.
    """
    check_blockwise_inputs(query, key, value, mask.detach() if direct and mask is not None else mask)
    query, key, value = autocast_inputs(query, key, value)
    at_once = direct or (direct is None and query.shape[2] <= DIRECT_ROWS)
    if not inclusive and (at_once or not (mask is None or is_key_ranges(mask))):
        if mask is None:
            mask = causal_mask(query.shape[2], key.shape[2], query.device)[None, None]
        mask = _without_own(dense_mask(mask, query.shape[2]) if is_key_ranges(mask) else mask)
    if not at_once:
        biases = [BiasInputs(StickBias, (), (not inclusive,))]
        output, remainder = attend_in_blocks(query, key, value, mask, scaling, biases, dropout, block_size)
        return output, remainder, None
    found = []

    def weigh(logits: torch.Tensor) -> torch.Tensor:
        weights, remainder = break_stick(logits)
        found.append(remainder)
        return weights

    output, weights = direct_attention(query, key, value, mask, scaling, weigh, dropout)
    return output, found[0], weights if direct else None


class HeadGroupNorm(nn.Module):
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
    touches only the keys up to where the remainder is negligible (less than 1e-17).
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
        self.norm = HeadGroupNorm(heads, self.head_dim) if learned else None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, context: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = {"inclusive": self.parameters_.inclusive, "scaling": options["scaling"], "dropout": options["dropout"]}
        blockwise = options["implementation"] == "blockwise"
        fused = fused_stick_breaking_attention(query, key, value, mask=mask, **given) if blockwise else None
        if fused is not None:
            return self._add_remainder(*fused, context), None
        direct = None if blockwise else True
        output, remainder, weights = stick_breaking_attention(query, key, value, mask=mask, direct=direct, **given)
        return self._add_remainder(output, remainder, context), weights

    def _add_remainder(self, output: torch.Tensor, remainder: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns outputs (B, H, Q, D) with what the remainder (B, H, Q) is multiplied with."""
        if self.parameters_.remainder == "none":
            return output
        heads, dtype = output.shape[1], output.dtype
        output = output.to(torch.promote_types(remainder.dtype, torch.float32))
        if self.head_bias is not None and self.norm is not None:
            first = context.head_offset
            bias = self.head_bias(None)[first : first + heads, None]
            output = self.norm(output + remainder[..., None] * bias, first)
        else:
            own = context.new_value
            output = output + remainder[..., None] * own.repeat_interleave(heads // own.shape[1], dim=1)
        return output.to(dtype)
