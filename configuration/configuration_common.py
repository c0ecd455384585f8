"""What both configurations share: the position encoding's fields, and the refusal of misspelt fields."""

import copy
import dataclasses
import difflib
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
import transformers
from transformers.utils.versions import require_version

require_version("transformers>=5.17,<6", "Models of whatwhere need it: pip install -U 'transformers>=5.17,<6'")

from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Keywords of `PreTrainedConfig.__post_init__` and keys of saved configurations that are not dataclass fields.
_BASE_KEYWORDS = {
    "attn_implementation",
    "auto_map",
    "distributed_config",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "tokenizer_class",
    "torch_dtype",
}
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")


class CheckpointModel(PreTrainedModel):
    """What `transformers serve` and engines find in `transformers` under an architecture's name.

    A process can have several copies of a model's code, one for each saved folder: this class loads a checkpoint with
    the checkpoint's own.
    """

    _supports_attention_backend = True

    def __new__(cls, config: Any, **kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_config(config, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(*args, **kwargs)


class ConfigurationError(StrictDataclassFieldValidationError, StrictDataclassClassValidationError, ValueError):
    """A field of a configuration is not valid: a ValueError, and what Transformers' configurations raise."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


def checked(cls: type) -> Any:
    """Makes a configuration class `strict`, with refusals that are ValueErrors, at construction and at assignment."""
    cls = strict(cls)
    # Under another name of a field the value would not be checked.
    validators = cls.__validators__  # type: ignore[attr-defined]
    validators.update({alias: validators[name] for alias, name in cls.attribute_map.items()})  # type: ignore[attr-defined]
    for name in ("__setattr__", "validate"):
        setattr(cls, name, _with_value_errors(getattr(cls, name)))
    # On the type, because there are two such modules as soon as Transformers has imported its processors.
    setattr(type(transformers), cls.__name__.replace("Config", "ForCausalLM"), CheckpointModel)
    return cls


def _with_value_errors(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapped(config: Any, *field: Any) -> None:
        try:
            function(config, *field)
        except (StrictDataclassError, KeyError) as error:
            of_rule = field and isinstance(error.__cause__, ValueError)
            message = f"{field[0]}={field[1]!r} is not valid: {error.__cause__}" if of_rule else str(error)
            raise ConfigurationError(message) from error.__cause__

    return wrapped


def _nearest(name: Any, allowed: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the allowed name (lower case) that `name` probably means, whatever its case, or None."""
    return next(iter(difflib.get_close_matches(str(name).lower(), sorted(allowed), n=1, cutoff=cutoff)), None)


def _is_float32(value: float) -> bool:
    """Returns True if a number is finite in float32, and neither NaN nor so small that it is lost there."""
    limits = torch.finfo(torch.float32)
    return math.isfinite(value) and (value == 0 or limits.tiny <= abs(value) <= limits.max)


def _of_models(module: str, name: str) -> Any:
    """Returns what a module of the models defines, or None if this copy of the code does not have it.

    In a saved folder they are one file, without which Transformers may load the configuration: the model's constructor
    makes the checks again.
    """
    package, _, own = __name__.rpartition(".")
    if package == "whatwhere.configuration":
        module = f"whatwhere.{module}"
    else:
        module = f"{package}.{own.replace('configuration', 'modeling', 1)}"
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None


def _is_package() -> bool:
    """Returns True for the code of the package, which has all encodings, and False for that of a saved folder."""
    return bool(_of_models("position_registry", "COMPLETE"))


def _are_known(names: Iterable[str]) -> bool:
    return set(names) <= set(_of_models("position_registry", "POSITION_ENCODINGS"))


def _names(position_encoding: Any) -> list[str]:
    """Returns the names of single encodings in a value of `position_encoding`."""
    pattern = position_encoding if isinstance(position_encoding, list) else [position_encoding]
    return list(dict.fromkeys(part for name in pattern for part in str(name).split("+")))


def kept_parameters(old: Any, saved: dict | None, new: Any) -> dict | None:
    """Returns the saved parameters of encoding `old` that have a meaning in `new`, nested as `new` takes them."""
    if not saved:
        return None
    nested = saved if isinstance(old, list) or "+" in old else {old: saved}
    kept = {name: nested[name] for name in _names(new) if name in nested}
    return kept if isinstance(new, list) or "+" in str(new) else kept.get(new)


# What a value must be, in words and as a function.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "positive": ("greater than 0, finite in float32", lambda value: value > 0 and _is_float32(value)),
    "not_negative": ("at least 0, finite in float32", lambda value: value >= 0 and _is_float32(value)),
    "probability": ("in [0, 1)", lambda value: 0 <= value < 1),
    "activation": (f"one of {', '.join(map(repr, sorted(ACT2FN)))}", lambda value: value in ACT2FN),
    "token": (
        "at least 0, as token ids are, or None for no token",
        lambda value: all(one >= 0 for one in (value if isinstance(value, list) else [value])),
    ),
    "dtype": (
        "a type of torch, as 'float32', or None",
        lambda value: isinstance(getattr(torch, value, None) if isinstance(value, str) else value, torch.dtype),
    ),
    "id2label": (
        "None, or have keys that are integers or their digits",
        lambda value: value and all(str(key).isdecimal() for key in value),
    ),
    "num_labels": ("an integer, at least 1", lambda value: type(value) is int and value >= 1),
    "attn_implementation": ("a name or None", lambda value: isinstance(value, (str, dict))),
}


def _follow(rule: str, value: Any) -> None:
    allowed, holds = _RULES[rule]
    if value is not None and not holds(value):
        raise ValueError(f"it must be {allowed}.")


def limited(rule: str, default: Any) -> Any:
    """Returns a field of a configuration whose values other than None follow a rule."""
    return validated_field(functools.partial(_follow, rule), default=default)


class WhatWhereConfig(PreTrainedConfig):
    """Base of the configurations: `position_encoding` and `position_encoding_parameters`.

    Args:
        position_encoding: a name, or names joined by `+` (`"cope+rope"`); `whatwhere.list_position_encodings()` lists
            them. Or a list of names, one for each layer, repeated if it is shorter: `["rope", "rope", "rope", "none"]`.
        position_encoding_parameters: the encoding's parameters; for a combination or a list, nested by name
            (`{"cope": {"num_positions": 64}}`). None takes the defaults. Resolved defaults are written back, so that a
            saved checkpoint keeps them.
        output_gate: multiply the output of the heads with sigmoid(W_g x), before the output projection. This and the
            next three are the "Pro" block of FoX (2503.02130), for any encoding.
        output_norm: RMSNorm of the output of each head, before the gate.
        qk_norm: RMSNorm of queries and keys of each head, before a rotation.
        qk_norm_eps: the epsilon of these norms; 1e-5 in the code of FoX's authors.
        key_value_shift: mix keys and values with those of the token before, by a gate for each key head. Not with an
            encoding that changes keys before they are cached ("rope", "pope").
        attention_weights: "softmax"; or hard attention, all weight on the key with the largest logit (CoPE, Table 7):
            "hard" has no gradient, "straight_through" that of the softmax. Only with `eager` attention.
        origin: what is known of the model that the weights were made from, for model cards: `base_model`, `license`,
            `license_name`, `license_link`, `language`, as in the metadata of a card. Loading and conversion set it.

    Raises:
        ValueError: an unknown or misspelt field, an unknown encoding, an impossible combination, a parameter of the
            wrong type or out of range. The message names the field, the value and what is allowed.
    """

    # What saved weights mean; in files as "_weights_version", which version 1 did not write. 2: PoPE's delta is folded,
    # no longer clamped. 3: the parts of FoX's Pro block are fields of the configuration; other names of modules.
    weights_version: ClassVar[int] = 3
    # Model types of stock checkpoints whose configuration this class can read.
    stock_model_type: ClassVar[str] = ""
    # Fields of the stock configuration that configure heads this package does not have; dropped when a file has them.
    stock_fields_without_effect: ClassVar[tuple[str, ...]] = ()
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    # The base class does not check the types of its own fields; the models are decoders.
    output_hidden_states: bool | None = False
    return_dict: bool | None = True
    is_encoder_decoder: Literal[False] = False
    id2label: dict | None = limited("id2label", None)
    label2id: dict | None = None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None

    position_encoding: str | list[str] = "rope"
    position_encoding_parameters: dict | None = None
    attention_weights: Literal["softmax", "hard", "straight_through"] = "softmax"
    output_gate: bool = False
    output_norm: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = limited("positive", 1e-6)
    key_value_shift: bool = False
    origin: dict | None = None

    num_key_value_heads: int | None = limited("positive", None)
    initializer_range: float = limited("not_negative", 0.02)
    use_cache: bool = True
    pad_token_id: int | None = limited("token", None)

    def __post_init__(self, **kwargs: Any) -> None:
        # The base class reads other names of fields too late for what depends on these fields.
        for alias in self.attribute_map.keys() & kwargs.keys():
            setattr(self, alias, kwargs.pop(alias))
        self._refuse_unknown_fields(kwargs)
        self._weights_version = kwargs.pop("_weights_version", self.weights_version)
        self.validate_architecture()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        # Transformers assigns "auto" to `dtype` later: it is not checked at assignment.
        for name in ("dtype", "torch_dtype", "num_labels", "attn_implementation"):
            value, (allowed, holds) = {"dtype": self.dtype, **kwargs}.get(name), _RULES[name.removeprefix("torch_")]
            if value is None:
                kwargs.pop(name, None)
            elif not holds(value):
                raise ValueError(f"{name}={value!r} is not valid: it must be {allowed}.")
        rope = {key: copy.deepcopy(kwargs.pop(key)) for key in _ROPE_KEYS if kwargs.get(key) is not None}
        if "rope" in self.encoding_names:
            merged = _of_models("position_rope", "merged_parameters")
            rope = {"rope_parameters": merged(rope, self)} if merged is not None else rope
            self.rope_parameters = rope.pop("rope_parameters", None)
        elif rope:
            key, value = next(iter(rope.items()))
            raise ValueError(
                f"{key}={value!r} has no effect with position_encoding={self.position_encoding!r}. Remove it, or use a "
                "position_encoding that contains 'rope'."
            )
        super().__post_init__(**{key: value for key, value in kwargs.items() if key not in _ROPE_KEYS}, **rope)
        check = _of_models("position_plan", "check")
        # Transformers builds a default configuration, whose encoding a saved folder may lack. Models check again.
        if check is not None and (_is_package() or _are_known(self.encoding_names)):
            self.position_encoding_parameters = check(self)

    def validate_architecture(self) -> None:
        """Checks the fields against each other; raises ValueError."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        name, hidden = (self.attribute_map.get(one, one) for one in ("num_attention_heads", "hidden_size"))
        if getattr(self, "head_dim", None) is None and self.hidden_size % heads:
            other = ", or head_dim must be given" if hasattr(self, "head_dim") else ""
            raise ValueError(f"{name}={heads!r} is not valid: it must divide {hidden}={self.hidden_size!r}{other}.")
        if self.qk_norm_eps != type(self).qk_norm_eps and not self.qk_norm:
            raise ValueError(f"qk_norm_eps={self.qk_norm_eps!r} has no effect with qk_norm=False.")
        if groups is not None and heads % groups:
            raise ValueError(f"num_key_value_heads={groups!r} is not valid: it must divide {name}={heads!r}.")

    @property
    def encoding_names(self) -> list[str]:
        """The names of the single encodings in `position_encoding`."""
        return _names(self.position_encoding)

    @property
    def layer_pattern(self) -> list[str]:
        """The values of `position_encoding`, one for each layer, repeated if there are more layers."""
        return self.position_encoding if isinstance(self.position_encoding, list) else [self.position_encoding]

    @property
    def attention_options(self) -> list[str]:
        """The names of the fields of `attention_options.py` that are set."""
        return [name for name in ("output_gate", "output_norm", "qk_norm", "key_value_shift") if getattr(self, name)]

    def layer_encodings(self, layer_idx: int) -> list[str]:
        """Returns the names of the encodings that `position_encoding` gives a layer."""
        return self.layer_pattern[layer_idx % len(self.layer_pattern)].split("+")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary. See the base class."""
        # peft asks for it before it looks for the default target modules of a model type: those of the stock one.
        constants = sys.modules.get("peft.utils.constants")
        for name, mapping in list(vars(constants).items()) if constants else ():
            if name.endswith("_MODULES_MAPPING") and self.stock_model_type in mapping:
                mapping.setdefault(self.model_type, mapping[self.stock_model_type])
        return super().to_dict()

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves the configuration and its code. See the base class."""
        # A saved folder does not have this function: Transformers copies the folder's own code.
        write = _of_models("saved_code", "write_configuration")
        if write is not None and not os.path.isfile(save_directory):
            write(save_directory, self)
            reference = f"{type(self).__module__.rpartition('.')[2]}.{type(self).__name__}"
            self.auto_map = {**(getattr(self, "auto_map", None) or {}), "AutoConfig": reference}
        super().save_pretrained(save_directory, *args, **kwargs)

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        """Writes the configuration file. See the base class."""
        # Transformers names loaded code by the file of the class and what that imports, and chooses a model's class by
        # the class of its configuration. Found through the models' file, that is another one for each folder's code.
        models = type(self).__module__.rpartition(".")[2].replace("configuration", "modeling", 1)
        file = os.path.join(os.path.dirname(json_file_path), f"{models}.py")
        if getattr(self, "auto_map", None) and os.path.exists(file):
            self.auto_map["AutoConfig"] = f"{models}.{type(self).__name__}"
        super().to_json_file(json_file_path, use_diff)

    @classmethod
    def field_names(cls) -> set[str]:
        """Returns the names that the constructor takes."""
        return {*_BASE_KEYWORDS, *_ROPE_KEYS, *cls.attribute_map, *(field.name for field in dataclasses.fields(cls))}

    def _refuse_unknown_fields(self, kwargs: dict) -> None:
        allowed = self.field_names() | set(GenerationConfig().to_dict())
        for key, value in kwargs.items():
            if key not in allowed and not key.startswith("_"):
                near = _nearest(key, self.field_names())
                hint = f" Did you mean {near!r}?" if near else ""
                fields = ", ".join(sorted(field.name for field in dataclasses.fields(type(self))))
                raise ValueError(
                    f"{type(self).__name__} has no field {key!r} (given: {value!r}).{hint} Its fields: {fields}."
                )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict, dict]:
        """Reads a configuration file; a stock one of the same family is translated. See the base class."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls._translate(config_dict), kwargs

    @classmethod
    def _is_of_own_code(cls, config_dict: dict[str, Any], changes: dict[str, Any]) -> bool:
        """Returns True for the configuration of a folder with an encoding of which only the folder has the code."""
        if not _is_package() or "auto_map" not in config_dict or "position_encoding" in changes:
            return False
        return not _are_known(_names(config_dict.get("position_encoding")))

    @classmethod
    def _translate(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        config_dict = dict(config_dict)
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type not in (cls.model_type, cls.stock_model_type):
            known = ("mistral", "phi3", "qwen2", "qwen3", "smollm3")
            hint = " Convert it with `whatwhere convert`." if model_type in known else ""
            raise ValueError(
                f"The checkpoint's model_type={model_type!r} cannot be loaded as {cls.__name__}. "
                f"Allowed: {cls.model_type!r} and {cls.stock_model_type!r}.{hint}"
            )
        names = cls.field_names() | set(GenerationConfig().to_dict())
        for key in [key for key in config_dict if key not in names and not key.startswith("_")]:
            near = _nearest(key, cls.field_names(), cutoff=0.85)
            if model_type == cls.model_type and near:
                raise ValueError(f"The checkpoint's config has the unknown field {key!r}. Did you mean {near!r}?")
            value = config_dict.pop(key)
            if key not in cls.stock_fields_without_effect:
                logger.warning(f"{cls.__name__} has no field {key!r}: dropped the value {value!r} of the checkpoint.")
        if (convert := _of_models("checkpoint_conversion", "convert_config")) is not None:
            convert(config_dict, stock=model_type != cls.model_type)
        if model_type != cls.model_type:
            for key in ("architectures", "auto_map"):
                config_dict.pop(key, None)
            config_dict["model_type"] = cls.model_type
        return config_dict

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Builds the configuration from a file's dictionary; keywords override it before anything is checked.

        A stock configuration of the same family is read too. When a keyword changes `position_encoding`, the file's
        parameters of encodings that stay part of it are kept, the others (and RoPE's) are dropped. A keyword
        `position_encoding_parameters` replaces those of the file as a whole: what it leaves out takes its default.

        Raises:
            ValueError: the dictionary belongs to another kind of model, or a field is misspelt.
        """
        if cls._is_of_own_code(config_dict, kwargs):
            # `AutoModelForCausalLM` runs the folder's code for a class that it does not know, if it is trusted.
            fields = {key: kwargs.pop(key) for key in cls.field_names() & kwargs.keys() - _BASE_KEYWORDS}
            config_dict = {**config_dict, **fields}
            # The base class drops some fields.
            known = {"model_type": cls.model_type, "__module__": __name__, "file_fields": config_dict}
            own: Any = type(cls.__name__, (PreTrainedConfig,), known)
            return own.from_dict(config_dict, **kwargs)
        config_dict = {"_weights_version": 1, **cls._translate(config_dict)}
        names = cls.field_names() | set(GenerationConfig().to_dict())
        if "position_encoding" in kwargs:
            old = config_dict.get("position_encoding", cls.position_encoding)
            saved = config_dict.pop("position_encoding_parameters", None)
            config_dict["position_encoding_parameters"] = kept_parameters(old, saved, kwargs["position_encoding"])
            if "rope" not in _names(kwargs["position_encoding"]):
                for key in _ROPE_KEYS:
                    config_dict.pop(key, None)
        for key in kwargs:
            near = _nearest(key, names, cutoff=0.85)
            if key not in names and near and not key.startswith("_"):
                raise ValueError(f"Unknown keyword {key!r} (given: {kwargs[key]!r}). Did you mean {near!r}?")
        for key in ("rope_parameters", "rope_scaling"):
            if "rope_parameters" in kwargs or "rope_scaling" in kwargs:
                config_dict.pop(key, None)
            elif "rope_theta" in kwargs and isinstance(config_dict.get(key), dict):
                config_dict[key] = {name: value for name, value in config_dict[key].items() if name != "rope_theta"}
        # Left to the base class: it treats these itself, and reports them as used.
        for key in [key for key in kwargs if key in names.difference(_BASE_KEYWORDS, ["dtype"])]:
            config_dict[cls.attribute_map.get(key, key)] = kwargs.pop(key)
        return super().from_dict(config_dict, **kwargs)
