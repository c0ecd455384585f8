"""Shared code of the models of both families: loading, saving, the attention implementation and generation."""

import copy
import dataclasses
import importlib
import os
import pathlib
import re
import sys
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .attention_choice import choose_implementation, supported_implementations
from .attention_engine import batch_dependence
from .model_card import PIPELINES, card_tags, complete_card, origin_of
from .position_plan import check
from .position_registry import COMPLETE, PARTS

logger = logging.get_logger(__name__)

# The newest minor version of Transformers with which this code was tested.
NEWEST_TESTED = "5.24"

# Fields that may change after a model is built: they are read when they are needed, matter in training only, or belong
# to weights whose number they have to match.
_CHANGEABLE = {
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("intermediate_size", "n_inner", "reorder_and_upcast_attn", "tie_word_embeddings"),
    *("max_position_embeddings", "n_positions", "num_hidden_layers", "n_layer", "origin", "vocab_size"),
}


class WhatWherePreTrainedModel(PreTrainedModel):
    """Base of both families' `PreTrainedModel`s.

    The default attention implementation depends on the position encoding; `supported_implementations(config)` lists the
    supported ones, the default first.
    """

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _decoder_class: Any = None
    # Trainer would take `**kwargs` for a loss that is already divided by the number of accumulated batches.
    accepts_loss_kwargs = False

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        if minor_version(transformers.__version__) > minor_version(NEWEST_TESTED):
            logger.warning_once(
                f"transformers {transformers.__version__} is newer than the newest version that this model's code was "
                f"tested with ({NEWEST_TESTED})."
            )
        if os.environ.get("ACCELERATE_USE_MEGATRON_LM") == "true":
            raise ValueError(
                "Megatron-LM of accelerate is not supported: it would train a GPT or Llama model of its own, without "
                f"position_encoding={config.position_encoding!r}. Use FSDP, DeepSpeed or DDP."
            )
        # A field may have been assigned since the configuration was built.
        config.position_encoding_parameters = check(config)
        if "rope" in config.encoding_names:
            if getattr(config, "rope_parameters", None) is None:
                config.rope_parameters = {}
                config.convert_rope_params_to_dict()
        elif hasattr(config, "rope_parameters"):
            del config.rope_parameters
        config.validate()
        supported = supported_implementations(config)
        self._supports_sdpa, self._supports_flash_attn = "sdpa" in supported, "flash_attention_2" in supported
        super().__init__(config, *inputs, **kwargs)
        self._built_with = _fixed_fields(config)
        self._built_layers = config.num_hidden_layers
        ours = self._decoder_class and type(config).__name__ == self._decoder_class.config_class.__name__
        if ours and type(config) not in transformers.AutoModel._model_mapping:
            # Heads look their decoder up by the class of the configuration, of which there can be another copy.
            transformers.AutoModel.register(type(config), self._decoder_class)
        # Used by the cards that Transformers and its Trainer write.
        self.add_model_tags(card_tags(config))

    def post_init(self) -> None:
        found, own = type(self.base_model), self._decoder_class
        if own and found.__name__ == own.__name__ and not issubclass(found, own):
            raise ValueError(
                f"config is of the class {type(self.config).__module__}.{type(self.config).__name__}, whose decoder is "
                f"{found.__module__}.{found.__name__}; a head of {type(self).__module__} needs a configuration of its "
                f"own code: {own.config_class.__module__}.{own.config_class.__name__}."
            )
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

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        # Kernels of the Hub, which some versions take in place of flash attention, are not checked later.
        if attn_implementation is not None and "flash" in attn_implementation:
            choose_implementation(self.config, attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention is None and self.config.output_attentions:
            requested_attention = "eager"
        chosen = choose_implementation(self.config, requested_attention)
        # Transformers' own check does not know these.
        ours = chosen in ("auto", "triton", "blockwise")
        return chosen if ours else super().get_correct_attn_implementation(chosen, is_init_check)

    def _get_name(self) -> str:
        # FSDP2 makes a subclass. Trainer looks for the name in tables.
        return super()._get_name().removeprefix("FSDP")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Modules of position encodings initialise themselves.
        if callable(reset := getattr(module, "reset", None)):
            reset()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loads a model, see `PreTrainedModel.from_pretrained`; converts weights of older versions."""
        given: Any = kwargs.get("config")
        config_class: Any = cls.config_class
        if given is not None and type(given).__name__ == config_class.__name__ and not hasattr(given, "encoding_names"):
            # The package read the configuration, but does not have the encoding (`WhatWhereConfig.from_dict`).
            fields = {**given.file_fields, **given.to_dict()}
            kwargs["config"] = config_class.from_dict(fields, _name_or_path=given._name_or_path)
            kwargs["config"]._attn_implementation = given._attn_implementation
        upgrade = None
        if "older_weights" in PARTS:
            upgrade = PARTS["older_weights"](cls.config_class, pretrained_model_name_or_path, kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if upgrade is not None:
            upgrade(model)
        # Otherwise Transformers would save the weights under their old names.
        model._weight_conversions = None
        model.config._weights_version = model.config.weights_version
        if pretrained_model_name_or_path is not None:
            if (code := _saved_code()) is not None:
                code.check_code(pretrained_model_name_or_path, model.config)
            model.config.origin = origin_of(pretrained_model_name_or_path, model.config.origin)
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves weights, configuration, the code that loads them, and a model card if the folder has none.

        The folder loads by `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` without the package.
        See `PreTrainedModel.save_pretrained` for the arguments.

        Raises:
            NotADirectoryError: `save_directory` is a file. (Transformers logs that and returns without saving.)
            FileExistsError: it has Python files of other code that would be overwritten.
            ValueError: a field of the configuration has changed that the model was built with.
        """
        if (cls := type(self)).__name__.startswith("FSDP"):
            # FSDP2 makes a subclass, whose name would be saved.
            self.__class__ = cls.__mro__[2]
            try:
                return self.save_pretrained(save_directory, *args, **kwargs)
            finally:
                self.__class__ = cls
        folder = pathlib.Path(save_directory)
        if self.config.num_hidden_layers > self._built_layers:
            raise ValueError(
                f"num_hidden_layers={self.config.num_hidden_layers!r} is not valid: the model has {self._built_layers}."
            )
        for name, value in _fixed_fields(self.config).items():
            if value != (built := self._built_with.get(name)):
                raise ValueError(
                    f"{name}={value!r} is not valid: the model was built with {built!r}. To change it, load a "
                    f"checkpoint with from_pretrained(..., {name}=...)."
                )
        if folder.is_file():
            raise NotADirectoryError(f"save_directory={str(folder)!r} is a file; it must be a folder.")
        family = cls.__module__.rpartition(".")[2]
        if (code := _saved_code()) is not None:
            code.check_folder(folder, family)
        prefix = type(self.config).__name__.removesuffix("Config")
        self.config.auto_map = {
            "AutoConfig": f"{family}.{prefix}Config",
            "AutoModel": f"{family}.{prefix}Model",
            **{f"AutoModel{head}": f"{family}.{prefix}{head}" for head in PIPELINES},
        }
        self.config._weights_version = self.config.weights_version
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.should_save_on_this_rank(kwargs.get("is_main_process", True)) and os.path.isdir(save_directory):
            self._write_code(folder)
            complete_card(folder, self.config, source=self.config._name_or_path or None)

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # Called between the generic card, which Transformers writes when it pushes, and the upload; with
        # `save_pretrained(push_to_hub=True)` continues here before it returns.
        self._write_code(pathlib.Path(working_dir))
        complete_card(os.fspath(working_dir), self.config, source=self.config._name_or_path or None, name=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _write_code(self, folder: pathlib.Path) -> None:
        if (code := _saved_code()) is not None:
            code.write_code(folder, type(self).__module__.rpartition(".")[2], self.config)

    def _get_static_cache_init_shape(self) -> tuple[int, int] | None:
        # Cached keys may be wider than a head, so their width is set at the first update.
        return None

    def generate_batch(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Generates by continuous batching, see `ContinuousMixin`; raises ValueError for a prompt without tokens."""
        # Transformers logs the errors of its requests, and returns without results.
        if empty := [index for index, prompt in enumerate(inputs or ()) if not len(prompt)]:
            raise ValueError(f"inputs[{empty[0]}] has no tokens; allowed: at least one token in each prompt.")
        return super().generate_batch(inputs, *args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """What `generate_batch` calls; see `continuous_batching`, which folders do not have."""
        supported, reason = supported_implementations(self.config), batch_dependence(self.config)
        try:
            module = importlib.import_module("whatwhere.continuous_batching")
        except ImportError as error:
            if "flash_attention_2" in supported and reason is None:
                return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]
            raise refusal(
                f"Continuous batching of position_encoding={self.config.position_encoding!r} needs more code than this "
                "folder has: install the package whatwhere, or use generate()."
            ) from error
        return module.init_continuous_batching(self, supported, reason, *args, **kwargs)


def _saved_code() -> Any:
    """Returns the module that writes the code of saved folders; None in a folder, whose own code is copied as it is."""
    return importlib.import_module("whatwhere.saved_code") if COMPLETE else None


def _fixed_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of a configuration that must not change after a model is built, as copies."""
    own = {field.name for field in dataclasses.fields(config)} - {
        one.name for one in dataclasses.fields(PreTrainedConfig)
    }
    names = sorted({*own, "rope_parameters"} - _CHANGEABLE)
    fields = {name: copy.deepcopy(getattr(config, name, None)) for name in names}
    if (fields["rope_parameters"] or {}).get("rope_type") in ("dynamic", "longrope"):
        # Its frequencies depend on the length.
        fields["max_position_embeddings"] = config.max_position_embeddings
    return fields


def minor_version(version: str) -> tuple[int, ...]:
    """Returns the major and the minor number of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def register(*classes: Any) -> None:
    """Registers a family's classes, the decoder first, with the Auto classes: in this process, and in what is saved."""
    if not COMPLETE:
        # Transformers copies the file of a saved configuration. The package writes it.
        classes[0].config_class.register_for_auto_class()
    classes[0].__bases__[-1]._decoder_class = classes[0]
    for cls in classes:
        name = "AutoModel" + re.sub("WhatWhere(GPT2|Llama)(Model)?", "", cls.__name__)
        cls.register_for_auto_class(name)
        auto = getattr(transformers, name)
        auto.register(cls.config_class, cls, exist_ok=True)
        # Tables of class names by which Trainer, pipelines and cards decide what a model does.
        auto._model_mapping._model_mapping.setdefault(cls.config_class.model_type, cls.__name__)


def refusal(message: str) -> ValueError:
    """Returns the error for a request that is not valid; `transformers serve` answers with code 400 and the message.

    The server does so only for its own exceptions, so this error is also one of them if the server runs.
    """
    server: Any = sys.modules.get("starlette.exceptions")
    if server is None:
        return ValueError(message)
    # Fields of its class; `__reduce__` lets the error pass between processes.
    fields = {"status_code": 400, "detail": message, "headers": None, "__str__": Exception.__str__}
    fields["__reduce__"] = lambda _: (ValueError, (message,))
    return type("RequestError", (ValueError, server.HTTPException), fields)(message)
