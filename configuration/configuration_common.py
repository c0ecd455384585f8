"""What both configurations share: the position encoding's fields, and the refusal of misspelt fields."""

import copy
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from transformers.utils.versions import require_version

require_version("transformers>=5.17,<6", "Models of whatwhere need it: pip install -U 'transformers>=5.17,<6'")

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from .configuration_rope import check_number, check_rope_parameters, is_float32, nearest, rope_type, unused_keys

logger = logging.get_logger(__name__)

# Keywords of `PreTrainedConfig.__post_init__` and keys of saved configurations that are not dataclass fields.
_BASE_KEYWORDS = {
    "_commit_hash",
    "_name_or_path",
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
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_return_dict",
}
# Fields of `PreTrainedConfig` that are one of a few values; the models are decoders, which never chunk.
_BASE_CHOICES: dict[str, tuple[Any, ...]] = {
    "output_hidden_states": (True, False, None),
    "return_dict": (True, False, None),
    "is_encoder_decoder": (False,),
    "problem_type": ("regression", "single_label_classification", "multi_label_classification", None),
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


class ConfigurationError(StrictDataclassFieldValidationError, StrictDataclassClassValidationError, ValueError):
    """A field of a configuration is not valid: a ValueError, and what Transformers' configurations raise."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


def checked(cls: type) -> Any:
    """Makes a configuration class `strict`, with refusals that are ValueErrors, at construction and at assignment."""
    cls = strict(cls)
    assign, validate = cls.__setattr__, cls.validate  # type: ignore[attr-defined]

    @functools.wraps(assign)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        # Under another name of the field the value would not be checked.
        _as_value_error(assign, self, cls.attribute_map.get(name, name), value)  # type: ignore[attr-defined]

    @functools.wraps(validate)
    def checked_validate(self: Any) -> None:
        _as_value_error(validate, self)

    cls.__setattr__ = __setattr__  # type: ignore[assignment]
    cls.validate = checked_validate  # type: ignore[attr-defined]
    return cls


def _as_value_error(function: Callable, *arguments: Any) -> None:
    try:
        function(*arguments)
    except ConfigurationError:
        raise
    except StrictDataclassError as error:
        raise ConfigurationError(str(error)) from error.__cause__


def _registry() -> Any:
    """Returns the module `position_registry` of this copy of the code, or None.

    The list of encodings lives beside the models, above the configurations; this is the one look upward. In a
    checkpoint all files are siblings, and a process that has loaded only the configuration does not have the list
    yet: the model's constructor makes the same check again.
    """
    package = __name__.rpartition(".")[0]
    if package == "whatwhere.configuration":
        package = "whatwhere"
    name = f"{package}.position_registry"
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def _names(position_encoding: Any) -> list[str]:
    """Returns the names of single encodings in a value of `position_encoding`."""
    pattern = position_encoding if isinstance(position_encoding, list) else [position_encoding]
    return list(dict.fromkeys(part for name in pattern for part in str(name).split("+")))


def _kept(old: Any, saved: dict | None, new: Any) -> dict | None:
    """Returns the saved parameters of encoding `old` that have a meaning in `new`, nested as `new` takes them."""
    if not saved:
        return None
    nested = saved if isinstance(old, list) or "+" in old else {old: saved}
    kept = {name: nested[name] for name in _names(new) if name in nested}
    return kept if isinstance(new, list) or "+" in str(new) else kept.get(new)


@checked
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
        key_value_shift: mix keys and values with those of the token before, by a gate for each key head. Not with an
            encoding that changes keys before they are cached ("rope", "pope").
        attention_weights: "softmax"; or hard attention, all weight on the key with the largest logit (CoPE, Table 7):
            "hard" gives the choice no gradient, "straight_through" that of the softmax. Served by `eager` attention.

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

    position_encoding: str | list[str] = "rope"
    position_encoding_parameters: dict | None = None
    attention_weights: Literal["softmax", "hard", "straight_through"] = "softmax"
    output_gate: bool = False
    output_norm: bool = False
    qk_norm: bool = False
    key_value_shift: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown_fields(kwargs)
        self._weights_version = kwargs.pop("_weights_version", self.weights_version)
        self.validate_architecture()
        self._check_base_fields(kwargs)
        rope = {key: copy.deepcopy(kwargs.pop(key)) for key in _ROPE_KEYS if kwargs.get(key) is not None}
        for key in _ROPE_KEYS:
            kwargs.pop(key, None)
        if self.rotates:
            self.rope_parameters = self._merged_rope(rope)
        elif rope:
            key, value = next(iter(rope.items()))
            raise ValueError(
                f"{key}={value!r} has no effect with position_encoding={self.position_encoding!r}. Remove it, or use a "
                "position_encoding that contains 'rope'."
            )
        super().__post_init__(**kwargs)
        self.validate_rope()
        self.resolve_position_encoding()

    def apply_aliases(self, kwargs: dict[str, Any]) -> None:
        """Moves values given under a name of `attribute_map` to their fields.

        The base class does that too late for defaults and checks that depend on them.
        """
        for alias, field in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, field, kwargs.pop(alias))

    def check_ranges(
        self,
        *,
        positive: tuple[str, ...] = (),
        probabilities: tuple[str, ...] = (),
        not_negative: tuple[str, ...] = (),
        activations: tuple[str, ...] = (),
    ) -> None:
        """Raises ValueError for a field out of its range; fields that are None are left out.

        Args:
            positive: fields that must be greater than 0.
            probabilities: fields that must be in [0, 1).
            not_negative: fields that must be at least 0.
            activations: fields that name an activation function.
        """
        for names, holds, allowed in (
            (positive, lambda value: value > 0 and is_float32(value), "greater than 0, finite in float32"),
            (probabilities, lambda value: 0 <= value < 1, "in [0, 1)"),
            (not_negative, lambda value: value >= 0 and is_float32(value), "at least 0, finite in float32"),
            (activations, lambda value: value in ACT2FN, f"one of {', '.join(map(repr, sorted(ACT2FN)))}"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ValueError(f"{name}={value!r} is not valid: it must be {allowed}.")

    def validate_token_ids(self) -> None:
        """Checks the ids of special tokens; raises ValueError. Transformers warns of those beyond the vocabulary."""
        for name in _TOKEN_IDS:
            value = getattr(self, name)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(one < 0 for one in ids):
                raise ValueError(f"{name}={value!r} is not valid: a token id must be at least 0; None is for no token.")
        super().validate_token_ids()

    def validate_rope(self) -> None:
        """Checks `rope_parameters`, if the encoding uses them; raises ValueError."""
        if self.rotates and getattr(self, "rope_parameters", None) is not None:
            head_dim = getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads
            check_rope_parameters("rope_parameters", self.rope_parameters, head_dim)
            super().validate_rope()

    def _check_base_fields(self, kwargs: dict[str, Any]) -> None:
        """Checks the fields that Transformers takes as they are; raises ValueError."""
        for name, dtype in (("dtype", self.dtype), ("torch_dtype", kwargs.get("torch_dtype"))):
            kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if dtype is not None and not isinstance(kind, torch.dtype):
                raise ValueError(f"{name}={dtype!r} is not valid: it must be a type of torch, as 'float32', or None.")
        # The base class does not check the types of its own fields.
        for name, choices in _BASE_CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                raise ValueError(f"{name}={value!r} is not valid. Allowed: {', '.join(map(repr, choices))}.")
        labels = kwargs.get("num_labels", 1)
        if labels is None:
            del kwargs["num_labels"]
        elif not isinstance(labels, int) or isinstance(labels, bool) or labels < 1:
            raise ValueError(f"num_labels={labels!r} is not valid: it must be an integer, at least 1.")
        for name in ("id2label", "label2id"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, dict) or not value):
                raise ValueError(f"{name}={value!r} is not valid: it must be a dictionary with an entry, or None.")
        if self.id2label is not None and not all(str(key).isdecimal() for key in self.id2label):
            raise ValueError(f"id2label={self.id2label!r} is not valid: its keys must be integers, or their digits.")
        implementation = kwargs.get("attn_implementation")
        if not isinstance(implementation, (str, dict, type(None))):
            raise ValueError(f"attn_implementation={implementation!r} is not valid: it must be a name or None.")

    def _merged_rope(self, rope: dict[str, Any]) -> dict[str, Any]:
        """Returns `rope_parameters` from the fields that were given, under present and older names."""
        given: list[str] = [key for key in ("rope_parameters", "rope_scaling") if key in rope]
        for key in given:
            if not isinstance(rope[key], dict):
                raise ValueError(f"{key}={rope[key]!r} is not valid: it must be a dictionary or None.")
        if len(given) == 2 and rope["rope_parameters"] != rope["rope_scaling"]:
            raise ValueError(
                f"rope_parameters={rope['rope_parameters']!r} and rope_scaling={rope['rope_scaling']!r} differ: they "
                "are two names of one field; give rope_parameters only."
            )
        merged = dict(rope[given[0]]) if given else {}
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope:
                check_number(key, rope[key], key)
                if merged.setdefault(key, rope[key]) != rope[key]:
                    raise ValueError(
                        f"{key}={rope[key]!r} and {given[0]}[{key!r}]={merged[key]!r} differ: give one of them."
                    )
        kind = rope_type(merged)
        head_dim = getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads
        check_rope_parameters(given[0] if given else "rope_parameters", merged, head_dim)
        merged.pop("type", None)
        return {**merged, "rope_type": kind}

    @property
    def rotates(self) -> bool:
        """True if the encoding uses Transformers' `rope_parameters`."""
        return "rope" in _names(self.position_encoding)

    @property
    def layer_pattern(self) -> list[str]:
        """The values of `position_encoding`, one for each layer, repeated if there are more layers."""
        return self.position_encoding if isinstance(self.position_encoding, list) else [self.position_encoding]

    @property
    def has_attention_options(self) -> bool:
        """True if a field of `attention_options` is set."""
        return self.output_gate or self.output_norm or self.qk_norm or self.key_value_shift

    def layer_encodings(self, layer_idx: int) -> list[str]:
        """Returns the names of the encodings that `position_encoding` gives a layer."""
        return self.layer_pattern[layer_idx % len(self.layer_pattern)].split("+")

    def resolve_position_encoding(self) -> None:
        """Checks the encoding and its parameters against this configuration, and writes resolved defaults back.

        Raises:
            ValueError: see the class.
        """
        registry = _registry()
        if registry is not None:
            self.position_encoding_parameters = registry.check(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary. See the base class."""
        # peft asks for it before it looks for the default target modules of a model type.
        self._register_peft_targets()
        return super().to_dict()

    def _register_peft_targets(self) -> None:
        """Gives this model type the default target modules of its stock model type in peft, if peft is loaded."""
        constants = sys.modules.get("peft.utils.constants")
        for name, mapping in list(vars(constants).items()) if constants else ():
            if name.endswith("_MODULES_MAPPING") and self.stock_model_type in mapping:
                mapping.setdefault(self.model_type, mapping[self.stock_model_type])

    @classmethod
    def field_names(cls) -> set[str]:
        """Returns the names that the constructor takes."""
        return {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map) | _BASE_KEYWORDS

    def _refuse_unknown_fields(self, kwargs: dict) -> None:
        allowed = self.field_names() | set(GenerationConfig().to_dict())
        for key, value in kwargs.items():
            if key not in allowed and not key.startswith("_"):
                near = nearest(key, self.field_names())
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
    def _translate(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        config_dict = dict(config_dict)
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type not in (cls.model_type, cls.stock_model_type):
            raise ValueError(
                f"The checkpoint's model_type={model_type!r} can not be loaded as {cls.__name__}. "
                f"Allowed: {cls.model_type!r} and {cls.stock_model_type!r}."
            )
        names = cls.field_names() | set(GenerationConfig().to_dict())
        for key in [key for key in config_dict if key not in names and not key.startswith("_")]:
            near = nearest(key, cls.field_names(), cutoff=0.85)
            if model_type == cls.model_type and near:
                raise ValueError(f"The checkpoint's config has the unknown field {key!r}. Did you mean {near!r}?")
            value = config_dict.pop(key)
            if key not in cls.stock_fields_without_effect:
                logger.warning(f"{cls.__name__} has no field {key!r}: dropped the value {value!r} of the checkpoint.")
        cls._drop_what_has_no_effect(config_dict, stock=model_type != cls.model_type)
        if model_type == cls.model_type and config_dict.get("_weights_version", 1) < 3:
            cls._move_pro_block(config_dict)
        if model_type != cls.model_type:
            for key in ("architectures", "auto_map"):
                config_dict.pop(key, None)
            config_dict["model_type"] = cls.model_type
        return config_dict

    @staticmethod
    def _move_pro_block(config_dict: dict[str, Any]) -> None:
        """Moves the parts of FoX's Pro block, which were parameters of the encoding, to their fields."""
        name, saved = config_dict.get("position_encoding"), config_dict.get("position_encoding_parameters") or {}
        if "fox" not in _names(name):
            return
        parameters = dict(saved if name == "fox" else saved.get("fox", {}))
        if "pro" not in parameters:
            return
        pro = parameters.pop("pro")
        for field in ("output_gate", "output_norm", "qk_norm", "key_value_shift"):
            given = parameters.pop(field, None)
            config_dict[field] = pro if given is None else given
        config_dict["position_encoding_parameters"] = parameters if name == "fox" else {**saved, "fox": parameters}

    @classmethod
    def _drop_what_has_no_effect(cls, config_dict: dict[str, Any], *, stock: bool) -> None:
        """Drops, with a warning, what files may hold and a new configuration may not."""
        for field in ("rope_parameters", "rope_scaling"):
            given = config_dict.get(field)
            # Transformers writes both names of the type, and reads the newer one.
            if isinstance(given, dict) and "rope_type" in given and "type" in given:
                config_dict[field] = {name: value for name, value in given.items() if name != "type"}
        for field in ("rope_parameters", "rope_scaling"):
            for key in unused_keys(config_dict.get(field), unknown=stock):
                config_dict[field] = {name: value for name, value in config_dict[field].items() if name != key}
                logger.warning(
                    f"{field}[{key!r}] of the checkpoint has no effect with "
                    f"rope_type={rope_type(config_dict[field])!r}: dropped."
                )
        for field in _TOKEN_IDS:
            value = config_dict.get(field)
            if isinstance(value, list):
                kept = [one for one in value if not (isinstance(one, int) and one < 0)]
                valid = len(kept) == len(value)
            else:
                kept, valid = None, not (isinstance(value, int) and value < 0)
            if not valid:
                config_dict[field] = kept or None
                logger.warning(f"{field}={value!r} of the checkpoint: a negative number is no token id and is dropped.")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Builds the configuration from a file's dictionary; keywords override it before anything is checked.

        A stock configuration of the same family is read too. When a keyword changes `position_encoding`, the file's
        parameters of encodings that stay part of it are kept, the others (and RoPE's) are dropped. A keyword
        `position_encoding_parameters` replaces those of the file as a whole: what it leaves out takes its default.

        Raises:
            ValueError: the dictionary belongs to another kind of model, or a field is misspelt.
        """
        config_dict = {"_weights_version": 1, **cls._translate(config_dict)}
        names = cls.field_names() | set(GenerationConfig().to_dict())
        if "position_encoding" in kwargs:
            old = config_dict.get("position_encoding", cls.position_encoding)
            saved = config_dict.pop("position_encoding_parameters", None)
            config_dict["position_encoding_parameters"] = _kept(old, saved, kwargs["position_encoding"])
            if "rope" not in _names(kwargs["position_encoding"]):
                for key in _ROPE_KEYS:
                    config_dict.pop(key, None)
        for key in kwargs:
            near = nearest(key, names, cutoff=0.85)
            if key not in names and near and not key.startswith("_"):
                raise ValueError(f"Unknown keyword {key!r} (given: {kwargs[key]!r}). Did you mean {near!r}?")
        # Left to the base class: it treats these itself, and reports them as used.
        own = [key for key in kwargs if key in names and key not in _BASE_KEYWORDS | {"dtype"}]
        own += [key for key in ("rope_parameters", "rope_scaling", "rope_theta") if key in kwargs]
        if any(key in kwargs for key in ("rope_parameters", "rope_scaling")):
            config_dict.pop("rope_parameters", None)
            config_dict.pop("rope_scaling", None)
        if "rope_theta" in kwargs:
            for key in ("rope_parameters", "rope_scaling"):
                if isinstance(config_dict.get(key), dict):
                    config_dict[key] = {name: value for name, value in config_dict[key].items() if name != "rope_theta"}
        for key in own:
            config_dict[cls.attribute_map.get(key, key)] = kwargs.pop(key)
        return super().from_dict(config_dict, **kwargs)


__all__ = ["ConfigurationError", "WhatWhereConfig", "checked"]
