"""CoPE, Contextual Position Encoding (Golovneva, Wang, Weston, Sukhbaatar, 2405.18719).

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size, P positions in the
table.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from .attention_blockwise import BlockBias
from .cope_bias import CoPEBias, GatedCoPEBias
from .learned_table import LearnedTable, SharedTable
from .position_base import Parameters, PositionContext, PositionEncoding, head_dim


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
