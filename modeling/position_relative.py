"""Relative position embeddings on the keys (Shaw, Uszkoreit, Vaswani 2018, 1803.02155), as the baseline of CoPE.

Axes: B batch, H query heads, Q query length, K key length, D head dim, P positions in the table; in blocks: C a chunk
of (batch, key head), n heads that share a key head, R rows, W columns (newest key first, see `attention_blockwise`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from .attention_blockwise import Block, BlockBias, compute_dtype
from .learned_table import SharedTable
from .position_base import Parameters, PositionContext, PositionEncoding, head_dim


@dataclasses.dataclass(frozen=True)
class RelativeParameters(Parameters):
    """Parameters of relative positions.

    Attributes:
        num_positions: entries of the table, for the distances 0 .. num_positions - 1. None: max_position_embeddings.
        beyond: for larger distances: "error" (longer sequences raise an error), "none" (no embedding: 0), "last"
            (the last entry: "relative-capped").
    """

    limits = "distances"
    num_positions: int | None = None
    beyond: Literal["error", "none", "last"] = "error"

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.num_positions is not None and self.num_positions < 1:
            yield "num_positions", "it must be at least 1, or None for max_position_embeddings"

    def max_length(self, config: Any) -> int | None:
        return self.num_positions if self.beyond == "error" else None

    def resolve(self, config: Any) -> "RelativeParameters":
        if self.num_positions is not None:
            return self
        return dataclasses.replace(self, num_positions=config.max_position_embeddings)


class RelativeBias(BlockBias):
    """The bias of relative positions: tensors are the table (P, D), the query positions and the key positions.

    Settings: the factor on q.e, and 1 if larger distances get the last entry, 0 if they get none.
    """

    name = "relative"
    differentiable = (True, False, False)

    @staticmethod
    def bias(content: torch.Tensor, query: torch.Tensor, tensors: Sequence, settings: Sequence) -> torch.Tensor:
        table, query_positions, key_positions = tensors
        scale, capped = settings
        P = table.shape[0]
        # Negative distances are masked.
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).clamp(min=0)[:, None]
        dtype = compute_dtype(query.dtype)
        z = query.to(dtype) @ table.T.to(dtype) * scale
        shape = (*z.shape[:-1], key_positions.shape[-1])
        bias = z.gather(-1, distance.clamp(max=P - 1).expand(shape))
        return bias if capped else bias.masked_fill(distance >= P, 0.0)

    def prepare(self) -> None:
        self.table = self.tensors[0].to(self.attention.dtype)
        self.query_positions, self.key_positions = self.tensors[1], self.tensors[2].flip(1)
        self.scale, self.capped = self.settings
        self.grad_table = torch.zeros_like(self.table)

    def _distances(self, block: Block) -> tuple[torch.Tensor, bool]:
        """Returns the distances (1 or C, R, W), and whether they are the distances between slots, w + r - (R - 1)."""
        rows = self.query_positions[:, block.rows]
        columns = self.key_positions[:, block.columns]
        rows = rows[block.batch] if rows.shape[0] > 1 else rows
        columns = columns[block.batch] if columns.shape[0] > 1 else columns
        if block.causal_only and self.attention.by_data:
            R, W = rows.shape[1], columns.shape[1]
            regular = (columns == columns[:, :1] - torch.arange(W, device=columns.device)).all()
            regular &= (rows == columns[:, :1] + torch.arange(1 - R, 1, device=rows.device)).all()
            if bool(regular):
                return rows, True
        return (rows[:, :, None] - columns[:, None, :]).clamp_(min=0), False

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        C, n, R, W = logits.shape
        used = min(W, self.table.shape[0])
        distance, regular = self._distances(block)
        table = self.table[:used] if regular else self.table
        z = torch.matmul(block.query.to(table.dtype), table.T).mul_(self.scale)
        if regular:
            # Row r of a table that starts R - 1 columns later, read from column r on: z[r, w + r - (R - 1)].
            shifted = z.new_zeros(C, n, R, R - 1 + W)
            shifted[..., R - 1 : R - 1 + used] = z
            if self.capped:
                shifted[..., R - 1 + used :] = z[..., -1:]
            logits.add_(self._skewed(shifted, W))
            return
        index = distance.clamp(max=self.table.shape[0] - 1)[:, None].expand(C, n, R, W)
        bias = z.gather(-1, index)
        logits.add_(bias if self.capped else bias.masked_fill_((distance >= self.table.shape[0])[:, None], 0.0))

    @staticmethod
    def _skewed(shifted: torch.Tensor, width: int) -> torch.Tensor:
        C, n, R, length = shifted.shape
        return shifted.as_strided((C, n, R, width), (n * R * length, R * length, length + 1, 1))

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        C, n, R, W = grad.shape
        P, D = self.table.shape
        used = min(W, P)
        distance, regular = self._distances(block)
        if regular:
            table = self.table[:used]
            shifted = grad.new_zeros(C, n, R, R - 1 + W)
            self._skewed(shifted, W).copy_(grad)
            grad_z = shifted[..., R - 1 : R - 1 + used]
            if self.capped and used < W:
                grad_z[..., -1] += shifted[..., R - 1 + used :].sum(-1)
        else:
            table = self.table
            index = distance.clamp(max=P - 1)[:, None].expand(C, n, R, W)
            part = grad if self.capped else grad.masked_fill((distance >= P)[:, None], 0.0)
            grad_z = grad.new_zeros(C, n, R, P).scatter_add_(-1, index, part)
        grad_z = grad_z * self.scale
        query = block.query.to(table.dtype)
        self.grad_table[: table.shape[0]] += grad_z.reshape(-1, table.shape[0]).T @ query.reshape(-1, D)
        return grad_z @ table

    def gradients(self) -> list[torch.Tensor]:
        return [self.grad_table]


class RelativePosition(PositionEncoding):
    """Relative position embeddings on the keys: logit = q_i . (k_j + e[i - j]) / sqrt(d).

    The distance is that of the positions of the two tokens, so left padding and packed documents need no care. Beyond
    the table, see `RelativeParameters.beyond`; by default longer sequences raise an error.
    """

    name = "relative"
    paper = "Shaw et al. 2018 (1803.02155)"
    summary = "learned embedding of the distance i - j on the keys, one table for all heads and layers"
    parameters_class = RelativeParameters
    bias_reads = "nothing"
    block_bias = RelativeBias
    # Gradients of keys of the same position are added in any order.
    deterministic_kernel = False

    @classmethod
    def shared(cls, config: Any, parameters: RelativeParameters) -> SharedTable:
        assert parameters.num_positions is not None, "resolve fills it in"
        width = head_dim(config)
        return SharedTable(parameters.num_positions, width, std=width**-0.5)

    def bias_inputs(self, context: PositionContext, scaling: float) -> tuple[tuple[torch.Tensor, ...], tuple]:
        tensors = context.shared[self.name], context.query_positions, context.key_positions
        return tensors, (scaling, self.parameters_.beyond == "last")

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: PositionContext, **options: Any
    ) -> dict[str, Any]:
        table = context.shared[self.name]
        if self.parameters_.beyond == "none":
            # In the kernels, larger distances have the last entry.
            table = F.pad(table, (0, 0, 0, 1))
        return {"relative": (table, context.query_positions, context.key_positions)}
