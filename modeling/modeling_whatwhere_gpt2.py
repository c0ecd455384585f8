"""GPT-2-style models with a choice of position encoding, of norm, and grouped heads.

Weight names and shapes equal those of `transformers.GPT2LMHeadModel`.
Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.processing_utils import Unpack
from transformers.pytorch_utils import Conv1D
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import ALL_ATTENTION_FUNCTIONS, eager_attention_forward
from .attention_block import AttentionBlock
from .configuration_whatwhere_gpt2 import WhatWhereGPT2Config
from .position_base import PositionContext
from .position_registry import SharedPositionEncodings, embedding
from .pretrained_model import WhatWherePreTrainedModel, causal_lm_output, prepare_forward, register


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
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_context: PositionContext,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            states.view(shape).transpose(1, 2) for states in self.c_attn(hidden_states).split(self.split_sizes, dim=2)
        )
        if self.config.reorder_and_upcast_attn:
            query, key, value = query.float(), key.float(), value.float()
        context = self.layer_context(position_context, value)
        query, key = self.before_cache(query, key, context)
        key, value = self.update_cache(hidden_states, key, context, past_key_values)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attn_dropout.p if self.training else 0.0,
            scaling=self.scaling,
            context=context,
            **kwargs,
        )
        self.check_weights(weights, kwargs.get("output_attentions"))
        output = self.merge_heads(output, hidden_states, context)
        return self.resid_dropout(self.c_proj(output.to(hidden_states.dtype))), weights


class WhatWhereGPT2Block(GradientCheckpointingLayer):
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
    _keys_to_ignore_on_load_unexpected = [r"attn\.bias", r"attn\.masked_bias"]

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


class WhatWhereGPT2Model(WhatWhereGPT2PreTrainedModel):
    """The decoder without a head."""

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

    @merge_with_config_defaults
    @capture_outputs
    def forward(  # type: ignore[misc]
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Runs the decoder.

        Args:
            input_ids: int64 (B, Q), or None if `inputs_embeds` is given.
            past_key_values: the cache.
            attention_mask: (B, past + Q) with 0 for padding, or 4D (B, 1, Q, K).
            token_type_ids: int64 (B, Q), token ids whose embeddings are added, as in GPT-2.
            position_ids: int64 (B, Q); positions that start again separate packed documents, where there is neither an
                attention_mask nor anything in the cache.
            inputs_embeds: (B, Q, E).
            use_cache: whether to return a cache.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`; a mask of the wrong shape; a sequence longer
                than the encoding supports.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.wte(input_ids)
        positions, mask, context, past_key_values = prepare_forward(
            self, inputs_embeds, attention_mask, position_ids, past_key_values, use_cache
        )
        hidden_states = inputs_embeds if self.wpe is None else self.wpe(inputs_embeds, positions)
        if token_type_ids is not None:
            hidden_states = hidden_states + self.wte(token_type_ids)
        hidden_states = self.drop(hidden_states)
        for block in self.h:
            hidden_states = block(
                hidden_states,
                attention_mask=mask,
                position_context=context,
                position_ids=positions,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(hidden_states), past_key_values=past_key_values)


class WhatWhereGPT2ForCausalLM(WhatWhereGPT2PreTrainedModel, GenerationMixin):
    """The decoder with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: WhatWhereGPT2Config) -> None:
        super().__init__(config)
        self.transformer = WhatWhereGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(  # type: ignore[misc]
        self,
        input_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Runs the decoder and the head; see `WhatWhereGPT2Model.forward`.

        Args:
            labels: int64 (B, Q), -100 where ignored; shifted inside the model.
            logits_to_keep: compute the logits of the last so many tokens only; 0 for all; or indices.
            kwargs: `num_items_in_batch` divides the loss by that number instead of the mean.

        Returns:
            `loss` (scalar, if labels were given) and `logits` (B, kept, V).
        """
        outputs: BaseModelOutputWithPast = self.transformer(
            input_ids=input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return causal_lm_output(self, outputs, labels, logits_to_keep, **kwargs)


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
    transformer: WhatWhereGPT2Model

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def set_input_embeddings(self, value: Any) -> None:
        self.transformer.wte = value


register(
    WhatWhereGPT2Model,
    WhatWhereGPT2ForCausalLM,
    WhatWhereGPT2ForSequenceClassification,
    WhatWhereGPT2ForTokenClassification,
    WhatWhereGPT2ForQuestionAnswering,
)
