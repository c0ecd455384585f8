"""CoPE, Contextual Position Encoding (Golovneva, Wang, Weston, Sukhbaatar, 2405.18719).

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size, P positions in the
table; in blocks: C a chunk of (batch, key head), n heads that share a key head, R rows, W columns (newest key first,
see `attention_blockwise`), S pieces of a function of the position.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from .attention_blockwise import MASKED, Block, BlockBias
from .learned_table import LearnedTable, SharedTable
from .position_base import HIDDEN, Parameters, PositionContext, PositionEncoding, head_dim


@dataclasses.dataclass(frozen=True)
class CoPEParameters(Parameters):
    """Parameters of CoPE.

    Attributes:
        num_positions: entries of the table; contextual positions are clamped to num_positions - 1. 64 in the paper's
            language models; Table 8 also has 16 and the length of the context.
        gates: the logits of the gates (end of Section 4). "key": the content logits. "separate_key": q.x times the same
            factor, where x is a separate projection of the hidden state, without bias; it is cached with the keys
            (G * D more numbers per token). "value": q.v times the factor. "unrotated_key", in "cope+rope" only: q.k
            times the factor, both before rotation; keys before rotation are cached, too. No kernel supports it.
        scale_positions: also multiply q.e[p] by the factor on q.k (Eq. 6 under one 1/sqrt(d)). False is the paper's
            Listing 1, which learns several times faster.
        share_across_layers: one table for all layers, instead of one per layer.
        every_n_layers: CoPE is in the layers 0, n, 2 n, ...; other layers have no CoPE.
    """

    num_positions: int = 64
    gates: Literal["key", "separate_key", "value", "unrotated_key"] = "key"
    scale_positions: bool = False
    share_across_layers: bool = False
    every_n_layers: int = 1

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.num_positions < 2:
            yield "num_positions", "it must be at least 2"
        if self.every_n_layers < 1:
            yield "every_n_layers", "it must be at least 1"
        rotated = {"rope" in name for name in config.layer_pattern if "cope" in name.split("+")}
        if {"value": True, "unrotated_key": False}.get(self.gates) in rotated:
            # Rotated queries and values that are not: the gates would depend on absolute positions.
            yield "gates", "it must be 'key' or 'separate_key'; 'unrotated_key' needs RoPE, 'value' excludes it"

    def in_layer(self, layer_idx: int) -> bool:
        return layer_idx % self.every_n_layers == 0

    @property
    def in_kernel(self) -> bool:  # type: ignore[override]
        return self.gates != "unrotated_key"


class GateKey(nn.Linear):
    """The projection W_g of hidden states to gate keys; under tensor parallelism, to those of the local heads."""

    tensor_parallel_style = "colwise"


class CoPEBias(BlockBias):
    """The bias of CoPE.

    Positions grow towards older keys. Where they have reached the last one in every row of a block, the bias of all
    older keys is z[P - 1], a constant of the row, which softmax does not see. So only the near columns, those before,
    need gates. Their number in one block is the first guess for the next. If the positions of a row never get that far,
    because its gates are closed, all columns are near columns: correct, and slower.

    The bias is linear between integers: `values` of the piece that a position is in, plus its `slopes` times the offset
    in the piece. A subclass may have other pieces, or other gates.

    Tensors: the table (D, P), and where queries are rotated the query before rotation, (B, H, Q, D), which is then
    multiplied with the table. Setting: the factor on q.e.

    Attributes of the class:
        required: the number of tensors without that query.
    """

    name = "cope"
    reads_content = True
    differentiable: ClassVar[tuple[bool, ...]] = (True, True)
    required: ClassVar[int] = 1

    @staticmethod
    def bias(content: torch.Tensor, query: torch.Tensor, tensors: Sequence, settings: Sequence) -> torch.Tensor:
        query = tensors[1] if len(tensors) > 1 else query
        return interpolated(torch.sigmoid(content), query, tensors[0], settings[0])

    def prepare(self) -> None:
        self.scale = self.settings[0]
        values, slopes = self.pieces()
        # One product gives both: side by side to gather from; interleaved, a pair is one complex number to scatter to.
        self.beside = torch.cat([values, slopes], 1)
        self.interleaved = torch.stack([values, slopes], -1).flatten(1)
        self.grad_interleaved = torch.zeros_like(self.interleaved)
        self.position_query = self.grad_position_query = None
        if len(self.tensors) > self.required:
            shape = (self.attention.N, self.attention.n, self.attention.Q, self.attention.D)
            self.position_query = self.tensors[-1].to(self.attention.dtype).reshape(shape)
            self.grad_position_query = torch.zeros_like(self.position_query)
        # The number of near columns: for gates of about 0.5, and some rows.
        self.guess = 3 * (self.last + 1)

    def pieces(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sets `last`, the largest position; returns what q is multiplied with for values and slopes, (D, S) each.

        A constant of a row is invisible to softmax: the value at the largest position is 0.
        """
        table = self.tensors[0].to(self.attention.dtype)
        self.last = table.shape[1] - 1
        # z[last] is subtracted, so that columns that are not near stay unchanged.
        values = (table - table[:, -1:]) * self.scale
        steps = torch.zeros_like(table)
        torch.sub(table[:, 1:], table[:, :-1], out=steps[:, :-1]).mul_(self.scale)
        return values, steps

    def locate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the piece that each position is in, int64, and the offset in it; may change `positions`."""
        # A position of NaN gets a valid index; its offset is NaN. At the last position the slope is 0.
        floor = positions.long().clamp_(0, self.last)
        return floor, positions.frac_()

    def gates(self, logits: torch.Tensor, block: Block, width: int) -> torch.Tensor:
        """Returns the gates of the first columns, (C, n, R, width)."""
        return torch.sigmoid(logits[..., :width])

    def _near_columns(self, logits: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gates and positions of the near columns, (C, n, R, w)."""
        W = logits.shape[-1]
        by_data = self.attention.by_data
        width = min(W, self.guess) if by_data else W
        while True:
            gates = self.gates(logits, block, width)
            positions = gates.cumsum(-1)
            if width == W:
                break
            saturated = positions[..., -1] >= self.last
            if bool(saturated.all()):
                break
            # A row that sees no older keys is complete, too.
            if not block.causal_only and bool((saturated | (logits[..., width:].amax(-1) < MASKED / 2)).all()):
                break
            width = min(W, 2 * width)
        if not by_data:
            return gates, positions
        # The first row of a block usually has the most columns before the last position. Their number, rounded up, is
        # the guess for the next block; or all columns if there are more than were computed.
        unsaturated = int((positions[:, :, 0].amin((0, 1)) < self.last).sum())
        self.guess = (unsaturated // 16 + 2) * 16 if unsaturated < width else max(self.guess, 2 * W)
        return gates, positions

    def _query(self, block: Block) -> torch.Tensor:
        """Returns the rows that are multiplied with the table, (C, n, R, D), in the compute type."""
        if self.position_query is None:
            return block.query.to(self.beside.dtype)
        return self.position_query[block.chunk, :, block.rows]

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        query = self._query(block)
        values, slopes = torch.matmul(query, self.beside).split(self.beside.shape[1] // 2, -1)
        gates, positions = self._near_columns(logits, block)
        piece, offset = self.locate(positions)
        slope = slopes.gather(-1, piece)
        logits[..., : gates.shape[-1]].add_(values.gather(-1, piece)).addcmul_(slope, offset)
        if keep:
            self.state = (gates, piece, offset, slope)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        gates, piece, offset, slope = self.state
        self.state = ()
        C, n, R, width = gates.shape
        near = grad[..., :width]
        pair = torch.complex(near, offset.mul_(near))
        pieces = self.beside.shape[1] // 2
        sums = torch.zeros(C, n, R, pieces, dtype=pair.dtype, device=pair.device).scatter_add_(-1, piece, pair)
        sums = torch.view_as_real(sums).flatten(3)
        # dL/dg_ik sums dL/dp_ij over j <= k: here, over the columns from k on. (Its negative is what is computed.)
        grad_positions = slope.mul_(near)
        running = grad_positions.cumsum(-1)
        total = running[..., -1:].clone()
        grad_gates = running.sub_(grad_positions).sub_(total)
        from_gates = self.through_gates(torch.ops.aten.sigmoid_backward(grad_gates, gates), near, block)
        query = self._query(block)
        self.grad_interleaved.addmm_(query.reshape(-1, query.shape[-1]).T, sums.view(-1, sums.shape[-1]))
        grad_query = torch.matmul(sums, self.interleaved.T)
        if self.grad_position_query is not None:
            self.grad_position_query[block.chunk, :, block.rows] = grad_query
            return from_gates
        return grad_query if from_gates is None else grad_query.add_(from_gates)

    def through_gates(self, negative: torch.Tensor, near: torch.Tensor, block: Block) -> torch.Tensor | None:
        """Propagates the negative gradient of the gates' logits, (C, n, R, w).

        Adds the gradient of the content logits to `near` (C, n, R, w), in place; returns that of the rows, or None.
        """
        near.sub_(negative)
        return None

    def gradients(self) -> list[torch.Tensor]:
        values, steps = self.grad_interleaved.mul(self.scale).view(*self.tensors[0].shape, 2).unbind(-1)
        grad = values.clone()
        grad[:, -1] -= values.sum(-1)
        grad[:, :-1] -= steps[:, :-1]
        grad[:, 1:] += steps[:, :-1]
        if self.grad_position_query is None:
            return [grad]
        return [grad, self.grad_position_query.view(self.tensors[-1].shape)]


def interpolated(gates: torch.Tensor, query: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns z_i[p_ij] (B, H, Q, K) from the gates (B, H, Q, K), 0 where masked, the query and the table (D, P)."""
    last = table.shape[1] - 1
    # Eq. 4: p_ij sums the gates from key j to the query.
    positions = gates.flip(-1).cumsum(-1).flip(-1).clamp(0, last)
    # Eq. 7 and 8. The gradient of p flows through the fraction only; at p = last, where the step is 0, it is 0.
    z = query.to(gates.dtype) @ table.to(gates.dtype) * scale
    step = torch.cat([z[..., 1:] - z[..., :-1], torch.zeros_like(z[..., :1])], -1)
    # NaN is no index; it stays in the fraction.
    floor = positions.detach().long().clamp_(0, last)
    return z.gather(-1, floor) + (positions - floor) * step.gather(-1, floor)


class GatedCoPEBias(CoPEBias):
    """The bias of CoPE with gate keys other than the content's: `CoPEParameters.gates`.

    Tensors: the table (D, P), the gate keys (B, G, K, D), and the query as in `CoPEBias`. Settings: the factor on q.e,
    the factor on the gates' logits, and 1 if these use that query (0: the query of the content).
    """

    name = "cope_gates"
    differentiable = (True, True, True)
    required = 2

    @staticmethod
    def bias(content: torch.Tensor, query: torch.Tensor, tensors: Sequence, settings: Sequence) -> torch.Tensor:
        table, gate_key, *_ = tensors
        B, H, Q, D = query.shape
        G = gate_key.shape[1]
        position_query = tensors[2] if len(tensors) > 2 else query
        rows = (position_query if settings[2] else query).to(content.dtype).reshape(B, G, H // G * Q, D)
        gate_logits = (rows @ gate_key.to(content.dtype).transpose(2, 3)).to(content.dtype) * settings[1]
        gate_logits = gate_logits.view(content.shape).masked_fill(content < HIDDEN, MASKED)
        return interpolated(torch.sigmoid(gate_logits), position_query, table, settings[0])

    def prepare(self) -> None:
        super().prepare()
        self.gate_key = (
            self.tensors[1]
            .to(self.attention.dtype)
            .flip(2)
            .reshape(self.attention.N, self.attention.K, self.attention.D)
        )
        self.grad_gate_key = torch.zeros_like(self.gate_key)

    def _factors(self, block: Block, width: int) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """Returns the scaled rows (C, n * R, D), the gate keys (C, width, D), and where these are."""
        columns = slice(block.columns.start, block.columns.start + width)
        query = (self._query(block) if self.settings[2] else block.query).to(self.gate_key.dtype) * self.settings[1]
        return query.reshape(query.shape[0], -1, query.shape[-1]), self.gate_key[block.chunk, columns], columns

    def gates(self, logits: torch.Tensor, block: Block, width: int) -> torch.Tensor:
        rows, keys, _ = self._factors(block, width)
        gate_logits = torch.bmm(rows, keys.transpose(1, 2)).view(*logits.shape[:3], width)
        # With a causal mask only, the keys before the rows of the block are visible to all of them.
        masked = min(width, logits.shape[2]) if block.causal_only else width
        gate_logits[..., :masked].masked_fill_(logits[..., :masked] < HIDDEN, MASKED)
        return gate_logits.sigmoid_()

    def through_gates(self, negative: torch.Tensor, near: torch.Tensor, block: Block) -> torch.Tensor:
        rows, keys, columns = self._factors(block, negative.shape[-1])
        grad = negative.neg_().reshape(rows.shape[0], rows.shape[1], -1)
        self.grad_gate_key[block.chunk, columns].baddbmm_(grad.transpose(1, 2), rows)
        return torch.bmm(grad, keys).mul_(self.settings[1]).view(block.query.shape)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        from_gates, grad_position_query = super().backward(grad, block), self.grad_position_query
        if not self.settings[2] or from_gates is None or grad_position_query is None:
            return from_gates
        grad_position_query[block.chunk, :, block.rows] += from_gates
        return None

    def gradients(self) -> list[torch.Tensor]:
        grad_table, *grad_position_query = super().gradients()
        return [grad_table, self.grad_gate_key.view(self.tensors[1].shape).flip(2), *grad_position_query]


class CoPE(PositionEncoding):
    """CoPE, Contextual Position Encoding. (Not "Clipped RoPE", which has the same short name.)

    The position of a key is the number of keys with an open gate from it to the query:

        g_ij = sigmoid(s_ij), s_ij the scaled, masked content logit (Eq. 3)
        p_ij = sum of g_ik for k = j..i, at most num_positions - 1 (Eq. 4)
        z_i[p] = q_i . e[p], between integers by linear interpolation (Eq. 7, 8)
        logit = s_ij + z_i[p_ij] (Eq. 9)

    It needs no position ids: the gates of padding and of other documents are closed. `CoPEParameters.gates` sets which
    keys the gates use.

    There is no released recipe for a sum with RoPE ("cope+rope"). Here:
    - Content logits and gates use rotated queries and keys; separate gate keys are rotated, too. So gates depend on
      content and distance; with gates="unrotated_key" on content only.
    - The table is multiplied with the query before rotation. With a rotated query, z_i[p] would depend on the absolute
      position of the query.
    In sums with relative positions or ALiBi ("cope+relative", "cope+alibi"), gates depend on content only.
    """

    name = "cope"
    paper = "Golovneva et al. 2024 (2405.18719)"
    summary = "counts the keys whose content opens a gate; learned embedding of the (fractional) count"
    parameters_class = CoPEParameters
    block_bias: type[BlockBias] = CoPEBias

    def __init__(self, config: Any, parameters: CoPEParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        self.rotated = "rope" in config.layer_encodings(layer_idx)
        # The position embeddings e, (D, P), shared by heads.
        self.table = None if parameters.share_across_layers else LearnedTable(self.head_dim, parameters.num_positions)
        self.gate_key = None
        if parameters.gates == "separate_key":
            self.gate_key = GateKey(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        if parameters.gates != "key":
            self.block_bias = GatedCoPEBias

    @classmethod
    def shared(cls, config: Any, parameters: CoPEParameters) -> SharedTable | None:
        return SharedTable(head_dim(config), parameters.num_positions) if parameters.share_across_layers else None

    def uses(self, hook: str) -> bool:
        cached = ("separate_key", "unrotated_key")
        return self.parameters_.gates in cached if hook == "cached_state" else super().uses(hook)

    def _table(self, context: PositionContext) -> torch.Tensor:
        return context.shared[self.name] if self.table is None else self.table(None)

    def state_width(self) -> int:
        return self.head_dim if self.uses("cached_state") else 0

    def cached_state(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns the gate keys of the new tokens, (B, G, Q, D): W_g h, rotated if the keys are, or unrotated keys."""
        if self.gate_key is None:
            return context.key
        states = self.gate_key(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.rotated:
            states, _ = apply_rotary_pos_emb(states, states[:, :0], *context.shared["rope"])
        return states.to(key.dtype)

    def _gate_key(self, context: PositionContext, value: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the gate keys (B, G, K, D), or None if they are the keys of the content."""
        return value if self.parameters_.gates == "value" else context.states.get(self.name)

    def bias_inputs(self, context: PositionContext, scaling: float) -> tuple[tuple[torch.Tensor, ...], tuple]:
        gate_key = self._gate_key(context, context.value)
        tensors = self._table(context), gate_key, context.query if self.rotated else None
        scale = scaling if self.parameters_.scale_positions else 1.0
        settings = () if gate_key is None else (scaling, float(self.parameters_.gates == "unrotated_key"))
        return tuple(one for one in tensors if one is not None), (scale, *settings)

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: PositionContext, **options: Any
    ) -> torch.Tensor:
        from .kernel_cope import cope_attention

        gate_key = self._gate_key(context, value)
        return cope_attention(
            query,
            key,
            value,
            self._table(context),
            gate_key=None if gate_key is None else gate_key.to(key.dtype),
            position_query=context.query.to(query.dtype) if self.rotated else None,
            position_scale=options["scaling"] if self.parameters_.scale_positions else 1.0,
            **options,
        )
