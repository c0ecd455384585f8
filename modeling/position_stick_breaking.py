"""Stick-breaking attention (Tan, Shen, Yang, Courville, Panda 2024, 2410.17980): replaces softmax, needs no positions.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D key width, V value width; N = B * G;
C a chunk of N; n = H // G heads that share a key head; R rows of a block; W columns of its window (newest key first,
see `attention_blockwise`).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.utils import logging

from .attention_blockwise import (
    DIRECT_ROWS,
    MASKED,
    BiasInputs,
    Block,
    BlockBias,
    attend_in_blocks,
    autocast_inputs,
    check_inputs,
    direct_attention,
)
from .attention_mask import causal_mask, dense_mask, is_key_ranges
from .learned_table import LearnedTable
from .position_base import Parameters, PositionContext, PositionEncoding

logger = logging.get_logger(__name__)

# Above it softplus(x) is taken as x (the paper's stabilised softplus).
LINEAR = 15.0

# An additive mask hides a key with numbers below this: the lowest one of any type, -inf, -1e4.
HIDDEN = -1e3

# A stick is spent when exp(-this) of it is left: far below what its output resolves in that type.
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


class StickBias(BlockBias):
    """Stick-breaking attention as a term: the weights are exp(z - sums of softplus). Setting: 1 if own keys are hidden.

    Keys further left than where the stick of every row of a block is spent are not touched. The window of one block is
    a good guess for the next. Sticks that are never spent (all logits far below 0) need all keys: correct, and slower.
    """

    name = "stick_breaking"
    reads_content = True
    fades = True
    softmax = False

    def prepare(self) -> None:
        (strict,), size = self.settings, self.attention.block_size
        # Row r of a block has its own key in column R - 1 - r; of a 4D mask the own keys are taken out already.
        own = torch.eye(size, dtype=self.attention.dtype, device=self.attention.device).flip(1)
        self.own_logits = own * MASKED if strict and self.attention.mask is None else None
        if strict and not self.attention.aligned:
            # The own key is the newest that a row sees.
            self.attention.high, self.own_logits = self.attention.high - 1, None
        self.limit = SPENT[self.attention.dtype]
        # With logits near 0, of which each takes 0.7 of the limit.
        self.guess = size + 96

    def logits(self, block: Block, *, keep: bool) -> tuple[Block, torch.Tensor, torch.Tensor]:
        """Returns the part of a block in which sticks last, its logits, and what is left of them (C, n, R)."""
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
            spent = attention.buffer(2, *logits.shape)
            torch.ops.aten.softplus.out(logits, 1.0, LINEAR, out=spent)
            spent.cumsum_(-1)
            if not attention.by_data:
                break
            done = spent[..., -1] >= self.limit
            if attention.low is not None:
                # The rest of the columns is hidden from a row whose document begins in the window.
                first = attention.low[block.batch, block.rows]
                done |= (first >= attention.K - part.columns.stop)[:, None]
            if width == all_columns or bool(done.all()):
                self._guess_next(spent, all_columns, bool(done.all()))
                break
            width = min(all_columns, width + width // 2)
        left = torch.exp(-spent[..., -1])
        if not keep:
            return part, logits.sub_(spent), left
        self.state = (logits, spent, left)
        return part, torch.sub(logits, spent, out=attention.buffer(3, *logits.shape)), left

    def _guess_next(self, spent: torch.Tensor, all_columns: int, done: bool) -> None:
        # The first row of a block spends last, as a rule.
        spending = int((spent[:, :, 0] < self.limit).sum(-1).max())
        if spending < spent.shape[-1]:
            self.guess = (spending * 9 // 128 + 2) * 16
        elif not done:
            self.guess = max(self.guess, 2 * all_columns)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        (logits, spent, left), of_left = self.state, self.attention.grad_numbers
        self.state = ()
        # d(log A_ij); its sum over j <= k, and the remainder's part, is the gradient of -softplus(z_ik).
        older = torch.cumsum(grad, -1, out=spent)
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
    """Stick-breaking attention, in memory proportional to the length; touches only keys for which some stick is left.

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
    check_inputs(query, key, value, mask.detach() if direct and mask is not None else mask)
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


