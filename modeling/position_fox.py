"""FoX, the Forgetting Transformer (Lin, Nikishin, He, Courville 2025, 2503.02130).

Axes: B batch, H query heads, G key heads, n = H // G heads that share a key head, Q query length, K key length, D head
dim, E hidden size; in blocks: C a chunk of (batch, key head), R rows, W columns (newest key first, see
`attention_blockwise`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_blockwise import TERMS, Block, Term
from .position_encoding import (
    BlockTerm,
    Parameters,
    PositionContext,
    PositionEncoding,
    SharedPositionEncoding,
    join_digits,
    split_digits,
)

# A logit below this is masked: half precision's masks begin at -65504.
HIDDEN = -5e3

# Rows of a block that take their sums from one reference: the fewer, the smaller the numbers that are rounded.
REFERENCE_ROWS = 16

# As in the authors' code.
NORM_EPS = 1e-6

PRO_PARTS = ("output_gate", "output_norm", "qk_norm", "key_value_shift")


@dataclasses.dataclass(frozen=True)
class FoXParameters(Parameters):
    """Parameters of FoX.

    Attributes:
        gate_bias_init: the bias of the forget gates at the start; at 0, half of the past is forgotten at each token.
        pro: the default of the four that follow, together the paper's "Pro" block; False leaves out one of them.
        output_gate: the output of the heads times sigmoid(W_g x), before the output projection.
        output_norm: RMSNorm of the output of each head, before the gate.
        qk_norm: RMSNorm of queries and keys of each head, before a rotation.
        key_value_shift: keys and values mixed with those of the token before, by a gate for each key head. Not with
            "rope".
    """

    gate_bias_init: float = 0.0
    pro: bool = False
    output_gate: bool | None = None
    output_norm: bool | None = None
    qk_norm: bool | None = None
    key_value_shift: bool | None = None

    def resolve(self, config: Any) -> "FoXParameters":
        return dataclasses.replace(self, **{part: self.pro for part in PRO_PARTS if getattr(self, part) is None})

    def validate(self, config: Any) -> None:
        if not math.isfinite(self.gate_bias_init):
            raise ValueError(
                f"position_encoding_parameters['fox']['gate_bias_init']={self.gate_bias_init!r} is not valid: it must "
                "be a finite number."
            )
        if self.pro and not any(getattr(self, part) for part in PRO_PARTS):
            raise ValueError(
                f"position_encoding_parameters['fox']['pro']={self.pro!r} has no effect: {', '.join(PRO_PARTS)} are "
                "all False. Set them to True or None, or pro to False."
            )
        if self.key_value_shift and "rope" in config.position_encoding.split("+"):
            raise ValueError(
                f"position_encoding_parameters['fox']['key_value_shift']={self.key_value_shift!r} is not valid for "
                f"position_encoding={config.position_encoding!r}: cached keys are rotated, each by its own position, "
                "and can not be mixed with their neighbours. It must be False, also with pro=True."
            )


class FoXTerm(Term):
    """The term of FoX: log f of every key, (B, H, K).

    Softmax does not see a constant of a row. So where a row sees all keys between its oldest one and itself, the term
    is the sum of log f from the newest key of the block to the key, the same for all rows: one addition. It is taken
    less the sum up to the newest row of a few (`REFERENCE_ROWS`), not from the beginning of the sequence: after
    thousands of tokens, a difference of such sums has no digits left. With a 4D mask, each row has sums of its own.
    """

    fades = True
    differentiable = (True,)

    @staticmethod
    def bias(
        content: torch.Tensor, query: torch.Tensor, tensors: Sequence[torch.Tensor], parameters: dict[str, Any]
    ) -> torch.Tensor:
        (log_forget,) = tensors
        gates = torch.where(content > HIDDEN, log_forget[:, :, None].to(content.dtype), 0.0)
        return _newer(gates.flip(-1)).flip(-1)

    def __init__(self, tensors: Sequence[torch.Tensor], parameters: dict[str, Any], attention: Any) -> None:
        super().__init__(tensors, parameters, attention)
        self.log_forget = attention.of_keys(tensors[0])
        # True if all keys between two that a row sees are seen or padding.
        self.contiguous = attention.mask is None
        self.padding = None
        if attention.segments is not None:
            segments = attention.segments.flip(1)
            self.contiguous = bool(((segments == segments.cummax(1).values) | (segments < 0)).all())
            self.padding = (attention.segments < 0).repeat_interleave(attention.G, dim=0)[:, None]
            self.log_forget = self.log_forget.masked_fill(self.padding, 0.0)
        # The gradients of the sums up to each token; the gradients of log f from rows with sums of their own.
        self.grad_columns = torch.zeros_like(self.log_forget, dtype=torch.float64)
        self.grad_own = torch.zeros_like(self.log_forget)

    @staticmethod
    def _seen(block: Block) -> torch.Tensor:
        if block.visible is not None:
            return block.visible
        assert block.additive is not None, "a block that is not causal has one of the two masks"
        return block.additive > HIDDEN

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


TERMS["fox"] = FoXTerm


class HeadLinear(nn.Linear):
    """A projection of the hidden states to numbers of each head; under tensor parallelism, to those of local heads."""

    tensor_parallel_style = "colwise"

    def __init__(self, inputs: int, outputs: int, std: float, bias: float | None = None) -> None:
        super().__init__(inputs, outputs, bias=bias is not None)
        self.std, self.bias_init = std, bias

    def reset(self) -> None:
        init.normal_(self.weight, mean=0.0, std=self.std)
        if self.bias_init is not None:
            init.constant_(self.bias, self.bias_init)


class HeadNorm(nn.Module):
    """RMSNorm of each head, with a scale for each head and channel, (heads, D), 1 at the start."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))

    def reset(self) -> None:
        init.ones_(self.weight)

    def forward(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """Norms states (B, heads, T, D), in float32, of the heads from `first` on; returns their type."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scale = self.weight[first : first + states.shape[1], None].to(wide.dtype)
        return (F.rms_norm(wide, wide.shape[-1:], eps=NORM_EPS) * scale).to(states.dtype)


class SharedFoX(SharedPositionEncoding):
    """Which token is the one before, once per forward pass, if keys and values are shifted."""

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> tuple[torch.Tensor, ...]:
        return previous_slots(context) if self.parameters_.key_value_shift else ()


def previous_slots(context: PositionContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the slot of the token before each key, int64 (1 or B, K), and whether there is one, bool (1 or B, K).

    Where there is none, the slot is the key's own.

    That is the last slot before it that is not padding, and in the same document: its position is smaller. Without a
    mask and without cached tokens, Transformers begins a document wherever positions do not go on by 1; so here. With a
    4D mask it is the last slot before it among those that a row which sees the key sees.
    """
    positions, mask = context["key_positions"], context["attention_mask"]
    length = positions.shape[1]
    slots = torch.arange(length, device=positions.device)
    if mask is not None and mask.ndim == 4:
        visible = mask[:, 0, :, :length]
        visible = visible if visible.dtype == torch.bool else visible > HIDDEN
        # All rows that see a key see the same before it, if documents and branches have one past each.
        first_row = visible.byte().argmax(1, keepdim=True)
        previous = _before(torch.where(visible, slots, -1)).gather(1, first_row)[:, 0]
        found = previous >= 0
        return torch.where(found, previous, slots), found
    previous = (slots - 1)[None] if mask is None else _before(torch.where(context["key_mask"], slots, -1))
    positions, previous = torch.broadcast_tensors(positions, previous)
    found, previous = previous >= 0, previous.clamp(min=0)
    step = positions - positions.gather(1, previous)
    alone = mask is None and context["query_positions"].shape[1] == length
    found = found & (step == 1 if alone else step > 0)
    return torch.where(found, previous, slots), found


def _before(marks: torch.Tensor) -> torch.Tensor:
    """Returns the largest of the marks before each one, (..., K), and -1 for the first."""
    return F.pad(marks.cummax(-1).values[..., :-1], (1, 0), value=-1)


class FoX(PositionEncoding):
    """FoX, the Forgetting Transformer: attention with forget gates, which need no positions.

        f_t = sigmoid(w . x_t + b), one gate for each query head
        D_ij = sum of log f_l over l = j + 1 .. i, the tokens that row i sees
        logit = q_i . k_j / sqrt(d) + D_ij

    log f, float32, is cached beside the keys: two numbers of their type for each query head.

    With `key_value_shift`, of raw keys k~ and values v~, with a_t, b_t = sigmoid(w . x_t) for each key
    head, and 0 for the token before the first of a document:

        k_t = a_t k~_(t-1) + (1 - a_t) k~_t, and RMSNorm of it with `qk_norm`
        v_t = b_t v~_(t-1) + (1 - b_t) v~_t

    The cache holds k~, v~, a and b, in the type of the keys, and every step mixes all of them again: so what was cached
    may be cropped, padded or masked.

    RMSNorm has a scale for each head and channel, as in the authors' code. In "fox+rope" queries and keys are normed
    before they are rotated.
    """

    name = "fox"
    paper = "Lin et al. 2025 (2503.02130)"
    summary = "forget gates: each token fades the past by a learned factor that depends on its content"
    parameters_class = FoXParameters
    shared_class = SharedFoX
    # flex_attention would take a bias that was made without the mask.
    stock_implementations: ClassVar[tuple[str, ...]] = ("sdpa",)
    default_implementation = "blockwise"
    has_bias = True
    biases_from_mask = True
    needs_key_positions = True
    needs_key_mask = True

    def __init__(self, config: Any, parameters: FoXParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        heads, std = config.num_attention_heads, config.initializer_range
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        hidden, head_dim = config.hidden_size, self.head_dim
        self.gate = HeadLinear(hidden, heads, std, bias=float(parameters.gate_bias_init))
        self.output_gate = HeadLinear(hidden, heads * head_dim, std) if parameters.output_gate else None
        self.output_norm = HeadNorm(heads, head_dim) if parameters.output_norm else None
        self.query_norm = HeadNorm(heads, head_dim) if parameters.qk_norm else None
        self.key_norm = HeadNorm(key_heads, head_dim) if parameters.qk_norm else None
        self.key_shift = HeadLinear(hidden, key_heads, std) if parameters.key_value_shift else None
        self.value_shift = HeadLinear(hidden, key_heads, std) if parameters.key_value_shift else None
        self.groups = heads // key_heads

    def defines(self, hook: str) -> bool:
        used = {
            "rotate": self.query_norm is not None,
            "mix_cached": self.key_shift is not None,
            "finish": self.output_gate is not None or self.output_norm is not None,
        }
        return used.get(hook, super().defines(hook))

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms queries, and keys if they are not to be shifted first."""
        assert self.query_norm is not None, "only norms change queries"
        query = self.query_norm(query, context.get("head_offset", 0))
        return query, key if self.key_shift is not None else self._normed_key(key, context)

    def _normed_key(self, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        return key if self.key_norm is None else self.key_norm(key, context.get("head_offset", 0) // self.groups)

    def carry(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns log f in two digits and, with shifts, a and b: (B, G, Q, 2 n or 2 n + 2)."""
        logits = self.gate(hidden)
        log_forget = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        per_key = log_forget.unflatten(2, (key.shape[1], -1)).transpose(1, 2)
        carried = split_digits(per_key, key.dtype)
        if self.key_shift is None or self.value_shift is None:
            return carried
        shifts = torch.stack((self.key_shift(hidden), self.value_shift(hidden)), dim=-1).transpose(1, 2)
        shifts = torch.sigmoid(shifts.to(log_forget.dtype))
        return torch.cat((carried, shifts.to(key.dtype)), dim=-1)

    def mix_cached(
        self, key: torch.Tensor, value: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixes each key and value with the one before, and norms the keys."""
        key_shift, value_shift = context["carried"]["fox"][..., -2:].split(1, dim=-1)
        key = self._normed_key(_shifted(key, key_shift, *context["fox"]), context)
        return key, _shifted(value, value_shift, *context["fox"])

    def _log_forget(self, context: PositionContext) -> torch.Tensor:
        """Returns log f of all keys, float32 (B, H, K)."""
        log_forget = join_digits(context["carried"]["fox"][..., : 2 * self.groups])
        return log_forget.transpose(2, 3).flatten(1, 2)

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> torch.Tensor:
        return FoXTerm.bias(logits, query, (self._log_forget(context),), {})

    def block_term(self, context: PositionContext, scaling: float) -> BlockTerm:
        return BlockTerm("fox", (self._log_forget(context),), {})

    def finish(self, output: torch.Tensor, hidden: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Norms and gates the output of the heads, (B, Q, H, V)."""
        if self.output_norm is not None:
            output = self.output_norm(output.transpose(1, 2), context.get("head_offset", 0)).transpose(1, 2)
        if self.output_gate is not None:
            gate = self.output_gate(hidden).view(output.shape)
            gate = torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
            output = output * gate.to(output.dtype)
        return output


def _shifted(states: torch.Tensor, gate: torch.Tensor, previous: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Returns gate * (the state before) + (1 - gate) * state, (B, G, K, D); the state before is 0 where none is found.

    Args:
        states: (B, G, K, D). gate: (B, G, K, 1). previous, found: (1 or B, K), see `previous_slots`.
    """
    B, G, K, D = states.shape
    # Whole rows are copied, which takes a third of the time of a gather.
    heads = torch.arange(B * G, device=states.device).view(B, G, 1) * K
    before = states.reshape(-1, D).index_select(0, (previous[:, None] + heads).flatten()).view(states.shape)
    dtype = torch.promote_types(states.dtype, torch.float32)
    gate = gate.to(dtype)
    mixed = (states.to(dtype) * (1 - gate)).addcmul(before.to(dtype), gate * found[:, None, :, None])
    return mixed.to(states.dtype)
