"""CoPE_ALiBi: ALiBi with contextual positions as distances (Golovneva et al., 2405.18719, Appendix C, Eq. 10).

Axes: B batch, H query heads, Q query length, K key length; in blocks: C a chunk of (batch, key head), n heads that
share a key head, R rows, W columns (newest key first, see `attention_blockwise`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch

from .attention_blockwise import Block, BlockBias
from .learned_table import LearnedTable
from .position_alibi import alibi_slopes
from .position_base import Parameters, PositionContext, PositionEncoding

# Times any contextual position the bias stays finite in float32.
MAX_SLOPE = 1e6


@dataclasses.dataclass(frozen=True)
class CoPEALiBiParameters(Parameters):
    """Parameters of CoPE_ALiBi.

    Attributes:
        slopes: m_h of head h = 0, 1, ... "fixed": first_slope * 2^-h. "alibi": those that Press et al. recommend, all
            positive (Table 8). "learned": a parameter for each head and layer, 0 at the start.
        first_slope: the slope of head 0 if they are fixed, not 0. The paper's three sets begin at 1, 1/4 and 1/16.
            Eq. 10 adds m p, so that a positive slope favours keys far away; a negative one is a penalty, as in ALiBi.
    """

    slopes: Literal["fixed", "alibi", "learned"] = "fixed"
    first_slope: float = 1.0

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.first_slope == 0 or abs(self.first_slope) > MAX_SLOPE:
            yield "first_slope", f"it must be in [-{MAX_SLOPE:.0e}, {MAX_SLOPE:.0e}], and not 0"
        if self.slopes != "fixed" and self.first_slope != 1:
            yield "first_slope", f"with slopes={self.slopes!r} it is unused; allowed: 1.0, or slopes='fixed'"


class CoPEALiBiBias(BlockBias):
    """The bias of CoPE_ALiBi: its tensor is the slopes (at least H)."""

    name = "cope_alibi"
    reads_content = True
    fades = True
    differentiable: ClassVar[tuple[bool, ...]] = (True,)

    @staticmethod
    def bias(content: torch.Tensor, query: torch.Tensor, tensors: Sequence, settings: Sequence) -> torch.Tensor:
        gates = torch.sigmoid(content)
        positions = gates.flip(-1).cumsum(-1).flip(-1)
        return tensors[0][: query.shape[1], None, None].to(content.dtype) * positions

    def prepare(self) -> None:
        self.slopes = self.attention.of_heads(self.tensors[0])
        self.grad_slopes = torch.zeros_like(self.slopes)

    def add(self, logits: torch.Tensor, block: Block, *, keep: bool) -> None:
        gates = torch.sigmoid(logits)
        positions = gates.cumsum(-1)
        logits.addcmul_(self.slopes[block.group][:, :, None, None], positions)
        if keep:
            self.state = (gates, positions)

    def backward(self, grad: torch.Tensor, block: Block) -> torch.Tensor | None:
        gates, positions = self.state
        self.state = ()
        self.grad_slopes.index_add_(0, block.group, positions.mul_(grad).sum((2, 3)))
        # dL/dg_ik sums dL/dp_ij = m dL_ij over the columns from k on: as a row of dL sums to 0, less those before k.
        before = grad.cumsum(-1).sub_(grad).mul_(self.slopes[block.group][:, :, None, None])
        grad.sub_(torch.ops.aten.sigmoid_backward(before, gates))
        return None

    def gradients(self) -> list[torch.Tensor]:
        # The slopes of other heads than the local ones have none.
        grad = self.grad_slopes.new_zeros(self.tensors[0].shape)
        grad[: self.attention.H] = self.grad_slopes.flatten()
        return [grad]


class CoPEALiBi(PositionEncoding):
    """CoPE_ALiBi: the cumulative sum of CoPE's gates as a bias, with one slope for each head.

        g_ij = sigmoid(s_ij), s_ij the scaled, masked content logit (Eq. 3)
        p_ij = sum of g_ik for k = j..i (Eq. 4), without a limit
        logit = s_ij + m_h p_ij (Eq. 10)

    The sign is that of Eq. 10 as printed: see `CoPEALiBiParameters.first_slope`. Needs no positions from outside:
    padding and other documents have closed gates.
    """

    name = "cope_alibi"
    paper = "Golovneva et al. 2024 (2405.18719), Eq. 10"
    summary = "CoPE's count as a bias, fixed or learned slope for each head (CoPE_ALiBi)"
    parameters_class = CoPEALiBiParameters
    block_bias = CoPEALiBiBias

    def __init__(self, config: Any, parameters: CoPEALiBiParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        self.slopes = LearnedTable(config.num_attention_heads) if parameters.slopes == "learned" else None

    def _slopes(self, context: PositionContext) -> torch.Tensor:
        """Returns the slopes of the local heads and of those after them."""
        first = context.head_offset
        if self.slopes is not None:
            return self.slopes(None)[first:]
        # Computed each time: a non-persistent buffer would be garbage after from_pretrained.
        heads, device = self.config.num_attention_heads, context.query_positions.device
        if self.parameters_.slopes == "alibi":
            return alibi_slopes(heads, device)[first:]
        return self.parameters_.first_slope * 0.5 ** torch.arange(first, heads, dtype=torch.float32, device=device)

    def bias_inputs(self, context: PositionContext, scaling: float) -> tuple[tuple[torch.Tensor, ...], tuple]:
        return (self._slopes(context),), ()
