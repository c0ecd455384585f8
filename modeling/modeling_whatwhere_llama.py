"""Llama-style models (RMSNorm, SwiGLU, grouped heads) with a choice of position encoding.

Weight names and shapes equal those of `transformers.LlamaForCausalLM`.
Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .attention_block import AttentionBlock
from .configuration_whatwhere_llama import WhatWhereLlamaConfig
from .decoder import CausalLM, Decoder
from .forward_arguments import CachedLayer
from .position_modules import SharedPositionEncodings, embedding
from .pretrained_model import WhatWherePreTrainedModel, register


class WhatWhereLlamaAttention(AttentionBlock):
    """Grouped-head self-attention; everything about positions is in `encodings`."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=bias)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = (projection(hidden) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return tuple(one.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for one in states)

    def output(self, states: torch.Tensor) -> torch.Tensor:
        return self.o_proj(states)


class WhatWhereLlamaDecoderLayer(CachedLayer):
    """Pre-norm block: attention, then SwiGLU."""

    def __init__(self, config: WhatWhereLlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = WhatWhereLlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class WhatWhereLlamaPreTrainedModel(WhatWherePreTrainedModel):
    """Weights, loading and saving of the Llama-style family."""

    config: WhatWhereLlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ["WhatWhereLlamaDecoderLayer"]
    _can_record_outputs = {"hidden_states": WhatWhereLlamaDecoderLayer, "attentions": WhatWhereLlamaAttention}


class WhatWhereLlamaModel(Decoder, WhatWhereLlamaPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: WhatWhereLlamaConfig) -> None:
        super().__init__(config)
        # Public attributes of stock Llama.
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_positions = embedding(config)
        self.layers = nn.ModuleList([WhatWhereLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.shared_encodings = SharedPositionEncodings(config)
        self.gradient_checkpointing = False
        self.post_init()

    def embed(
        self, embeddings: torch.Tensor, position_ids: torch.Tensor, token_type_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the input of the first layer (B, Q, E)."""
        return embeddings if self.embed_positions is None else self.embed_positions(embeddings, position_ids)


class WhatWhereLlamaForCausalLM(CausalLM, WhatWhereLlamaPreTrainedModel, GenerationMixin):
    """The decoder with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}


class WhatWhereLlamaForSequenceClassification(GenericForSequenceClassification, WhatWhereLlamaPreTrainedModel):
    """The decoder with a classification head on the last token that is not padding."""


class WhatWhereLlamaForTokenClassification(GenericForTokenClassification, WhatWhereLlamaPreTrainedModel):
    """The decoder with a classification head on every token; attention is causal."""


class WhatWhereLlamaForQuestionAnswering(GenericForQuestionAnswering, WhatWhereLlamaPreTrainedModel):
    """The decoder with a head that marks where an answer starts and ends."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint; see the base class. Stock ones of this head call the decoder `transformer`."""
        kwargs.setdefault("key_mapping", {r"^transformer\.": "model."})
        return super().from_pretrained(*args, **kwargs)


register(
    WhatWhereLlamaModel,
    WhatWhereLlamaForCausalLM,
    WhatWhereLlamaForSequenceClassification,
    WhatWhereLlamaForTokenClassification,
    WhatWhereLlamaForQuestionAnswering,
)
