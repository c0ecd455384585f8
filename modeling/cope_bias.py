"""The bias of CoPE for blockwise attention, which CoPE_MLP shares.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, P positions in the table; in
blocks: C a chunk of (batch, key head), n heads that share a key head, R rows, W columns (newest key first, see
`attention_blockwise`), w near columns, S pieces of a function of the position.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from .attention_blockwise import HIDDEN_LOGIT, Block, BlockBias
from .attention_mask import is_hidden


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
            if not block.causal_only and bool((saturated | (logits[..., width:].amax(-1) < HIDDEN_LOGIT / 2)).all()):
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
    floor = positions.detach().long().clamp(0, last)
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
        gate_logits = gate_logits.view(content.shape).masked_fill(is_hidden(content), HIDDEN_LOGIT)
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
        gate_logits[..., :masked].masked_fill_(is_hidden(logits[..., :masked]), HIDDEN_LOGIT)
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
