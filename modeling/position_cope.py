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

from .attention_blockwise import MASKED, Block, Term
from .learned_table import LearnedTable, SharedTable
from .position_base import HIDDEN, Parameters, PositionContext, PositionEncoding, head_dim


@dataclasses.dataclass(frozen=True)
class CoPEParameters(Parameters):
    """Parameters of CoPE.

    Attributes:
        num_positions: entries of the table; contextual positions are clamped to num_positions - 1. 64 in the paper's
            language models; Table 8 also has 16 and the length of the context.
        gates: the logits of the gates (end of Section 4). "key": the content logits. "separate_key": q.x times the same
            factor, with a separate projection x of the hidden state (no bias), cached with the keys (G * D more numbers
            per token). "value": q.v times the factor. "unrotated_key", in "cope+rope" only: q.k times the factor, both
            before rotation; keys before rotation are cached, too. No kernel supports it.
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


class CoPETerm(Term):
    """The term of CoPE.

    p grows to the left. From some column on it is clamped in every row of a block: there the term is a constant of
    the row, z[P - 1], and only the columns before, the window, need gates. A window of the right width for one block
    is a good guess for the next. Closed gates never saturate: then the window is the whole row, correct and slower.

    In the window the term is linear in pieces: `values` of the piece that p is in, plus `slopes` of the piece times an
    offset. A subclass may have other pieces, or other gates.

    Tensors: the table (D, P), and where queries are rotated the query before that, (B, H, Q, D), which is then
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

    def __init__(self, tensors: Sequence[torch.Tensor], settings: Sequence[float], attention: Any) -> None:
        super().__init__(tensors, settings, attention)
        self.scale = settings[0]
        values, slopes = self.pieces()
        # One product gives both: side by side to gather from; interleaved, a pair is one complex number to scatter to.
        self.beside = torch.cat([values, slopes], 1)
        self.interleaved = torch.stack([values, slopes], -1).flatten(1)
        self.grad_interleaved = torch.zeros_like(self.interleaved)
        self.position_query = self.grad_position_query = None
        if len(tensors) > self.required:
            shape = (attention.N, attention.n, attention.Q, attention.D)
            self.position_query = tensors[-1].to(attention.dtype).reshape(shape)
            self.grad_position_query = torch.zeros_like(self.position_query)
        # With gates near 0.5, and some rows.
        self.guess = 3 * (self.last + 1)

    def pieces(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sets `last`, the largest position; returns what q is multiplied with for values and slopes, (D, S) each.

        A constant of a row is invisible to softmax: the value at the largest position is 0.
        """
        table = self.tensors[0].to(self.attention.dtype)
        self.last = table.shape[1] - 1
        # Less z[last], the rest of the row stays as it is.
        values = (table - table[:, -1:]) * self.scale
        steps = torch.zeros_like(table)
        torch.sub(table[:, 1:], table[:, :-1], out=steps[:, :-1]).mul_(self.scale)
        return values, steps

    def locate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the piece that each position is in, int64, and the offset; may change `positions`."""
        # Integers are clamped: NaN, which stays in the offset, is no index. (At the last position the slope is 0.)
        floor = positions.long().clamp_(0, self.last)
        return floor, positions.frac_()

    def open(self, logits: torch.Tensor, block: Block, width: int) -> torch.Tensor:
        """Returns the gates of the first columns, (C, n, R, width)."""
        return torch.sigmoid(logits[..., :width])

    def _window(self, logits: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gates and positions of the window, (C, n, R, w)."""
        W = logits.shape[-1]
        by_data = self.attention.by_data
        width = min(W, self.guess) if by_data else W
        while True:
            gates = self.open(logits, block, width)
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
        if not by_data:
            return gates, positions
        # The first row of the block counts furthest, as a rule: its count, rounded up, is the guess for the next block.
        counting = int((positions[:, :, 0].amin((0, 1)) < self.last).sum())
        self.guess = (counting // 16 + 2) * 16 if counting < width else max(self.guess, 2 * W)
        return gates, positions

    def _query(self, block: Block) -> torch.Tensor:
        """Returns the rows that are multiplied with the table, (C, n, R, D), in the compute type."""
        if self.position_query is None:
            return block.query.to(self.beside.dtype)
        return self.position_query[block.chunk, :, block.rows]

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        query = self._query(block)
        values, slopes = torch.matmul(query, self.beside).split(self.beside.shape[1] // 2, -1)
        gates, positions = self._window(logits, block)
        piece, offset = self.locate(positions)
        slope = slopes.gather(-1, piece)
        logits[..., : gates.shape[-1]].add_(values.gather(-1, piece)).addcmul_(slope, offset)
        if keep:
            self.state = (gates, piece, offset, slope)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        gates, piece, offset, slope = self.state
        self.state = ()
        C, n, R, width = gates.shape
        window = grad[..., :width]
        pair = torch.complex(window, offset.mul_(window))
        pieces = self.beside.shape[1] // 2
        sums = torch.zeros(C, n, R, pieces, dtype=pair.dtype, device=pair.device).scatter_add_(-1, piece, pair)
        sums = torch.view_as_real(sums).flatten(3)
        # dL/dg_ik sums dL/dp_ij over j <= k: here, over the columns from k on. (Its negative is what is computed.)
        grad_positions = slope.mul_(window)
        running = grad_positions.cumsum(-1)
        total = running[..., -1:].clone()
        grad_gates = running.sub_(grad_positions).sub_(total)
        from_gates = self.through_gates(torch.ops.aten.sigmoid_backward(grad_gates, gates), window, block)
        query = self._query(block)
        self.grad_interleaved.addmm_(query.reshape(-1, query.shape[-1]).T, sums.view(-1, sums.shape[-1]))
        grad_query = torch.matmul(sums, self.interleaved.T)
        if self.grad_position_query is not None:
            self.grad_position_query[block.chunk, :, block.rows] = grad_query
            return from_gates
        return grad_query if from_gates is None else grad_query.add_(from_gates)

    def through_gates(self, negative: torch.Tensor, window: torch.Tensor, block: Block) -> torch.Tensor | None:
        """Takes the negative gradient of the gates' logits (C, n, R, w) to what they are made of.

        Adds to `window` (C, n, R, w), in place, the gradient of the content logits; returns that of the query rows.
        """
        window.sub_(negative)
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


class GatedCoPETerm(CoPETerm):
    """The term of CoPE whose gates other keys than the content's open: `CoPEParameters.gates`.

    Tensors: the table (D, P), what opens the gates (B, G, K, D), and the query as in `CoPETerm`. Settings: the
    factor on q.e, the factor on the gates, and 1 if that query opens the gates (0: the one of the content).
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
        opening = (rows @ gate_key.to(content.dtype).transpose(2, 3)).to(content.dtype) * settings[1]
        opening = opening.view(content.shape).masked_fill(content < HIDDEN, MASKED)
        return interpolated(torch.sigmoid(opening), position_query, table, settings[0])

    def __init__(self, tensors: Sequence[torch.Tensor], settings: Sequence[float], attention: Any) -> None:
        super().__init__(tensors, settings, attention)
        self.gate_key = tensors[1].to(attention.dtype).flip(2).reshape(attention.N, attention.K, attention.D)
        self.grad_gate_key = torch.zeros_like(self.gate_key)

    def _factors(self, block: Block, width: int) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """Returns the scaled rows (C, n * R, D), the gate keys (C, width, D), and where these are."""
        columns = slice(block.columns.start, block.columns.start + width)
        query = (self._query(block) if self.settings[2] else block.query).to(self.gate_key.dtype) * self.settings[1]
        return query.reshape(query.shape[0], -1, query.shape[-1]), self.gate_key[block.chunk, columns], columns

    def open(self, logits: torch.Tensor, block: Block, width: int) -> torch.Tensor:
        rows, keys, _ = self._factors(block, width)
        opening = torch.bmm(rows, keys.transpose(1, 2)).view(*logits.shape[:3], width)
        # Where nothing but causality hides keys, older ones than the block's rows are seen.
        some = min(width, logits.shape[2]) if block.causal_only else width
        opening[..., :some].masked_fill_(logits[..., :some] < HIDDEN, MASKED)
        return opening.sigmoid_()

    def through_gates(self, negative: torch.Tensor, window: torch.Tensor, block: Block) -> torch.Tensor:
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

    A key is counted if its gate is open, and positions are counts:

        g_ij = sigmoid(s_ij), s_ij the scaled, masked content logit (Eq. 3)
        p_ij = sum of g_ik for k = j..i, at most num_positions - 1 (Eq. 4)
        z_i[p] = q_i . e[p], between integers by linear interpolation (Eq. 7, 8)
        logit = s_ij + z_i[p_ij] (Eq. 9)

    Needs no positions from outside: padding and other documents have closed gates. Other keys than the content's may
    open the gates: see `CoPEParameters.gates`.

    With RoPE ("cope+rope") there is no released recipe; here gates and content use the rotated queries and keys, and
    separate gate keys are rotated like the keys, so that gates depend on distances. The table is multiplied with the
    query before rotation: a rotated one would make z_i[p] depend on the absolute position of the query. The gates see
    the content only with "unrotated_key", and with relative positions or ALiBi ("cope+relative", "cope+alibi").
    """

    name = "cope"
    paper = "Golovneva et al. 2024 (2405.18719)"
    summary = "counts the keys whose content opens a gate; learned embedding of the (fractional) count"
    parameters_class = CoPEParameters
    kernels: ClassVar[tuple[str, ...]] = ("kernel_cope",)
    term: type[Term] = CoPETerm

    def __init__(self, config: Any, parameters: CoPEParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        self.rotated = "rope" in config.layer_encodings(layer_idx)
        # The position embeddings e, (D, P), shared by heads.
        self.table = None if parameters.share_across_layers else LearnedTable(self.head_dim, parameters.num_positions)
        self.gate_key = None
        if parameters.gates == "separate_key":
            self.gate_key = GateKey(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        if parameters.gates != "key":
            self.term = GatedCoPETerm

    @classmethod
    def shared(cls, config: Any, parameters: CoPEParameters) -> SharedTable | None:
        return SharedTable(head_dim(config), parameters.num_positions) if parameters.share_across_layers else None

    def uses(self, hook: str) -> bool:
        cached = ("separate_key", "unrotated_key")
        return self.parameters_.gates in cached if hook == "cached_state" else super().uses(hook)

    def _table(self, context: PositionContext) -> torch.Tensor:
        return context.shared[self.name] if self.table is None else self.table(None)

    def cached_state(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns the gate keys of the new tokens, (B, G, Q, D): W_g h, rotated if the keys are, or unrotated keys."""
        if self.gate_key is None:
            return context.key
        states = self.gate_key(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.rotated:
            states, _ = apply_rotary_pos_emb(states, states[:, :0], *context.shared["rope"])
        return states.to(key.dtype)

    def _gate_key(self, context: PositionContext, value: torch.Tensor | None) -> torch.Tensor | None:
        """Returns what opens the gates, (B, G, K, D), or None for the keys."""
        return value if self.parameters_.gates == "value" else context.states.get(self.name)

    def term_inputs(self, context: PositionContext, scaling: float) -> tuple[tuple[torch.Tensor, ...], tuple]:
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
