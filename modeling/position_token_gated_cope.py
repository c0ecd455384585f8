"""Token-gated CoPE: counts tokens, from the start of the text, by a linear gate on each; not the method of 2405.18719.

Axes: B batch, H query heads, G key heads, n = H // G heads that share a key head, Q query length, K key length, D head
dim, E hidden size, P positions in the table.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .attention_blockwise import compute_dtype, join_digits, split_digits
from .attention_mask import is_hidden, is_key_ranges, readable
from .head_linear import HeadLinear
from .learned_table import LearnedTable
from .position_base import Parameters, PositionContext, PositionEncoding

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

    def invalid(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.num_positions is not None and self.num_positions < 2:
            yield "num_positions", "it must be at least 2, or None for min(2048, max_position_embeddings)"

    def resolve(self, config: Any) -> "TokenGatedCoPEParameters":
        if self.num_positions is not None:
            return self
        return dataclasses.replace(self, num_positions=max(2, min(2048, config.max_position_embeddings)))


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
    bias_reads = "mask"

    def __init__(self, config: Any, parameters: TokenGatedCoPEParameters, layer_idx: int) -> None:
        super().__init__(config, parameters, layer_idx)
        num_positions = parameters.num_positions
        assert num_positions is not None, "resolve fills it in"
        # Without the sigmoid: adapters add to what a linear layer returns.
        self.gate = HeadLinear(config.hidden_size, config.num_attention_heads, STD, bias=0.0)
        self.table = LearnedTable(num_positions, self.head_dim, std=STD)
        # The matrix W_p.
        self.position_query = LearnedTable(self.head_dim, self.head_dim, std=STD)

    def state_width(self) -> int:
        # Two numbers for each query head.
        return 2 * self.config.num_attention_heads // self.config.num_key_value_heads

    def cached_state(self, hidden: torch.Tensor, key: torch.Tensor, context: PositionContext) -> torch.Tensor:
        """Returns the gates of the new tokens, (B, G, Q, 2 n): n = H // G heads, two numbers each."""
        B, G, Q, _ = key.shape
        logits = self.gate(hidden)
        gates = torch.sigmoid(logits.to(compute_dtype(logits.dtype)))
        return split_digits(gates.view(B, Q, G, -1).transpose(1, 2), key.dtype)

    def _gates(self, context: PositionContext) -> torch.Tensor:
        """Returns the gates of all tokens, float32 or float64 (B, H, K)."""
        return join_digits(context.states[self.name]).transpose(2, 3).flatten(1, 2)

    def bias(self, logits: torch.Tensor, query: torch.Tensor, context: PositionContext, scaling: float) -> torch.Tensor:
        dtype = compute_dtype(query.dtype)
        gates = self._gates(context)[:, :, None].to(dtype)
        table = self.table(None).to(dtype)
        P = table.shape[0]
        positions = torch.where(is_hidden(logits), 0.0, gates).cumsum(-1).clamp(0.0, P - 1.001)
        # The gradient of a position flows through the fraction only; where it is clamped, there is none.
        z = F.linear(context.query.to(dtype), self.position_query(None).to(dtype)) @ table.T * scaling
        step = torch.cat([z[..., 1:] - z[..., :-1], torch.zeros_like(z[..., :1])], -1)
        # NaN is no index; it stays in the fraction.
        floor = positions.detach().long().clamp(0, P - 1)
        return z.gather(-1, floor) + (positions - floor) * step.gather(-1, floor)

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: PositionContext, **options: Any
    ) -> torch.Tensor:
        # A token has one position for all rows that see it, so logits are products of wider vectors: [q, W_p q] and
        # [k, e[P]].
        from .kernel_plain import plain_attention

        gates, table = self._gates(context), self.table(None).float()
        if (key_ranges := options["key_ranges"]) is None:
            positions = gates.double().cumsum(-1)
        else:
            Q = query.shape[2]
            starts = context.once(
                "token_starts", lambda: token_starts(key_ranges, Q, check=is_key_ranges(context.attention_mask))
            )
            # In float64: differences of sums over thousands of tokens keep their digits.
            sums = gates.masked_fill(key_ranges[:, :, Q:, 0] == 0, 0.0).double().cumsum(-1)
            positions = sums - F.pad(sums, (1, 0)).gather(-1, starts[:, None].expand(sums.shape))
        P = table.shape[0]
        positions = positions.to(gates.dtype).clamp(0.0, P - 1.001)
        # As in `bias`.
        floor = positions.detach().long().clamp(0, P - 1)
        below, above = (F.embedding(level, table) for level in (floor, (floor + 1).clamp(max=P - 1)))
        embeddings = torch.lerp(below, above, (positions - floor)[..., None])
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        own = F.linear(context.query.float(), self.position_query(None).float())
        query, key = torch.cat((query, own.to(query.dtype)), -1), torch.cat((key, embeddings.to(key.dtype)), -1)
        return plain_attention(query, key, value, **options)


def token_starts(key_ranges: torch.Tensor, query_length: int, *, check: bool) -> torch.Tensor:
    """Returns the first token of each token's document, int64 (B, K), any slot for tokens that no row sees.

    Of key ranges (B, 1, Q + K, 2), see `attention_mask`. With `check` they are read, which waits for the device. Raises
    ValueError if rows that see a token begin at different ones.
    """
    key_length = key_ranges.shape[2] - query_length
    low, high = key_ranges[:, 0, :query_length].long().clamp(0, key_length).unbind(-1)
    sees = low < high
    begins = torch.where(sees, low, 0)
    # Documents are contiguous: a token's one begins at the last slot, up to its own, at which a row begins.
    starts = low.new_zeros(key_ranges.shape[0], key_length).scatter_(1, begins, begins).cummax(-1).values
    if check and readable(key_ranges):
        last = starts.gather(1, (high - 1).clamp(min=0))
        if bool((sees & (last != low)).any()):
            raise ValueError(
                "attn_implementation='triton' does not support this attention_mask with 'token_gated_cope': rows that "
                "see a token begin at different ones. Allowed: 'blockwise', 'sdpa', 'eager'."
            )
    return starts
