"""Shared code of the models of both families: loading, saving, generation, and the preparation of a forward pass.

Axes: B batch, H query heads, G key heads, Q query length, K key length, D head dim, E hidden size.
"""

import importlib
import inspect
import os
import pathlib
import re
import sys
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import choose_implementation
from .model_card import PIPELINES, card_tags, complete_card
from .position_base import PositionContext
from .position_registry import (
    POSITION_ENCODINGS,
    batch_dependence,
    check,
    is_ranges,
    layer_default,
    layer_plan,
    older_weights,
    parse,
    supported_implementations,
)


class WhatWherePreTrainedModel(PreTrainedModel):
    """Base of both families' `PreTrainedModel`s.

    The default attention implementation depends on the position encoding; `supported_implementations(config)` lists the
    supported ones, the default first.
    """

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _decoder_class: Any = None

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        # A field may have been assigned since the configuration was built.
        config.position_encoding_parameters = check(config)
        if "rope" in config.encoding_names:
            if getattr(config, "rope_parameters", None) is None:
                config.rope_parameters = {}
                config.convert_rope_params_to_dict()
        elif hasattr(config, "rope_parameters"):
            del config.rope_parameters
        config.validate()
        self._supports_sdpa = "sdpa" in supported_implementations(config)
        super().__init__(config, *inputs, **kwargs)
        if self._decoder_class and type(config).__name__ == self._decoder_class.config_class.__name__:
            # Remote code can load the class of the configuration twice, and heads look their decoder up by it.
            transformers.AutoModel.register(type(config), self._decoder_class, exist_ok=True)
        # Used by the cards that Transformers and its Trainer write.
        self.add_model_tags(card_tags(config))

    def post_init(self) -> None:
        super().post_init()
        if self.config.base_model_tp_plan is None:
            return
        # On every rank, position parameters get the gradient of the local heads only. Projections of the hidden states
        # are sharded by heads instead, because the gradient of their input would also be partial.
        assert self._tp_plan is not None, "the base class takes it from the configuration"
        for name, module in self.named_modules():
            ours = hasattr(module, "reset") or hasattr(module, "tensor_parallel_style")
            if ours and any(True for _ in module.parameters(recurse=False)):
                pattern = re.sub(r"\.\d+(?=\.)", ".*", name)
                self._tp_plan[pattern] = getattr(module, "tensor_parallel_style", "replicated_with_grad_allreduce")

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention is None and self.config.output_attentions:
            requested_attention = "eager"
        chosen = choose_implementation(self.config, requested_attention)
        # Transformers' own check does not know these.
        ours = chosen in ("auto", "triton", "blockwise")
        return chosen if ours else super().get_correct_attn_implementation(chosen, is_init_check)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Modules of position encodings initialise themselves.
        if callable(reset := getattr(module, "reset", None)):
            reset()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loads a model, see `PreTrainedModel.from_pretrained`; converts weights of older versions."""
        upgrade = older_weights and older_weights(cls.config_class, pretrained_model_name_or_path, kwargs)  # type: ignore
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if upgrade is not None:
            upgrade(model)
        # Otherwise Transformers would save the weights under their old names.
        model._weight_conversions = None
        model.config._weights_version = model.config.weights_version
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves weights, configuration, the code that loads them, and a model card if the folder has none.

        The folder loads by `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` without the package.
        See `PreTrainedModel.save_pretrained` for the arguments.

        Raises:
            NotADirectoryError: `save_directory` is a file. (Transformers logs that and returns without saving.)
            FileExistsError: it has Python files of other code that would be overwritten.
        """
        if (cls := type(self)).__name__.startswith("FSDP"):
            # FSDP2 makes a subclass, whose name would be saved.
            self.__class__ = cls.__mro__[2]
            try:
                return self.save_pretrained(save_directory, *args, **kwargs)
            finally:
                self.__class__ = cls
        folder = pathlib.Path(save_directory)
        if folder.is_file():
            raise NotADirectoryError(f"save_directory={str(folder)!r} is a file; it must be a folder.")
        clash = [name for name in self._code_files(pathlib.Path(__file__).parent) if (folder / name).exists()]
        if clash and not (folder / "position_registry.py").exists():
            raise FileExistsError(f"save_directory={str(folder)!r} has {clash!r}; the model's code needs these names.")
        family = cls.__module__.rpartition(".")[2]
        prefix = type(self.config).__name__.removesuffix("Config")
        self.config.auto_map = {
            "AutoConfig": f"{family.replace('modeling', 'configuration', 1)}.{prefix}Config",
            "AutoModel": f"{family}.{prefix}Model",
            **{f"AutoModel{head}": f"{family}.{prefix}{head}" for head in PIPELINES},
        }
        self.config._weights_version = self.config.weights_version
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.should_save_on_this_rank(kwargs.get("is_main_process", True)) and os.path.isdir(save_directory):
            self._reduce_code(folder)
            complete_card(folder, self.config, source=self.config._name_or_path or None)

    def _reduce_code(self, folder: pathlib.Path) -> None:
        """Removes from a saved folder the code of encodings that the configuration does not name."""
        registry = folder / "position_registry.py"
        # Never in the folder of this code.
        if not registry.is_file() or folder.samefile(pathlib.Path(__file__).parent):
            return
        parts = parse(self.config).values()
        used = [cls for cls, _ in parts]
        dropped = {cls.__name__ for cls in POSITION_ENCODINGS.values() if cls not in used}
        plan = layer_plan(self.config)
        kernels = ["".join(inspect.getsource(cls.kernel) for cls, _ in p if cls.overrides("kernel")) for p in plan]
        implementations = supported_implementations(self.config)
        needed = {
            "attention_auto": "auto" in implementations,
            "attention_engine": "sdpa" in implementations,
            "attention_mask": not {"auto", "blockwise", "triton"}.isdisjoint(implementations),
            "attention_autograd": any(cls.overrides("bias") and cls.term is None for cls in used),
            "attention_blockwise": any(cls.overrides("bias") or not cls.softmax for cls in used),
            "attention_triton": any(kernels),
            "attention_options": self.config.has_attention_options,
            "attention_sdpa": any(layer_default(parts) == "sdpa" for parts in plan) or "sdpa" in implementations,
            "checkpoint_conversion": False,
            # Some only give arguments.
            "kernel_plain": any(kernels) and not all("from .kernel_" in layer for layer in kernels),
            "kernel_knots": any("knots" in layer for layer in kernels),
            "kernel_polar": any("kernel_pope import" in layer for layer in kernels),
            "kernel_terms": any(re.search(r"^$|kernel_plain import|return \{", layer) for layer in kernels),
        }
        for path in (registry, *folder.glob("kernel_*.py")):
            text = path.read_text(encoding="utf-8").replace("COMPLETE = True", "COMPLETE = False")
            for module, names in re.findall(r"from \.(\w+) import (\([^)]*\)|.+)\n", text):
                if not needed.get(module, True):
                    nothing = " = ".join([*re.findall(r"\w+", names), "None"])
                    text = text.replace(f"from .{module} import {names}\n", f"{nothing}\n")
            lines = [line for line in text.splitlines() if line.rpartition("import ")[2].strip(" ,") not in dropped]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for unused in self._code_files(pathlib.Path(__file__).parent) - self._code_files(folder):
            (folder / unused).unlink(missing_ok=True)

    def _code_files(self, folder: pathlib.Path) -> set[str]:
        """Returns the names of the files in a folder that the model's own file imports."""
        name = f"{type(self).__module__.rpartition('.')[2]}.py"
        return {os.path.basename(path) for path in get_relative_import_files(folder / name)}

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # Called between the generic card, which Transformers writes when it pushes, and the upload; with
        # `save_pretrained(push_to_hub=True)` continues here before it returns.
        self._reduce_code(pathlib.Path(working_dir))
        complete_card(os.fspath(working_dir), self.config, source=self.config._name_or_path or None, name=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _get_static_cache_init_shape(self) -> tuple[int, int] | None:
        # Cached keys may be wider than a head, so their width is set at the first update.
        return None

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """What `generate_batch` calls; see `continuous_batching`, which folders do not have."""
        try:
            module = importlib.import_module("whatwhere.continuous_batching")
        except ImportError as error:
            if "flash_attention" in supported_implementations(self.config) and batch_dependence(self.config) is None:
                return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]
            raise refusal(
                f"Continuous batching of position_encoding={self.config.position_encoding!r} needs more code than this "
                "folder has: install the package whatwhere, or use generate()."
            ) from error
        return module.init_continuous_batching(self, *args, **kwargs)


