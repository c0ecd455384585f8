"""What the models of both families share: loading, saving, generation, and the preparation of a forward pass.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size.
"""

import os
import pathlib
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging

from .attention import choose_implementation
from .attention_mask import is_ranges
from .model_card import card_tags, complete_card
from .position_base import PositionContext
from .position_registry import (
    POSITION_ENCODINGS,
    check,
    parse,
    supported_implementations,
)

logger = logging.get_logger(__name__)

# Keywords of `from_pretrained` that locate files.
_LOCATION = ("cache_dir", "local_files_only", "token", "revision", "subfolder")

# Names of weights before version 3.
_MOVED = ("output_gate", "output_norm", "query_norm", "key_norm", "key_shift", "value_shift")
_RENAMED = {
    **{rf"attn\.position_encoding\.fox\.{part}\.": f"attn.options.{part}." for part in _MOVED},
    r"attn\.position_encoding\.": "attn.encodings.",
    r"position_encoding\.": "shared_encodings.",
}


class WhatWherePreTrainedModel(PreTrainedModel):
    """Base of both families' `PreTrainedModel`s.

    The attention implementation is chosen by the position encoding: `supported_implementations(config)` lists those
    that serve it, the default first.
    """

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        # A field may have been assigned since the configuration was built.
        config.position_encoding_parameters = check(config)
        if config.rotates:
            if getattr(config, "rope_parameters", None) is None:
                config.rope_parameters = {}
                config.convert_rope_params_to_dict()
        elif hasattr(config, "rope_parameters"):
            del config.rope_parameters
        config.validate()
        self._supports_sdpa = "sdpa" in supported_implementations(config)
        super().__init__(config, *inputs, **kwargs)
        # Used by the cards that Transformers and its Trainer write.
        self.add_model_tags(card_tags(config))

    def post_init(self) -> None:
        super().post_init()
        if self.config.base_model_tp_plan is None:
            return
        # On every rank, position parameters see the gradient of the local heads only; a projection of the hidden states
        # is sharded by heads instead, because the gradient of its input would be partial too.
        assert self._tp_plan is not None, "the base class takes it from the configuration"
        for name, module in self.named_modules():
            ours = hasattr(module, "reset") or hasattr(module, "tensor_parallel_style")
            if ours and any(True for _ in module.parameters(recurse=False)):
                pattern = re.sub(r"\.\d+(?=\.)", ".*", name)
                self._tp_plan[pattern] = getattr(module, "tensor_parallel_style", "replicated_with_grad_allreduce")

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention is None and self.config.output_attentions:
            # As Transformers does where the field is assigned.
            requested_attention = "eager"
        chosen = choose_implementation(self.config, requested_attention)
        if requested_attention is None and chosen != "sdpa":
            logger.info(
                "attn_implementation=%r: the fast one for position_encoding=%r.", chosen, self.config.position_encoding
            )
        # Transformers' own check does not know these.
        ours = chosen in ("auto", "triton", "blockwise")
        return chosen if ours else super().get_correct_attn_implementation(chosen, is_init_check)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # The parts of position encodings fill themselves.
        reset = getattr(module, "reset", None)
        if callable(reset):
            reset()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loads a model as `PreTrainedModel.from_pretrained` does; brings weights of older versions up to date."""
        version = cls.config_class.weights_version  # type: ignore[union-attr]
        if pretrained_model_name_or_path is not None and kwargs.get("state_dict") is None:
            location = {key: kwargs[key] for key in _LOCATION if key in kwargs}
            try:
                # The version belongs to the weights, so it is read from their folder and not from a passed config.
                saved, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **location)
            except OSError:
                saved = {}
            if saved.get("model_type") == cls.config_class.model_type:  # type: ignore[union-attr]
                version = saved.get("_weights_version", 1)
        if version < 3:
            kwargs["key_mapping"] = {**_RENAMED, **kwargs.get("key_mapping", {})}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if version < 2:
            for module in model.modules():
                upgrade = getattr(module, "upgrade", None)
                if callable(upgrade):
                    upgrade()
        # Transformers would save the weights under the names that they had in the file.
        model._weight_conversions = None
        model.config._weights_version = model.config.weights_version
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves weights, configuration, the code that loads them, and a model card if the folder has none.

        The folder loads by `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` without the package.
        See `PreTrainedModel.save_pretrained` for the arguments.

        Raises:
            NotADirectoryError: `save_directory` is a file. (Transformers logs that and returns without saving.)
        """
        if os.path.isfile(save_directory):
            raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file; it must be a folder.")
        family = type(self).__module__.rpartition(".")[2]
        prefix = type(self.config).__name__.removesuffix("Config")
        self.config.auto_map = {
            "AutoConfig": f"{family.replace('modeling', 'configuration', 1)}.{prefix}Config",
            "AutoModel": f"{family}.{prefix}Model",
            "AutoModelForCausalLM": f"{family}.{prefix}ForCausalLM",
            "AutoModelForQuestionAnswering": f"{family}.{prefix}ForQuestionAnswering",
            "AutoModelForSequenceClassification": f"{family}.{prefix}ForSequenceClassification",
            "AutoModelForTokenClassification": f"{family}.{prefix}ForTokenClassification",
        }
        self.config._weights_version = self.config.weights_version
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True) and os.path.isdir(save_directory):
            self._reduce_code(pathlib.Path(save_directory))
            complete_card(os.fspath(save_directory), self.config, source=self._loaded_from())

    def _reduce_code(self, folder: pathlib.Path) -> None:
        """Removes from a saved folder the code of encodings that the configuration does not name."""
        registry = folder / "position_registry.py"
        # Never in the folder that this code runs from.
        if not registry.is_file() or folder.samefile(pathlib.Path(__file__).parent):
            return
        used = parse(self.config)
        dropped = {cls.__name__ for name, cls in POSITION_ENCODINGS.items() if name not in used}
        supported = supported_implementations(self.config)
        needed = {
            "attention_blockwise": "blockwise" in supported,
            "attention_triton": any(cls.overrides("kernel") for cls, _ in used.values()),
            "attention_options": self.config.has_attention_options,
        }
        lines = []
        for line in registry.read_text(encoding="utf-8").splitlines():
            imported = re.match(r"from \.(\w+) import (.+)$", line)
            module, names = imported.groups() if imported else ("", line.strip().rstrip(","))
            if names in dropped:
                continue
            line = line if needed.get(module, True) else f"{names.replace(',', ' =')} = None"
            lines.append("COMPLETE = False" if line == "COMPLETE = True" else line)
        registry.write_text("\n".join(lines) + "\n", encoding="utf-8")
        name = f"{type(self).__module__.rpartition('.')[2]}.py"
        copied, kept = (
            {os.path.basename(path) for path in get_relative_import_files(place / name)}
            for place in (pathlib.Path(__file__).parent, folder)
        )
        for unused in copied - kept:
            (folder / unused).unlink(missing_ok=True)

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # Called between the generic card, which Transformers writes when it pushes, and the upload; with
        # `save_pretrained(push_to_hub=True)` before `save_pretrained` goes on here.
        self._reduce_code(pathlib.Path(working_dir))
        complete_card(os.fspath(working_dir), self.config, source=self._loaded_from(), name=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _loaded_from(self) -> str | None:
        path = self.config._name_or_path
        return path if path and os.path.isdir(path) else None


class WhatWhereGenerationMixin:
    """Refuses by name the generation modes that an encoding does not support."""

    def _get_static_cache_init_shape(self) -> tuple[int, int] | None:
        # Cached keys may be wider than a head: the first update knows how wide.
        return None

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Continuous batching; see `transformers.generation.ContinuousMixin`.

        Raises:
            ValueError: the encoding changes cached keys or adds to the logits, which paged attention does not support.
        """
        self.refuse_continuous_batching()
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """See `generate_batch`."""
        self.refuse_continuous_batching()
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]

    def refuse_continuous_batching(self) -> None:
        """Raises ValueError if paged attention does not support the encoding."""
        config = self.config  # type: ignore[attr-defined]
        if "flash_attention" not in supported_implementations(config):
            raise ValueError(
                f"Continuous batching does not support position_encoding={config.position_encoding!r}: paged attention "
                "has no bias and no rotation of cached keys. Use generate(). Allowed: "
                "'none', 'absolute', 'sinusoidal', 'rope'."
            )


def prepare_forward(
    model: Any,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool | None,
) -> tuple[torch.Tensor, torch.Tensor | None, PositionContext, Cache | None]:
    """Returns position ids, the attention mask, the position context and the cache of one forward pass.

    Args:
        model: the base model, with `config` and `shared_encodings`.
        inputs_embeds: (B, Q, E).
        attention_mask: (B, past + Q) with 0 for padding, or a 4D mask (B, 1 or H, Q, K), or None; or what
            `create_masks_for_generate` made.
        position_ids: int64 (1 or B, Q), or None for consecutive positions after the cached ones.
        past_key_values: the cache, or None.
        use_cache: whether to make a cache if there is none.

    Raises:
        ValueError: a mask of the wrong shape, or a sequence longer than the encoding supports.
    """
    config = model.config
    batch, length = inputs_embeds.shape[:2]
    if use_cache and past_key_values is None:
        past_key_values = DynamicCache(config=config)
    first = first_own_layer(model)
    past_length: Any = past_key_values.get_seq_length(first) if past_key_values is not None else 0
    if isinstance(past_length, torch.Tensor):
        # A static cache returns its live counter, which every layer's update changes.
        past_length = past_length.clone().to(inputs_embeds.device)
    consecutive = position_ids is None
    if position_ids is None:
        position_ids = (torch.arange(length, device=inputs_embeds.device) + past_length).unsqueeze(0)
    _check_positions(position_ids, batch, length)
    _check_length(config, model.shared_encodings.max_length, position_ids)
    key_length = past_key_values.get_mask_sizes(length, first)[0] if past_key_values is not None else length
    _check_mask(config, attention_mask, batch, length, past_length, key_length)
    given = attention_mask if isinstance(attention_mask, torch.Tensor) else None
    context = PositionContext(position_ids, given, past_length, key_length, consecutive)
    model.shared_encodings(inputs_embeds, context)
    # Transformers looks for packed documents only where no cache is given; an empty one hides nothing.
    empty = isinstance(past_key_values, DynamicCache) and isinstance(past_length, int) and past_length == 0
    mask: Any = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=None if empty and not consecutive else past_key_values,
        position_ids=position_ids,
    )
    return position_ids, mask, context, past_key_values


def first_own_layer(model: Any) -> int:
    """Returns the index of the first decoder layer that this process has: not 0 on later pipeline stages."""
    layers = model.layers if hasattr(model, "layers") else model.h
    return next((index for index, layer in enumerate(layers) if isinstance(layer, GradientCheckpointingLayer)), 0)


def _check_positions(position_ids: torch.Tensor, batch: int, length: int) -> None:
    shape = tuple(position_ids.shape)
    if length == 0:
        raise ValueError("The input has no tokens: its shape is (batch, 0); allowed: at least one token.")
    if shape not in ((1, length), (batch, length)) or position_ids.is_floating_point():
        raise ValueError(
            f"position_ids has the shape {shape} and type {position_ids.dtype}; allowed: integers of the shape "
            f"({batch}, {length}) or (1, {length})."
        )


def _check_mask(config: Any, attention_mask: Any, batch: int, length: int, past_length: Any, key_length: int) -> None:
    if not isinstance(attention_mask, torch.Tensor):
        return
    shape = tuple(attention_mask.shape)
    if attention_mask.ndim == 2:
        if isinstance(past_length, int) and shape != (batch, past_length + length):
            raise ValueError(
                f"attention_mask has the shape {shape}; allowed: (batch, past + new tokens) = "
                f"({batch}, {past_length + length}), or a 4D mask."
            )
        return
    if (
        config._attn_implementation in ("auto", "blockwise", "triton")
        and is_ranges(attention_mask)
        and shape == (batch, 1, length + key_length, 2)
    ):
        # Made by `create_masks_for_generate` for a static cache.
        return
    fits = (
        attention_mask.ndim == 4
        and shape[0] in (1, batch)
        and shape[1] in (1, config.num_attention_heads)
        and shape[2] == length
        # A paged cache, which only the attention layers see, brings more keys.
        and shape[3] >= key_length
        and (attention_mask.dtype == torch.bool or attention_mask.is_floating_point())
    )
    if not fits:
        raise ValueError(
            f"attention_mask has the shape {shape} and type {attention_mask.dtype}; allowed: 2D (batch, past + new "
            f"tokens), or 4D bool or floating (batch, 1 or heads, {length}, {key_length})."
        )


def _check_length(config: Any, limit: int | None, position_ids: torch.Tensor) -> None:
    if limit is None or torch.compiler.is_compiling() or position_ids.device.type == "meta":
        return
    length = int(position_ids.max()) + 1
    if length > limit:
        raise ValueError(
            f"A sequence of {length} tokens is longer than position_encoding={config.position_encoding!r} supports "
            f"({limit} tokens). Shorten it, or use another encoding: all but 'absolute' and 'relative' have no limit, "
            "and 'relative' has none with beyond='last' or 'none'."
        )


def causal_lm_output(
    model: Any,
    outputs: BaseModelOutputWithPast,
    labels: torch.Tensor | None,
    logits_to_keep: int | torch.Tensor,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """Applies `model.lm_head` to the kept hidden states (B, Q, E), and the loss if there are labels (B, Q)."""
    kept = (
        slice(-logits_to_keep if logits_to_keep else None, None) if isinstance(logits_to_keep, int) else logits_to_keep
    )
    hidden_states: Any = outputs.last_hidden_state
    logits = model.lm_head(hidden_states[:, kept])
    loss = None
    if labels is not None:
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
