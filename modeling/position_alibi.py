"""ALiBi, Attention with Linear Biases (Press, Smith, Lewis 2022, 2108.12409).

Axes: B batch, H query heads, Q query length, K key length; in blocks: C a chunk of (batch, key head), n heads that
share a key head, R rows, W columns (newest key first, see `attention_blockwise`).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .attention_blockwise import Block, BlockBias, compute_dtype
from .position_base import Parameters, PositionContext, PositionEncoding


@dataclasses.dataclass(frozen=True)
class ALiBiParameters(Parameters):
    """Parameters of ALiBi.

    Attributes:
        head_fraction: the share of heads with a slope (the first ones), in (0, 1], rounded down to whole heads; other
            heads have no positions. One half is a baseline of the ICML version of the PoPE paper.
    """

    head_fraction: float = 1.0

    def heads(self, config: Any) -> int:
        """Returns the number of heads with a slope."""
        # 44 * (15 / 44) is 14.999999999999998.
        return int(config.num_attention_heads * self.head_fraction + 1e-6)

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        if not 0 < self.head_fraction <= 1 or self.heads(config) < 1:
            yield "head_fraction", f"it must be in (0, 1], and leave at least one of {config.num_attention_heads} heads"


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> torch.Tensor:
    """Returns the slope of each head, all positive, float32 (num_heads,) (Press et al., Section 3 and their code).

    For a power of two, 2^(-8/H), 2^(-16/H), ..., 2^-8. Otherwise those of the power of two below, then every second
    one of the power of two above. They are computed on the device: a CUDA graph must not copy from the CPU.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    heads = torch.arange(num_heads, dtype=torch.float32, device=device)
    # Not exp2, which OpenVINO does not have.
    return torch.pow(2.0, torch.where(heads < power, heads + 1, heads - power + 0.5) * (-8 / power))


class ALiBiBias(BlockBias):
    """The bias of ALiBi: the slopes (at least H), the query positions, the key positions; all constant."""

    name = "alibi"
    fades = True
    differentiable = (False, False, False)

    @staticmethod
    def bias(content: torch.Tensor, query: torch.Tensor, tensors: Sequence, settings: Sequence) -> torch.Tensor:
        slopes, query_positions, key_positions = tensors
        # Negative distances are masked.
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).clamp(min=0)[:, None]
        dtype = compute_dtype(query.dtype)
        return -slopes[: query.shape[1], None, None].to(dtype) * distance.to(dtype)

    def prepare(self) -> None:
        self.slopes = self.attention.of_heads(self.tensors[0])
        self.query_positions, self.key_positions = self.tensors[1], self.tensors[2].flip(1)

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        rows = self.query_positions[:, block.rows]
        columns = self.key_positions[:, block.columns]
        rows = rows[block.batch] if rows.shape[0] > 1 else rows
        columns = columns[block.batch] if columns.shape[0] > 1 else columns
        distance = (rows[:, :, None] - columns[:, None, :]).clamp_(min=0)[:, None].to(logits.dtype)
        logits.addcmul_(self.slopes[block.group][:, :, None, None], distance, value=-1)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        return None


class ALiBi(PositionEncoding):
    """ALiBi: logit = q_i . k_j / sqrt(d) - m_h * (i - j), with fixed slopes m_h; in all heads or in some.

    The distance is that of the positions of the two tokens, so left padding and packed documents need no care.
    """

    name = "alibi"
    paper = "Press et al. 2022 (2108.12409)"
    summary = "fixed linear penalty of the distance, with a slope for each head"
    parameters_class = ALiBiParameters
    bias_reads = "nothing"
    block_bias = ALiBiBias

    def bias_inputs(self, context: PositionContext, scaling: float) -> tuple[tuple[torch.Tensor, ...], tuple]:
        # Computed each time: a non-persistent buffer would be garbage after from_pretrained.
        heads, sloped = self.config.num_attention_heads, self.parameters_.heads(self.config)
        positions = context.query_positions, context.key_positions
        slopes = F.pad(alibi_slopes(sloped, positions[0].device), (0, heads - sloped))
        return (slopes[context.head_offset :], *positions), ()

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: PositionContext, **options: Any
    ) -> dict[str, Any]:
        (slopes, *positions), _ = self.bias_inputs(context, 1.0)
        slopes = -slopes[: query.shape[1], None].double()
        rows, keys = (slopes * one[:, None] for one in positions)
        return {"decay": (rows, keys)}