def register(*classes: Any) -> None:
    """Registers a family's classes, the decoder first, with the Auto classes: in this process, and in what is saved."""
    classes[0].config_class.register_for_auto_class()
    classes[0].__bases__[-1]._decoder_class = classes[0]
    for cls in classes:
        name = "AutoModel" + re.sub("WhatWhere(GPT2|Llama)(Model)?", "", cls.__name__)
        cls.register_for_auto_class(name)
        getattr(transformers, name).register(cls.config_class, cls, exist_ok=True)


def refusal(message: str) -> ValueError:
    """Returns the error for a request; `transformers serve` answers with its text only if it is the server's own."""
    server: Any = sys.modules.get("starlette.exceptions")
    if server is None:
        return ValueError(message)
    fields = {"status_code": 400, "detail": message, "headers": None, "__str__": Exception.__str__}
    fields["__reduce__"] = lambda _: (ValueError, (message,))
    return type("RequestError", (ValueError, server.HTTPException), fields)(message)


class Decoder:
    """The forward pass of the decoders of both families, which define `layers`, `norm` and `embed`."""

    @merge_with_config_defaults
    @capture_outputs
    def forward(  # type: ignore[misc]
        self: Any,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Runs the decoder.

        Args:
            input_ids: int64 (B, Q), or None if `inputs_embeds` is given.
            attention_mask: (B, past + Q) with 0 for padding; 4D (B, 1, Q, K); or from `create_masks_for_generate`.
            position_ids: int64 (B, Q); positions that start again separate packed documents, where there is neither an
                attention_mask nor anything in the cache.
            past_key_values: the cache.
            inputs_embeds: (B, Q, E).
            use_cache: whether to return a cache.
            token_type_ids: int64 (B, Q); GPT-2-style models add their embeddings, Llama-style ones ignore them.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`; a mask of the wrong shape; a sequence longer
                than the encoding supports.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        config = self.config
        batch, length = inputs_embeds.shape[:2]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=config)
        first = first_own_layer(self)
        past_length: Any = past_key_values.get_seq_length(first) if past_key_values is not None else 0
        if isinstance(past_length, torch.Tensor):
            # A static cache returns its live counter, which every layer's update changes.
            past_length = past_length.clone().to(inputs_embeds.device)
        consecutive = position_ids is None
        positions: Any = position_ids
        if consecutive:
            positions = (torch.arange(length, device=inputs_embeds.device) + past_length).unsqueeze(0)
        _check_positions(positions, batch, length)
        _check_length(config, self.shared_encodings.max_length, positions)
        key_length = past_key_values.get_mask_sizes(length, first)[0] if past_key_values is not None else length
        _check_mask(config, attention_mask, batch, length, past_length, key_length, past_key_values is None)
        _check_context_parallel(config)
        given = attention_mask if isinstance(attention_mask, torch.Tensor) else None
        context = PositionContext(positions, given, past_length, key_length, consecutive)
        context = self.shared_encodings(inputs_embeds, context)
        # Transformers detects packed documents only without a cache; an empty cache is equivalent.
        empty = isinstance(past_key_values, DynamicCache) and isinstance(past_length, int) and past_length == 0
        mask: Any = create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=None if empty and not consecutive else past_key_values,
            position_ids=None if consecutive else positions,
        )
        # Later pipeline stages get hidden states in place of embeddings.
        hidden_states = self.embed(inputs_embeds, positions, token_type_ids) if first == 0 else inputs_embeds
        for layer in self.layers[: config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_context=context,
                position_ids=positions,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), past_key_values)


class CausalLM:
    """The decoder with a language-modelling head, of both families."""

    _tp_plan: Any = {"lm_head": "colwise_gather_output"}
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan: Any = {"lm_head": "keep_full_weight"}

    def __init__(self: Any, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        setattr(self, self.base_model_prefix, self._decoder_class(config))
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(  # type: ignore[misc]
        self: Any,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Runs the decoder, see `Decoder`, and the head.

        Args:
            labels: int64 (B, Q), -100 where ignored; shifted here.
            logits_to_keep: compute the logits of the last so many tokens only; 0 for all; or indices.
            kwargs: `num_items_in_batch` divides the loss by that number instead of the mean.
        """
        outputs: BaseModelOutputWithPast = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            token_type_ids=token_type_ids,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states: Any = outputs.last_hidden_state
        logits = self.lm_head(hidden_states[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions)


def first_own_layer(model: Any) -> int:
    """Returns the index of the first decoder layer that this process has: not 0 on later pipeline stages."""
    return next((index for index, layer in enumerate(model.layers) if isinstance(layer, GradientCheckpointingLayer)), 0)


def _check_positions(position_ids: torch.Tensor, batch: int, length: int) -> None:
    shape = tuple(position_ids.shape)
    if length == 0:
        raise ValueError("The input has no tokens: its shape is (batch, 0); allowed: at least one token.")
    if shape not in ((1, length), (batch, length)) or position_ids.is_floating_point():
        raise ValueError(
            f"position_ids has the shape {shape} and type {position_ids.dtype}; allowed: integers of the shape "
            f"({batch}, {length}) or (1, {length})."
        )


def _check_mask(
    config: Any, attention_mask: Any, batch: int, length: int, past_length: Any, key_length: int, paged: bool
) -> None:
    given = isinstance(attention_mask, torch.Tensor)
    if config._attn_implementation not in AttentionMaskInterface() and (
        isinstance(past_length, torch.Tensor) or (given and attention_mask.ndim == 2 and not attention_mask.all())
    ):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} has no mask function: it would ignore padding in "
            "attention_mask and empty slots of a static cache. Use neither, or AttentionMaskInterface.register one."
        )
    if not given:
        return
    shape = tuple(attention_mask.shape)
    if attention_mask.ndim == 2:
        if isinstance(past_length, int) and shape != (batch, past_length + length):
            raise ValueError(
                f"attention_mask has the shape {shape}; allowed: (batch, past + new tokens) = "
                f"({batch}, {past_length + length}), or a 4D mask."
            )
        return
    has_ranges = config._attn_implementation in ("auto", "blockwise", "triton")
    if has_ranges and is_ranges(attention_mask) and shape == (batch, 1, length + key_length, 2):
        # Made by `create_masks_for_generate` for a static cache.
        return
    fits = (
        attention_mask.ndim == 4
        and shape[0] in (1, batch)
        and shape[1] in (1, config.num_attention_heads)
        and shape[2] == length
        # A paged cache, which only the attention layers see, adds more keys.
        and (shape[3] >= key_length if paged else shape[3] == key_length)
        and (attention_mask.dtype == torch.bool or attention_mask.is_floating_point())
    )
    if not fits:
        raise ValueError(
            f"attention_mask has the shape {shape} and type {attention_mask.dtype}; allowed: 2D (batch, past + new "
            f"tokens), or 4D bool or floating (batch, 1 or heads, {length}, {key_length})."
        )


def _check_context_parallel(config: Any) -> None:
    # PyTorch replaces the function while it shards the tokens.
    if "context_parallel" not in str(torch.nn.functional.scaled_dot_product_attention.__module__):
        return
    if config._attn_implementation != "sdpa" or "blockwise" in supported_implementations(config):
        raise ValueError(
            f"Context parallelism does not support position_encoding={config.position_encoding!r} with "
            f"attn_implementation={config._attn_implementation!r}. Use attn_implementation='sdpa' and 'none', "
            "'absolute', 'sinusoidal', 'rope' or 'pope'."
        )


def _check_length(config: Any, limit: int | None, position_ids: torch.Tensor) -> None:
    if limit is None or torch.compiler.is_compiling() or position_ids.device.type == "meta":
        return
    length = int(position_ids.max()) + 1
    if length > limit:
        raise refusal(
            f"A sequence of {length} tokens is longer than position_encoding={config.position_encoding!r} supports "
            f"({limit} tokens). Shorten it, or use an encoding other than 'absolute' and 'relative'."
        )
