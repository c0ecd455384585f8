"""FoX, the Forgetting Transformer (Lin, Nikishin, He, Courville 2025, 2503.02130).

Axes: B batch, H query heads, G key heads, n = H // G heads that share a key head, Q query length, K key length, D head
dim, E hidden size; in blocks: C a chunk of (batch, key head), R rows, W columns (newest key first, see
`attention_blockwise`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .attention_blockwise import Block, BlockBias, join_digits, split_digits
from .attention_mask import is_hidden
from .head_linear import HeadLinear
from .position_base import Parameters, PositionContext, PositionEncoding

# Rows of a block that take their sums from one reference: the fewer, the smaller the numbers that are rounded.
REFERENCE_ROWS = 16


@dataclasses.dataclass(frozen=True)
class FoXParameters(Parameters):
    """Parameters of FoX.

    Attributes:
        gate_bias_init: the bias of the forget gates at the start; at 0, half of the past is forgotten at each token.
    """

    unknown_key_hint = (
        "The paper's Pro block is set by fields of the configuration: output_gate, output_norm, qk_norm, "
        "key_value_shift."
    )

    gate_bias_init: float = 0.0


class FoXBias(BlockBias):
    """The bias of FoX: log f of every key, (B, H, K).

    Softmax does not see a constant of a row. So where a row sees all keys between its oldest one and itself, the bias
    is the sum of log f from the newest key of the block to the key, the same for all rows: one addition. It is taken
    less the sum up to the newest row of a few (`REFERENCE_ROWS`), not from the beginning of the sequence: after
    thousands of tokens, a difference of such sums has no digits left. With a 4D mask, each row has sums of its own.
    """

    name = "fox"
    fades = True
    differentiable = (True,)

    @staticmethod
    def bias(content: torch.Tensor, query: torch.Tensor, tensors: Sequence, settings: Sequence) -> torch.Tensor:
        (log_forget,) = tensors
        gates = torch.where(is_hidden(content), 0.0, log_forget[:, :, None].to(content.dtype))
        return _newer(gates.flip(-1)).flip(-1)

    def prepare(self) -> None:
        attention = self.attention
        self.log_forget = attention.of_keys(self.tensors[0])
        # True if rows see all keys between two that they see, but for padding.
        self.contiguous = attention.mask is None and attention.aligned
        self.padding = None
        if attention.low is not None:
            self.padding = (~attention.valid).flip(1).repeat_interleave(attention.G, dim=0)[:, None]
            self.log_forget = self.log_forget.masked_fill(self.padding, 0.0)
        # The gradients of the sums up to each token; the gradients of log f from rows with sums of their own.
        self.grad_columns = torch.zeros_like(self.log_forget, dtype=torch.float64)
        self.grad_own = torch.zeros_like(self.log_forget)

    @staticmethod
    def _seen(block: Block) -> torch.Tensor:
        if block.visible is not None:
            return block.visible
        assert block.additive is not None, "a block that is not causal has one of the two masks"
        return ~is_hidden(block.additive)

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        gates = self.log_forget[block.chunk, :, None, block.columns]
        if not (block.causal_only or self.contiguous):
            logits.add_(_newer(torch.where(self._seen(block), gates, 0.0)))
            return
        sums = _newer(gates)
        R, W = logits.shape[2:]
        for low in range(0, R, REFERENCE_ROWS):
            high = min(low + REFERENCE_ROWS, R)
            # The column of row r is R - 1 - r; rows whose column is not in the block see nothing.
            newest = min(R - high, W - 1)
            logits[:, :, low:high].add_(sums - sums[..., newest : newest + 1])

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        # Rows sum to 0 but for rounding errors, which would add up over the sequence: they are taken into account.
        if not (block.causal_only or self.contiguous):
            # log f of a key is in the sums of all older keys.
            older = grad.sum(-1, keepdim=True) - grad.cumsum(-1)
            self.grad_own[block.chunk, :, block.columns].add_(torch.where(self._seen(block), older, 0.0).sum(2))
            return None
        # Sums of log f up to a row come in with its whole row, those up to a key, less, with its column.
        columns = self.grad_columns[block.chunk, :, block.columns]
        from_columns, from_rows = grad.sum(2).double(), grad.sum(-1).double()
        columns.sub_(from_columns)
        newest = min(grad.shape[2:])
        columns[..., :newest].add_(from_rows.flip(-1)[..., :newest])
        # Both add up to the same number; what is left by rounding would be in the gradients of all older keys.
        columns[..., 0].add_(from_columns.sum(-1) - from_rows.sum(-1))
        return None

    def gradients(self) -> list[torch.Tensor]:
        grad = self.grad_own + self.grad_columns.cumsum(-1).to(self.grad_own.dtype)
        if self.padding is not None:
            grad = grad.masked_fill_(self.padding, 0.0)
        return [grad.view(self.tensors[0].shape).flip(2)]


def _newer(gates: torch.Tensor) -> torch.Tensor:
    """Returns, of log f (..., W) with the newest key first, the sums over what is newer than each key."""
    return F.pad(gates.cumsum(-1)[..., :-1], (1, 0))


class FoX(PositionEncoding):
    """FoX, the Forgetting Transformer: attention with forget gates, which need no positions.

        f_t = sigmoid(w . x_t + b), one gate for each query head
        D_ij = sum of log f_l over l = j + 1 .. i, the tokens that row i sees
        logit = q_i . k_j / sqrt(d) + D_ij

    log f, float32, is cached beside the keys: two numbers of their type for each query head. The paper's "Pro" block
    adds the options of `attention_block`.
    """

    name = "fox"
    paper = "Lin et al. 2025 (2503.02130)"
    summary = "forget gates: each token fades the past by a learned factor that depends on its content"
    parameters_class = FoXParameters
    # The sum goes over visible keys; `flex_attention` makes its bias without the mask.
    bias_reads = "mask"
    block_bias = FoXBias

    def __init__(self, config: Any, parameters: FoXParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        bias = float(parameters.gate_bias_init)
        self.gate = HeadLinear(config.hidden_size, config.num_attention_heads, config.initializer_range, bias=bias)

    def state_width(self) -> int:
        # Two numbers for each query head.
        return 2 * self.config.num_attention_heads // self.config.num_key_value_heads

    def cached_state(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns log f in two digits, (B, G, Q, 2 n)."""
        logits = self.gate(hidden)
        log_forget = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        return split_digits(log_forget.unflatten(2, (key.shape[1], -1)).transpose(1, 2), key.dtype)

    def bias_inputs(self, context: PositionContext, scaling: float) -> tuple[tuple[torch.Tensor, ...], tuple]:
        log_forget = join_digits(context.states[self.name]).transpose(2, 3)
        return (log_forget.flatten(1, 2),), ()

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: PositionContext, **options: Any
    ) -> dict[str, Any]:
        (log_forget,), _ = self.bias_inputs(context, 1.0)
        Q, K = query.shape[2], log_forget.shape[2]
        slots = torch.arange(K - Q, K, device=query.device)[None]
        if (key_ranges := options["key_ranges"]) is not None:
            log_forget = log_forget * (key_ranges[:, :, Q:, 0] != 0)
            slots = key_ranges[:, 0, :Q, 1].long() - 1
        # In float64: differences of sums over thousands of tokens keep their digits. The gradients of the rows' numbers
        # are 0 but for rounding errors, which would otherwise add up over the keys.
        sums = log_forget.double().cumsum(-1)
        rows = slots.clamp(min=0)[:, None].expand(sums.shape[0], sums.shape[1], -1)
        return {"decay": (sums.gather(2, rows), sums)}
