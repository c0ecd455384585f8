"""The gates of CoPE that other keys than the content's open: `CoPEParameters.gates`.

A saved folder whose configuration does not use them is without this file; `CoPE` finds the term by its name.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, P positions in the table; in
blocks: C a chunk of (batch, key head), n heads that share a key head, R rows, w columns of the window.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .attention_blockwise import MASKED, Block
from .position_base import HIDDEN
from .position_cope import CoPETerm, interpolated


class GatedCoPETerm(CoPETerm):
    """The term of CoPE with other gates.

    Tensors: the table (D, P), what opens the gates (B, G, K, D), and the query as in `CoPETerm`. Settings: the
    factor on q.e, the factor on the gates, and 1 if that query opens the gates (0: the one of the content).
    """

    name = "cope_gates"
    differentiable = (True, True, True)
    required = 2

    @staticmethod
    def bias(
        content: torch.Tensor, query: torch.Tensor, tensors: Sequence[torch.Tensor], settings: Sequence[float]
    ) -> torch.Tensor:
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
