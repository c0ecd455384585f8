"""Token-gated CoPE: counts tokens, from the start of the text, by a linear gate on each; not the method of 2405.18719.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size, P positions in the
table; N = B * G; in blocks: C a chunk of N, n = H // G heads that share a key head, R rows, W columns (newest key
first, see `attention_blockwise`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_blockwise import TERMS, Block, Term, compute_dtype
from .position_encoding import (
    BlockTerm,
    Parameters,
    PositionContext,
    PositionEncoding,
    join_digits,
    split_digits,
)

# Below every content logit, above those that a mask hides: -1e4, the lowest number of any type, -inf.
HIDDEN = -5e3

# The standard deviation of all weights at the start.
STD = 0.02


@dataclasses.dataclass(frozen=True)
class TokenGatedCoPEParameters(Parameters):
    """Parameters of token-gated CoPE.

    Attributes:
        num_positions: entries of the table; counts are clamped to num_positions - 1.001. None: 2048, as in the note, or
            max_position_embeddings where that is less, because a token counts for at most 1.
    """

    num_positions: int | None = None

    def validate(self, config: Any) -> None:
        if self.num_positions is not None and self.num_positions < 2:
            raise ValueError(
                f"position_encoding_parameters['token_gated_cope']['num_positions']={self.num_positions!r} is not "
                "valid: it must be at least 2, or None for min(2048, max_position_embeddings)."
            )

    def resolve(self, config: Any) -> "TokenGatedCoPEParameters":
        if self.num_positions is not None:
            return self
        return dataclasses.replace(self, num_positions=max(2, min(2048, config.max_position_embeddings)))


def running_sums(numbers: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
    """Returns the sums of numbers (B, H, K) from the first slot on, or from the first slot of the own segment on.

    `segments` is int32 (B, K), or None for one segment. The type is that of `numbers`.
    """
    if segments is None:
        return numbers.cumsum(-1)
    order = segments.argsort(dim=1, stable=True)
    ordered = segments.gather(1, order)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    # The slot, in this order, with which the own segment begins.
    slots = torch.arange(ordered.shape[1], device=ordered.device).expand_as(ordered)
    first = slots.masked_fill(~begins, 0).cummax(1).values
    order, first = (index[:, None].expand_as(numbers) for index in (order, first))
    # In float64: differences of sums over all documents.
    sums = numbers.gather(2, order).double()
    before = sums.cumsum(-1) - sums
    sums = before + sums - before.gather(2, first)
    return torch.empty_like(numbers).scatter_(2, order, sums.to(numbers.dtype))


class TokenGatedCoPETerm(Term):
    """The term of token-gated CoPE: tensors are W_p q (B, H, Q, D), the gates (B, H, K), and the table (P, D).

    Where the mask is causal, or one of segments, the count of a key is the same for every row that sees it: keys get
    their interpolated embedding once, and the term is one product. With a 4D mask every row counts for itself.
    """

    differentiable = (True, True, True)

    @staticmethod
    def bias(
        content: torch.Tensor, query: torch.Tensor, tensors: Sequence[torch.Tensor], parameters: dict[str, Any]
    ) -> torch.Tensor:
        position_query, gates, table = tensors
        dtype = compute_dtype(query.dtype)
        P = table.shape[0]
        counted = gates.to(dtype)[:, :, None] * (content > HIDDEN)
        positions = counted.cumsum(-1).clamp(0, P - 1.001)
        # The gradient of a position flows through the fraction only; where it is clamped, there is none.
        z = position_query.to(dtype) @ table.T.to(dtype) * parameters["scale"]
        step = torch.cat([z[..., 1:] - z[..., :-1], torch.zeros_like(z[..., :1])], -1)
        # NaN is no index; it stays in the fraction.
        floor = positions.detach().long().clamp_(0, P - 1)
        return z.gather(-1, floor) + (positions - floor) * step.gather(-1, floor)

    def __init__(self, tensors: Sequence[torch.Tensor], parameters: dict[str, Any], attention: Any) -> None:
        super().__init__(tensors, parameters, attention)
        position_query, gates, table = tensors
        self.scale = parameters["scale"]
        self.table = table.to(attention.dtype)
        self.steps = torch.zeros_like(self.table)
        torch.sub(self.table[1:], self.table[:-1], out=self.steps[:-1])
        self.last = table.shape[0] - 1.001
        self.query = position_query.to(attention.dtype).reshape(attention.N, attention.n, attention.Q, -1)
        self.general = attention.mask is not None
        self.segments = None if attention.segments is None else attention.segments.flip(1)
        self.grad_query = torch.zeros_like(self.query)
        self.grad_table = torch.zeros_like(self.table)
        self.state: tuple[torch.Tensor, ...] = ()
        if self.general:
            self.gates = attention.of_keys(gates)
            self.grad_gates = torch.zeros_like(self.gates)
            return
        positions = attention.of_keys(running_sums(gates.to(attention.dtype), self.segments))
        self.unclamped = positions <= self.last
        positions = positions.clamp_(0, self.last)
        # In float32 the clamp of a table of 65536 and more is at its last entry, which has no next one.
        # And NaN, which stays in the fraction, is no index.
        self.floor = positions.long().clamp_(0, table.shape[0] - 2)
        self.fraction = positions.sub_(self.floor)[..., None]
        # (N, n, K, D), newest key first.
        self.embeddings = torch.addcmul(self.table[self.floor], self.fraction, self.steps[self.floor])
        self.grad_embeddings = torch.zeros_like(self.embeddings)

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        C, n, R, W = logits.shape
        query = self.query[block.chunk, :, block.rows]
        if not self.general:
            embeddings = self.embeddings[block.chunk, :, block.columns].view(C * n, W, -1)
            flat = logits.view(C * n, R, W)
            flat.baddbmm_(query.view(C * n, R, -1), embeddings.transpose(1, 2), alpha=self.scale)
            return
        seen = logits > HIDDEN
        counted = self.gates[block.chunk, :, None, block.columns] * seen
        positions = counted.flip(-1).cumsum(-1).flip(-1)
        unclamped = positions <= self.last
        positions.clamp_(0, self.last)
        # NaN is no index; it stays in the fraction.
        floor, fraction = positions.long().clamp_(0, self.table.shape[0] - 1), positions.frac()
        step = torch.matmul(query, self.steps.T).mul_(self.scale).gather(-1, floor)
        values = torch.matmul(query, self.table.T).mul_(self.scale).gather(-1, floor)
        logits.add_(values).addcmul_(step, fraction)
        if keep:
            self.state = (seen, unclamped, floor, fraction, step)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        C, n, R, W = grad.shape
        query = self.query[block.chunk, :, block.rows]
        if not self.general:
            flat = grad.view(C * n, R, W)
            embeddings = self.embeddings[block.chunk, :, block.columns].view(C * n, W, -1)
            grad_embeddings = self.grad_embeddings[block.chunk, :, block.columns].view(C * n, W, -1)
            grad_embeddings.baddbmm_(flat.transpose(1, 2), query.view(C * n, R, -1), alpha=self.scale)
            grad_query = torch.bmm(flat, embeddings).mul_(self.scale)
            self.grad_query[block.chunk, :, block.rows] = grad_query.view(C, n, R, -1)
            return None
        seen, unclamped, floor, fraction, step = self.state
        self.state = ()
        # dL/dg_ik sums dL/dp_ij over j >= k.
        grad_positions = step.mul_(grad).mul_(unclamped)
        self.grad_gates[block.chunk, :, block.columns] += grad_positions.cumsum(-1).mul_(seen).sum(2)
        size = (C, n, R, self.table.shape[0])
        values = grad.new_zeros(size).scatter_add_(-1, floor, grad)
        steps = grad.new_zeros(size).scatter_add_(-1, floor, fraction.mul_(grad))
        # z and its steps, as one sum over the table.
        values[..., :-1] -= steps[..., :-1]
        values[..., 1:] += steps[..., :-1]
        values.mul_(self.scale)
        self.grad_query[block.chunk, :, block.rows] = torch.matmul(values, self.table)
        self.grad_table.addmm_(values.view(-1, size[-1]).T, query.reshape(-1, query.shape[-1]))
        return None

    def gradients(self) -> list[torch.Tensor]:
        position_query, gates, _ = self.tensors
        if self.general:
            grad_gates = self.grad_gates.view(gates.shape).flip(2)
            return [self.grad_query.view(position_query.shape), grad_gates, self.grad_table]
        grad_positions = (self.grad_embeddings * self.steps[self.floor]).sum(-1).mul_(self.unclamped)
        # In the reversed order of the keys, sums from the newest on.
        segments = None if self.segments is None else self.segments.flip(1)
        grad_gates = running_sums(grad_positions.view(gates.shape), segments).flip(2)
        upper = self.grad_embeddings * self.fraction
        floor = self.floor.flatten()
        self.grad_table.index_add_(0, floor, (self.grad_embeddings - upper).flatten(0, 2))
        self.grad_table.index_add_(0, floor + 1, upper.flatten(0, 2))
        return [self.grad_query.view(position_query.shape), grad_gates, self.grad_table]


TERMS["token_gated_cope"] = TokenGatedCoPETerm


class TokenGate(nn.Linear):
    """What opens the gates of tokens (..., E): numbers (..., H); under tensor parallelism, of the local heads.

    The sigmoid is not part of it: adapters add to what a linear layer returns.
    """

    tensor_parallel_style = "colwise"

    def reset(self) -> None:
        init.normal_(self.weight, mean=0.0, std=STD)
        init.zeros_(self.bias)


class TokenGatedTable(nn.Module):
    """The position embeddings e, (P, D), shared by the heads of a layer."""

    def __init__(self, num_positions: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_positions, head_dim))

    def reset(self) -> None:
        init.normal_(self.weight, mean=0.0, std=STD)

    def forward(self) -> torch.Tensor:
        return self.weight


class PositionQuery(nn.Module):
    """The matrix W_p, (D, D), that makes the queries of positions, shared by the heads of a layer."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(head_dim, head_dim))

    def reset(self) -> None:
        init.normal_(self.weight, mean=0.0, std=STD)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Returns W_p q of queries (..., D)."""
        return F.linear(query, self.weight)


class TokenGatedCoPE(PositionEncoding):
    """Token-gated CoPE: a different method under the name of CoPE, from a note that circulates with a software package.

    The note calls it "Contextual Position Encoding", cites arXiv 2405.18719 and credits another author; that paper, by
    Golovneva, Wang, Weston and Sukhbaatar, is `cope`. The results that the note prints are not the paper's. In every
    layer:

        g_k = sigmoid(w . x_k + b), a gate of each query head, of the token alone; x_k the input of the attention layer
        P_ij = sum of g_k over the tokens k <= j that token i sees, at most num_positions - 1.001
        logit = s_ij + (W_p q_i) . e[P_ij] * scaling, e between integers by linear interpolation

    P counts from the start of the text (of the document, of the branch of a tree), so it is an absolute position, the
    same for every query. The scaling is that of q.k, 1/sqrt(d). Past the table all tokens have the last position.

    With RoPE ("token_gated_cope+rope") queries and keys are rotated, and W_p takes the query before that, as in the
    note.
    """

    name = "token_gated_cope"
    paper = 'a note on "CoPE", not the paper it cites'
    summary = "counts tokens from the start by a linear gate on each; learned embedding of the (fractional) count"
    parameters_class = TokenGatedCoPEParameters
    stock_implementations: ClassVar[tuple[str, ...]] = ("sdpa",)
    default_implementation = "blockwise"
    has_bias = True
    biases_from_mask = True

    def __init__(self, config: Any, parameters: TokenGatedCoPEParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        num_positions = parameters.resolve(config).num_positions
        assert num_positions is not None, "resolve fills it in"
        self.gate = TokenGate(config.hidden_size, config.num_attention_heads)
        self.table = TokenGatedTable(num_positions, self.head_dim)
        self.position_query = PositionQuery(self.head_dim)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates nothing: keeps W_p q, for `block_term` of this layer, before another encoding rotates q."""
        context["token_gated_cope, query"] = self.position_query(query)
        return query, key

    def carry(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns the gates of the new tokens, (B, G, Q, 2 n): n = H // G heads, two numbers each."""
        B, G, Q, _ = key.shape
        logits = self.gate(hidden)
        gates = torch.sigmoid(logits.to(compute_dtype(logits.dtype)))
        return split_digits(gates.view(B, Q, G, -1).transpose(1, 2), key.dtype)

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> torch.Tensor:
        term = self.block_term(context, scaling)
        return TokenGatedCoPETerm.bias(logits, query, term.tensors, term.parameters)

    def block_term(self, context: PositionContext, scaling: float) -> BlockTerm:
        # (B, G, K, n) to (B, H, K).
        gates = join_digits(context["carried"][self.name]).transpose(2, 3).flatten(1, 2)
        tensors = (context["token_gated_cope, query"], gates, self.table())
        return BlockTerm(self.name, tensors, {"scale": scaling})