# Devices on which flash-linear-attention is used.
FUSED_DEVICES = ("cuda",)


@functools.cache
def _fused_attention() -> Callable[..., Any] | None:
    """Returns the kernel of flash-linear-attention, or None where it is not installed, which is said once."""
    try:
        from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn
    except ImportError as error:
        reason = str(error)
    else:
        if "scale" in inspect.signature(parallel_stickbreaking_attn).parameters:
            return parallel_stickbreaking_attn
        reason = "it is older than 0.6"
    logger.warning_once(
        "Stick-breaking attention is faster on a GPU with flash-linear-attention: `pip install fla-core`. PyTorch "
        f"computes it now ({reason})."
    )
    return None


def _fused_supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout: float) -> bool:
    """Returns True if flash-linear-attention computes the call: for example not decoding, nor dropout."""
    device, dtype = query.device, query.dtype
    if device.type not in FUSED_DEVICES or torch.compiler.is_compiling():
        return False
    if device.type == "cuda":
        # Triton needs Ampere or newer. `_documents` waits for the device, which a CUDA graph cannot.
        old = torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
        if old or (mask is not None and torch.cuda.is_current_stream_capturing()):
            return False
    # Its products of float32 have TF32.
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return (
        dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not (exact and device.type == "cuda")
        and dtype == key.dtype == value.dtype
        and query.shape[2] == key.shape[2]
        and max(query.shape[3], value.shape[3]) <= 256
        and (mask is None or is_key_ranges(mask))
        and dropout == 0
        and _fused_attention() is not None
    )


def _documents(key_ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the tokens that are not padding, in B * T, and where documents begin and end among them, for Q = K = T.

    None if that does not describe what the rows see, or everything is padding.
    """
    B, T = key_ranges.shape[0], key_ranges.shape[2] // 2
    (low, high), valid = key_ranges[:, 0, :T].unbind(-1), key_ranges[:, 0, T:, 0] != 0
    newest = torch.arange(1, T + 1, device=key_ranges.device)
    differs = ((high > low) != valid) | (valid & (high != newest))
    tokens = valid.flatten().nonzero()[:, 0]
    if not len(tokens) or bool(differs.any()):
        return None
    document = low + T * torch.arange(B, device=key_ranges.device)[:, None]
    _, lengths = torch.unique_consecutive(document.flatten()[tokens], return_counts=True)
    return tokens, F.pad(lengths.cumsum(0), (1, 0))


class _FirstDerivative(torch.autograd.Function):
    """The identity. It refuses gradients of gradients, from which the kernel's part would be missing."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "stick-breaking attention by flash-linear-attention has no second derivative: use "
                "attn_implementation='eager' for gradients of gradients"
            )
        return grads


def fused_stick_breaking_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None = None, scaling: float,
    inclusive: bool = False, dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Stick-breaking attention by flash-linear-attention, or None where it does not compute the call.

    Arguments and results are those of `stick_breaking_attention`, but for the remainder's type, that of the query.
    Documents and padding are sequences of different lengths beside each other, without the padding.
    """
    query, key, value = autocast_inputs(query, key, value)
    documents = None
    if not _fused_supports(query, key, value, mask, dropout):
        return None
    if mask is not None:
        documents = _documents(mask)
        if documents is None:
            return None
    B, H, T, _ = query.shape
    # (B, T, H, D), as projections leave them in memory.
    inputs = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    attend: Any = _fused_attention()
    if documents is None:
        output, remainder = attend(*inputs, scale=scaling, attend_current=inclusive)
    else:
        tokens, bounds = documents
        inputs = [tensor.flatten(0, 1)[tokens][None] for tensor in inputs]
        packed, left = attend(*inputs, scale=scaling, attend_current=inclusive, cu_seqlens=bounds)
        output = packed.new_zeros(B * T, *packed.shape[2:]).index_copy(0, tokens, packed[0]).unflatten(0, (B, T))
        remainder = left.new_ones(B * T, H).index_copy(0, tokens, left[0]).unflatten(0, (B, T))
    output, remainder = _FirstDerivative.apply(output, remainder)
    return output.transpose(1, 2), remainder.transpose(1, 2)


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
