"""What both configurations share: the position encoding's fields, and the refusal of misspelt fields."""

import copy
import dataclasses
import difflib
import importlib
import sys
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

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
# What Transformers' rotary functions read.
_ROPE_PARAMETERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "short_factor",
    "truncate",
)
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def _registry() -> Any:
    """Returns the module `position_encodings` of this copy of the code, or None.

    The list of encodings lives beside the models, above the configurations; this is the one look upward. In a
    checkpoint all files are siblings, and a process that has loaded only the configuration does not have the list
    yet: the model's constructor makes the same check again.
    """
    package = __name__.rpartition(".")[0]
    if package == "whatwhere.configuration":
        package = "whatwhere"
    name = f"{package}.position_encodings"
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def _kept(old: str, saved: dict | None, new: str) -> dict | None:
    """Returns the saved parameters of encoding `old` that have a meaning in `new`, nested as `new` takes them."""
    if not saved:
        return None
    nested = saved if "+" in old else {old: saved}
    kept = {name: nested[name] for name in new.split("+") if name in nested}
    return kept if "+" in new else kept.get(new)


@strict
class WhatWhereConfig(PreTrainedConfig):
    """Base of the configurations: `position_encoding` and `position_encoding_parameters`.

    Args:
        position_encoding: a name, or names joined by `+` (`"cope+rope"`); `whatwhere.list_position_encodings()` lists
            them.
        position_encoding_parameters: the encoding's parameters; for a combination, nested by name
            (`{"cope": {"num_positions": 64}}`). None takes the defaults. Resolved defaults are written back, so that a
            saved checkpoint keeps them.
        attention_weights: "softmax"; or hard attention, all weight on the key with the largest logit (CoPE, Table 7):
            "hard" gives the choice no gradient, "straight_through" that of the softmax. Served by `eager` attention.

    Raises:
        ValueError: an unknown or misspelt field, an unknown encoding, an impossible combination, a parameter of the
            wrong type or out of range. The message names the field, the value and what is allowed.
    """

    # Model types of stock checkpoints whose configuration this class can read.
    stock_model_type: ClassVar[str] = ""
    # Fields of the stock configuration that configure heads this package does not have; dropped when a file has them.
    stock_fields_without_effect: ClassVar[tuple[str, ...]] = ()

    position_encoding: str = "rope"
    position_encoding_parameters: dict | None = None
    attention_weights: Literal["softmax", "hard", "straight_through"] = "softmax"

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown_fields(kwargs)
        rope = {key: copy.deepcopy(kwargs.pop(key)) for key in _ROPE_KEYS if kwargs.get(key) is not None}
        for key in _ROPE_KEYS:
            kwargs.pop(key, None)
        if self.rotates:
            self.rope_parameters = dict(rope.pop("rope_parameters", None) or {})
            given = self.rope_parameters or rope.get("rope_scaling") or {}
            self._refuse_unknown_rope(given, rope.get("rope_theta"), rope.get("partial_rotary_factor"))
            kwargs.update(rope)
        elif rope:
            key, value = next(iter(rope.items()))
            raise ValueError(
                f"{key}={value!r} has no effect with position_encoding={self.position_encoding!r}. Remove it, or use a "
                "position_encoding that contains 'rope'."
            )
        super().__post_init__(**kwargs)
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
            (positive, lambda value: value > 0, "greater than 0"),
            (probabilities, lambda value: 0 <= value < 1, "in [0, 1)"),
            (not_negative, lambda value: value >= 0, "at least 0"),
            (activations, lambda value: value in ACT2FN, f"one of {', '.join(map(repr, sorted(ACT2FN)))}"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ValueError(f"{name}={value!r} is not valid: it must be {allowed}.")

    @staticmethod
    def _refuse_unknown_rope(parameters: dict[str, Any], theta: Any, factor: Any) -> None:
        allowed = {"rope_type", "type", *_ROPE_PARAMETERS}
        for key in parameters:
            if key not in allowed:
                near = difflib.get_close_matches(str(key), sorted(allowed), n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"rope_parameters has the unknown key {key!r}.{hint} Allowed: {sorted(allowed)}.")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"rope_parameters['rope_type']={kind!r} is not valid. Allowed: {['default', *ROPE_INIT_FUNCTIONS]}."
            )
        theta = parameters.get("rope_theta", theta)
        if (theta is not None or "rope_theta" in parameters) and (
            isinstance(theta, bool) or not isinstance(theta, (int, float)) or not theta > 0
        ):
            raise ValueError(f"rope_theta={theta!r} is not valid: it must be a number greater than 0.")
        factor = parameters.get("partial_rotary_factor", factor)
        if (factor is not None or "partial_rotary_factor" in parameters) and (
            isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1
        ):
            raise ValueError(f"partial_rotary_factor={factor!r} is not valid: it must be a number in (0, 1].")

    @property
    def rotates(self) -> bool:
        """True if the encoding uses Transformers' `rope_parameters`."""
        return "rope" in str(self.position_encoding).split("+")

    def resolve_position_encoding(self) -> None:
        """Checks the encoding and its parameters against this configuration, and writes resolved defaults back.

        Raises:
            ValueError: see the class.
        """
        registry = _registry()
        if registry is not None:
            self.position_encoding_parameters = registry.check(self)

    @classmethod
    def field_names(cls) -> set[str]:
        """Returns the names that the constructor takes."""
        return {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map) | _BASE_KEYWORDS

    def _refuse_unknown_fields(self, kwargs: dict) -> None:
        allowed = self.field_names() | set(GenerationConfig().to_dict())
        for key, value in kwargs.items():
            if key not in allowed and not key.startswith("_"):
                near = difflib.get_close_matches(key, sorted(self.field_names()), n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
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
            near = difflib.get_close_matches(key, sorted(cls.field_names()), n=1, cutoff=0.85)
            if model_type == cls.model_type and near:
                raise ValueError(f"The checkpoint's config has the unknown field {key!r}. Did you mean {near[0]!r}?")
            value = config_dict.pop(key)
            if key not in cls.stock_fields_without_effect:
                logger.warning(f"{cls.__name__} has no field {key!r}: dropped the value {value!r} of the checkpoint.")
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
        config_dict = cls._translate(config_dict)
        names = cls.field_names() | set(GenerationConfig().to_dict())
        if "position_encoding" in kwargs:
            old = config_dict.get("position_encoding", cls.position_encoding)
            saved = config_dict.pop("position_encoding_parameters", None)
            config_dict["position_encoding_parameters"] = _kept(str(old), saved, str(kwargs["position_encoding"]))
            if "rope" not in str(kwargs["position_encoding"]).split("+"):
                for key in _ROPE_KEYS:
                    config_dict.pop(key, None)
        for key in kwargs:
            near = difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.85)
            if key not in names and near and not key.startswith("_"):
                raise ValueError(f"Unknown keyword {key!r} (given: {kwargs[key]!r}). Did you mean {near[0]!r}?")
        # Left to the base class: it treats these itself, and reports them as used.
        own = [key for key in kwargs if key in names and key not in _BASE_KEYWORDS | {"dtype"}]
        own += [key for key in ("rope_parameters", "rope_scaling", "rope_theta") if key in kwargs]
        if any(key in kwargs for key in ("rope_parameters", "rope_scaling")):
            config_dict.pop("rope_parameters", None)
        for key in own:
            config_dict[cls.attribute_map.get(key, key)] = kwargs.pop(key)
        return super().from_dict(config_dict, **kwargs)


__all__ = ["WhatWhereConfig"]
