"""GPT-2-style models with a choice of position encoding, of norm, and grouped heads.

Weight names and shapes equal those of `transformers.GPT2LMHeadModel`.
Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.processing_utils import Unpack
from transformers.pytorch_utils import Conv1D
from transformers.utils import TransformersKwargs

from .attention_block import AttentionBlock
from .configuration_whatwhere_gpt2 import WhatWhereGPT2Config
from .decoder import CausalLM, Decoder
from .forward_arguments import CachedLayer
from .position_modules import SharedPositionEncodings, embedding
from .pretrained_model import WhatWherePreTrainedModel, register


def _norm(config: WhatWhereGPT2Config) -> nn.Module:
    if config.norm_type == "rmsnorm":
        return LlamaRMSNorm(config.n_embd, eps=config.layer_norm_epsilon)
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


class WhatWhereGPT2Attention(AttentionBlock):
    """Self-attention with one fused projection; everything about positions is in `encodings`."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.head_dim = config.n_embd // config.n_head
        self.split_sizes = [config.n_embd, *[config.num_key_value_heads * self.head_dim] * 2]
        self.scaling = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer_idx + 1
        self.c_attn = Conv1D(sum(self.split_sizes), config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        # A module, so that what turns off dropout by modules (TRL's DPO does) finds it.
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    @property
    def dropout(self) -> float:  # type: ignore[override]
        return self.attn_dropout.p

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projected = self.c_attn(hidden)
        if self.config.reorder_and_upcast_attn:
            projected = projected.float()
        return tuple(
            states.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for states in projected.split(self.split_sizes, 2)
        )

    def output(self, states: torch.Tensor) -> torch.Tensor:
        return self.resid_dropout(self.c_proj(states.to(self.c_proj.bias.dtype)))


class WhatWhereGPT2Block(CachedLayer):
    """Attention, then the MLP; normed before (GPT-2), or after what they add to (`norm_position="post"`)."""

    def __init__(self, config: WhatWhereGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.post_norm = config.norm_position == "post"
        self.ln_1 = _norm(config)
        self.attn = WhatWhereGPT2Attention(config, layer_idx)
        self.ln_2 = _norm(config)
        self.mlp = GPT2MLP(config.n_inner if config.n_inner is not None else 4 * config.n_embd, config)
        # Transformers initialises modules of code outside the library only if they own parameters themselves: the
        # projections must know that they end a residual path.
        for projection in (self.attn.c_proj, self.mlp.c_proj):
            setattr(projection, "ends_residual_path", True)  # noqa: B010

    def forward(self, hidden_states: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> torch.Tensor:
        if self.post_norm:
            attended, _ = self.attn(hidden_states, **kwargs)
            hidden_states = self.ln_1(hidden_states + attended)
            return self.ln_2(hidden_states + self.mlp(hidden_states))
        attended, _ = self.attn(self.ln_1(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class WhatWhereGPT2PreTrainedModel(WhatWherePreTrainedModel):
    """Weights, loading and saving of the GPT-2-style family."""

    config: WhatWhereGPT2Config
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    _no_split_modules = ["WhatWhereGPT2Block"]
    _can_record_outputs = {"hidden_states": WhatWhereGPT2Block, "attentions": WhatWhereGPT2Attention}
    # Causal masks that old GPT-2 checkpoints carry.
    _keys_to_ignore_on_load_unexpected = [r"\.attn\.bias$", r"\.attn\.masked_bias$"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Conv1D):
            std = self.config.initializer_range
            if getattr(module, "ends_residual_path", False):
                # Radford et al. 2019, section 2.3: scaled by the number of residual paths.
                std /= math.sqrt(2 * self.config.n_layer)
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.bias)


class WhatWhereGPT2Model(Decoder, WhatWhereGPT2PreTrainedModel):
    """The decoder without a head."""

    takes_one_row_of_positions = True

    def __init__(self, config: WhatWhereGPT2Config) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = embedding(config)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([WhatWhereGPT2Block(config, i) for i in range(config.n_layer)])
        self.ln_f = _norm(config) if config.norm_position == "pre" else nn.Identity()
        self.shared_encodings = SharedPositionEncodings(config)
        self.gradient_checkpointing = False
        self.post_init()

    # The names that `Decoder` uses.
    layers = property(lambda self: self.h)
    norm = property(lambda self: self.ln_f)

    def embed(
        self, embeddings: torch.Tensor, position_ids: torch.Tensor, token_type_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the input of the first layer (B, Q, E)."""
        if self.wpe is not None:
            embeddings = self.wpe(embeddings, position_ids)
        if token_type_ids is not None:
            embeddings = embeddings + self.wte(token_type_ids)
        return self.drop(embeddings)


class WhatWhereGPT2ForCausalLM(CausalLM, WhatWhereGPT2PreTrainedModel, GenerationMixin):
    """The decoder with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}


class WhatWhereGPT2ForSequenceClassification(GenericForSequenceClassification, WhatWhereGPT2PreTrainedModel):
    """The decoder with a classification head on the last token that is not padding."""

    base_model_prefix = "transformer"


class WhatWhereGPT2ForTokenClassification(GenericForTokenClassification, WhatWhereGPT2PreTrainedModel):
    """The decoder with a classification head on every token; attention is causal."""

    base_model_prefix = "transformer"

    def __init__(self, config: WhatWhereGPT2Config) -> None:
        WhatWhereGPT2PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.transformer = WhatWhereGPT2Model(config)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(config.n_embd, self.num_labels)
        self.post_init()

    @property
    def score(self) -> nn.Linear:
        """The head, under the name that the generic forward uses; GPT-2's weights call it `classifier`."""
        return self.classifier


class WhatWhereGPT2ForQuestionAnswering(GenericForQuestionAnswering, WhatWhereGPT2PreTrainedModel):
    """The decoder with a head for the start and the end of an answer."""

    base_model_prefix = "transformer"
    # The generic head has Llama's names.
    get_input_embeddings = WhatWhereGPT2PreTrainedModel.get_input_embeddings
    set_input_embeddings = WhatWhereGPT2PreTrainedModel.set_input_embeddings


register(
    WhatWhereGPT2Model,
    WhatWhereGPT2ForCausalLM,
    WhatWhereGPT2ForSequenceClassification,
    WhatWhereGPT2ForTokenClassification,
    WhatWhereGPT2ForQuestionAnswering,
)
