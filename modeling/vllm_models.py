"""The classes by which vLLM builds models of this package; see `vllm_plugin`."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import vllm
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

from .attention_block import AttentionBlock
from .attention_choice import layer_default
from .attention_engine import batch_dependence
from .position_base import head_dim
from .position_plan import Part, layer_plan, max_length
from .position_pope import PolarTables, ShiftTables
from .pretrained_model import minor_version
from .vllm_plugin import TESTED, interface

logger = logging.get_logger(__name__)

with interface():
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.models.transformers import (
        TransformersEmbeddingModel,
        TransformersForCausalLM,
        TransformersForSequenceClassification,
    )
    from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
    from vllm.v1.attention.selector import get_attn_backend

    from .vllm_attention import NATIVE, PAGED, PagedBackend, choose_paged_attention, store_output
    from .vllm_check import FirstPrompt, is_checked


if minor_version(vllm.__version__) not in map(minor_version, TESTED):
    logger.warning_once(f"vLLM {vllm.__version__} was not tested with this package; tested: {', '.join(TESTED)}.")


class _Served:
    """What serves models of both families; mixed into vLLM's classes for models of Transformers.

    Each attention layer gets an `Attention` of vLLM, for which vLLM allocates pages. Models without a bias in any layer
    use vLLM's own kernels; for others, `paged_attention_forward` reads and writes the pages, and vLLM does not compile
    them.
    """

    # Loads the plain model from the folder.
    auto_class: ClassVar[Any]

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        with interface():
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
            for layer in self.modules():
                if isinstance(layer, LinearBase) and not isinstance(layer.quant_method, UnquantizedLinearMethod):
                    layer.quant_method.apply = functools.partial(_apply_to_rows, layer.quant_method.apply)
        self.is_loaded, self.first_prompt = False, None

    def load_weights(self: Any, weights: Any) -> set[str]:
        loaded = super().load_weights(weights)  # type: ignore[misc]
        # Weights that are loaded later, as trainers do, are not those of the folder.
        checked = not self.is_loaded and is_checked(self.vllm_config)
        self.first_prompt = FirstPrompt(self, self.auto_class) if checked else None
        self.is_loaded = True
        return loaded

    def forward(self: Any, input_ids: Any, positions: Any, *args: Any, **options: Any) -> Any:
        with interface():
            hidden = super().forward(input_ids, positions, *args, **options)  # type: ignore[misc]
            if self.first_prompt is not None and self.first_prompt.compare(input_ids, positions, hidden):
                self.first_prompt = None
        return hidden

    def _patch_config(self: Any) -> None:
        super()._patch_config()  # type: ignore[misc]
        config = self.text_config
        encoding = f"position_encoding={config.position_encoding!r}"
        if reason := batch_dependence(config):
            raise ValueError(
                f"{reason} ({encoding}) is not supported in vLLM: keys would depend on other tokens of a batch. Use "
                "generate()."
            )
        limit, wanted = max_length(config), self.model_config.max_model_len
        if limit is not None and wanted > limit:
            raise ValueError(f"max_model_len={wanted} is longer than {encoding} supports ({limit} tokens).")
        config._attn_implementation = NATIVE if self._is_native(config) else PAGED

    def _is_native(self: Any, config: Any) -> bool:
        """Returns True if vLLM's own kernels compute every layer."""
        plan = layer_plan(config)
        if config.attention_weights != "softmax" or any(layer_default(parts) != "sdpa" for parts in plan):
            return False
        dtype, cache_dtype = torch.get_default_dtype(), self.cache_config.cache_dtype
        for width in {_native_width(config, parts) for parts in plan}:
            try:
                supported = get_attn_backend(width, dtype, cache_dtype, use_mla=False).supports_head_size(width)
            except ValueError:
                supported = False
            if not supported:
                logger.warning_once(
                    f"vLLM has no attention kernel for {width} channels: slower attention of this package is used."
                )
                return False
        return True

    def _decorate_cls_for_torch_compile(self: Any, *, enable_if: Any, **options: Any) -> None:
        # A class is decorated once in a process, which may serve several models.
        def is_compiled(vllm_config: Any) -> bool:
            config = vllm_config.model_config.hf_config.get_text_config()
            return config._attn_implementation == NATIVE and enable_if(vllm_config)

        super()._decorate_cls_for_torch_compile(enable_if=is_compiled, **options)  # type: ignore[misc]

    def _create_attention_instances(self: Any, prefix: str = "") -> None:
        config, world = self.text_config, self.tp_group.world_size
        native, plan = config._attn_implementation == NATIVE, layer_plan(config)
        heads, key_heads = config.num_attention_heads // world, max(1, config.num_key_value_heads // world)
        for name, layer in self.model.named_modules():
            if native and isinstance(layer, (PolarTables, ShiftTables)):
                store_output(layer)
            if not isinstance(layer, AttentionBlock):
                continue
            options: dict[str, Any] = {}
            if native:
                width = _native_width(config, plan[layer.layer_idx])
            else:
                width = head_dim(config) + sum(part.state_width() for part in layer.encodings.hooks["cached_state"])
                options = {"attn_backend": PagedBackend, "head_size_v": head_dim(config)}
                choose_paged_attention(layer, self.model.shared_encodings)
            layer.first_head = self.tp_group.rank_in_group * heads
            layer.attn = Attention(
                heads,
                width,
                layer.scaling,
                key_heads,
                cache_config=self.cache_config,
                quant_config=self.quant_config,
                prefix=maybe_prefix(prefix, f"model.{name}.attn"),
                **options,
            )


def _apply_to_rows(apply: Callable, layer: nn.Module, states: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Applies a quantised product to the rows of states (..., E): kernels for CPUs with AMX take two axes only."""
    return apply(layer, states.flatten(0, -2), bias).unflatten(0, states.shape[:-1])


def _native_width(config: Any, parts: list[Part]) -> int:
    """Returns the width of a layer's rotated keys."""
    return head_dim(config) + sum(cls.added_channels(config, parameters) for cls, parameters in parts)


class ForCausalLM(_Served, TransformersForCausalLM):
    """A model with a language-modelling head."""

    auto_class = AutoModelForCausalLM


class ForSequenceClassification(_Served, TransformersForSequenceClassification):
    """A model with a classification head, on the last token."""

    auto_class = AutoModelForSequenceClassification
    default_seq_pooling_type = "LAST"

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # vLLM expects a head that takes one token out of several; ours is a linear layer for the token.
        self.classifier.__class__ = nn.Linear

    def _create_hf_to_vllm_mapper(self) -> None:
        super()._create_hf_to_vllm_mapper()
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_prefix={"score.": "classifier."})


class EmbeddingModel(_Served, TransformersEmbeddingModel):
    """A model without a head; by default, an embedding is that of the last token."""

    auto_class = AutoModel
    default_seq_pooling_type = "LAST"
