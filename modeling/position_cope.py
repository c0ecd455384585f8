"""CoPE, Contextual Position Encoding (Golovneva, Wang, Weston, Sukhbaatar, 2405.18719).

Axes: B batch, H query heads, Q query length, K key length, D head dim, P positions in the table; in blocks: C a chunk
of (batch, key head), n heads that share a key head, R rows, W columns (newest key first, see `attention_blockwise`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import initialization as init

from .attention_blockwise import MASKED, TERMS, Block, Term
from .position_encoding import BlockTerm, Parameters, PositionContext, PositionEncoding, SharedPositionEncoding


@dataclasses.dataclass(frozen=True)
class CoPEParameters(Parameters):
    """Parameters of CoPE.

    Attributes:
        num_positions: entries of the table; contextual positions are clamped to num_positions - 1. 64 in the paper's
            language models.
        gates: what opens the gates: "key", the content logits themselves.
        scale_positions: multiply q.e[p] by the factor on q.k too (Eq. 6 under one 1/sqrt(d)); False as in Listing 1.
        share_across_layers: one table for all layers, instead of one in each.
    """

    num_positions: int = 64
    gates: Literal["key"] = "key"
    scale_positions: bool = True
    share_across_layers: bool = False

    def validate(self, config: Any) -> None:
        if self.num_positions < 2:
            raise ValueError(
                f"position_encoding_parameters['cope']['num_positions']={self.num_positions!r} is not valid: "
                "it must be at least 2."
            )


class CoPETable(nn.Module):
    """The position embeddings e, (D, P), shared by heads. A module of its own, so that PEFT can target it."""

    def __init__(self, head_dim: int, num_positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(head_dim, num_positions))

    def reset(self) -> None:
        init.zeros_(self.weight)

    def forward(self) -> torch.Tensor:
        return self.weight


class CoPETerm(Term):
    """The term of CoPE.

    p grows to the left. From some column on it is clamped in every row of a block: there the term is a constant of
    the row, z[P - 1], and only the columns before, the window, need gates. A window of the right width for one block
    is a good guess for the next. Closed gates never saturate: then the window is the whole row, correct and slower.
    """

    reads_content = True
    differentiable = (True,)

    @staticmethod
    def bias(
        content: torch.Tensor, query: torch.Tensor, tensors: Sequence[torch.Tensor], parameters: dict[str, Any]
    ) -> torch.Tensor:
        (table,) = tensors
        last = table.shape[1] - 1
        gates = torch.sigmoid(content)
        # Eq. 4: p_ij sums the gates from key j to the query.
        positions = gates.flip(-1).cumsum(-1).flip(-1).clamp(0, last)
        # Eq. 7 and 8. The gradient of p flows through the fraction only; at p = last, where the step is 0, it is 0.
        z = query.to(content.dtype) @ table.to(content.dtype) * parameters["scale"]
        step = torch.cat([z[..., 1:] - z[..., :-1], torch.zeros_like(z[..., :1])], -1)
        floor = positions.detach().long()
        return z.gather(-1, floor) + (positions - floor) * step.gather(-1, floor)

    def __init__(self, tensors: Sequence[torch.Tensor], parameters: dict[str, Any], attention: Any) -> None:
        super().__init__(tensors, parameters, attention)
        table = tensors[0].to(attention.dtype)
        self.last = table.shape[1] - 1
        self.scale = parameters["scale"]
        # A constant of a row is invisible to softmax: less z[last], the rest of the row stays as it is.
        values = (table - table[:, -1:]) * self.scale
        steps = torch.zeros_like(table)
        torch.sub(table[:, 1:], table[:, :-1], out=steps[:, :-1]).mul_(self.scale)
        # One product gives both: side by side to gather from; interleaved, a pair is one complex number to scatter to.
        self.beside = torch.cat([values, steps], 1)
        self.interleaved = torch.stack([values, steps], -1).flatten(1)
        self.grad_interleaved = torch.zeros_like(self.interleaved)
        # With gates near 0.5, and some rows.
        self.guess = 3 * table.shape[1]
        self.state: tuple[torch.Tensor, ...] = ()

    def _window(self, logits: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gates and clamped positions of the window, (C, n, R, w)."""
        W = logits.shape[-1]
        width = min(W, self.guess)
        while True:
            gates = torch.sigmoid(logits[..., :width])
            positions = gates.cumsum(-1)
            if width == W:
                break
            saturated = positions[..., -1] >= self.last
            if bool(saturated.all()):
                break
            # A row that sees nothing further left is complete too.
            if not block.causal_only and bool((saturated | (logits[..., width:].amax(-1) < MASKED / 2)).all()):
                break
            width = min(W, 2 * width)
        # The first row of the block counts furthest, as a rule: its count, rounded up, is the guess for the next block.
        counting = int((positions[:, :, 0].amin((0, 1)) < self.last).sum())
        self.guess = (counting // 16 + 2) * 16 if counting < width else max(self.guess, 2 * W)
        return gates, positions.clamp_(0, self.last)

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        values, steps = torch.matmul(block.query.to(self.beside.dtype), self.beside).split(self.last + 1, -1)
        gates, positions = self._window(logits, block)
        floor = positions.long()
        fraction = positions.frac_()
        step = steps.gather(-1, floor)
        logits[..., : gates.shape[-1]].add_(values.gather(-1, floor)).addcmul_(step, fraction)
        if keep:
            self.state = (gates, floor, fraction, step)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        gates, floor, fraction, step = self.state
        self.state = ()
        C, n, R, width = gates.shape
        window = grad[..., :width]
        pair = torch.complex(window, fraction.mul_(window))
        sums = torch.zeros(C, n, R, self.last + 1, dtype=pair.dtype, device=pair.device).scatter_add_(-1, floor, pair)
        sums = torch.view_as_real(sums).flatten(3)
        # dL/dg_ik sums dL/dp_ij over j <= k: here, over the columns from k on. (Its negative is what is computed.)
        grad_positions = step.mul_(window)
        running = grad_positions.cumsum(-1)
        total = running[..., -1:].clone()
        grad_gates = running.sub_(grad_positions).sub_(total)
        window.sub_(torch.ops.aten.sigmoid_backward(grad_gates, gates))
        query = block.query.to(sums.dtype)
        self.grad_interleaved.addmm_(query.reshape(-1, query.shape[-1]).T, sums.view(-1, sums.shape[-1]))
        return torch.matmul(sums, self.interleaved.T)

    def gradients(self) -> list[torch.Tensor]:
        values, steps = self.grad_interleaved.mul(self.scale).view(*self.tensors[0].shape, 2).unbind(-1)
        grad = values.clone()
        grad[:, -1] -= values.sum(-1)
        grad[:, :-1] -= steps[:, :-1]
        grad[:, 1:] += steps[:, :-1]
        return [grad]


TERMS["cope"] = CoPETerm


class SharedCoPE(SharedPositionEncoding):
    """The table of all layers, if they share it."""

    def __init__(self, config: Any, parameters: CoPEParameters) -> None:
        super().__init__(config, parameters)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.table = CoPETable(head_dim, parameters.num_positions) if parameters.share_across_layers else None

    def reset(self) -> None:
        if self.table is not None:
            self.table.reset()

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> tuple[torch.Tensor, ...]:
        return () if self.table is None else (self.table(),)


class CoPE(PositionEncoding):
    """CoPE, Contextual Position Encoding. (Not "Clipped RoPE", which has the same short name.)

    A key is counted if its gate is open, and positions are counts:

        g_ij = sigmoid(s_ij), s_ij the scaled, masked content logit (Eq. 3)
        p_ij = sum of g_ik for k = j..i, at most num_positions - 1 (Eq. 4)
        z_i[p] = q_i . e[p] * scaling, between integers by linear interpolation (Eq. 7, 8)
        logit = s_ij + z_i[p_ij] (Eq. 9)

    Needs no positions from outside: padding and other documents have closed gates.

    With RoPE ("cope+rope") there is no released recipe; here gates, content and table all use the rotated queries and
    keys. With relative positions ("cope+relative") the gates see the content only.
    """

    name = "cope"
    paper = "Golovneva et al. 2024 (2405.18719)"
    summary = "counts the keys whose content opens a gate; learned embedding of the (fractional) count"
    parameters_class = CoPEParameters
    shared_class = SharedCoPE
    stock_implementations: ClassVar[tuple[str, ...]] = ()
    default_implementation = "blockwise"
    has_kernel = True
    has_bias = True
    biases_from_content = True

    def __init__(self, config: Any, parameters: CoPEParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        self.table = None if parameters.share_across_layers else CoPETable(self.head_dim, parameters.num_positions)

    def reset(self) -> None:
        if self.table is not None:
            self.table.reset()

    def _table(self, context: PositionContext) -> torch.Tensor:
        return context["cope"][0] if self.table is None else self.table()

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> torch.Tensor:
        term = self.block_term(context, scaling)
        return CoPETerm.bias(logits, query, term.tensors, term.parameters)

    def block_term(self, context: PositionContext, scaling: float) -> BlockTerm:
        scale = scaling if self.parameters_.scale_positions else 1.0
        return BlockTerm("cope", (self._table(context),), {"scale": scale})

    def kernel_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: PositionContext,
        *,
        limits: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        from .kernel_cope import cope_attention

        scale = scaling if self.parameters_.scale_positions else 1.0
        table = self._table(context)
        return cope_attention(query, key, value, table, limits=limits, scaling=scaling, position_scale=scale)
