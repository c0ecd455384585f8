"""RoPE, by Transformers' own implementation, with all of its `rope_parameters`, which are checked here."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

from .position_base import Parameters, PositionContext, PositionEncoding, head_dim
from .validation import suggest

# What Transformers' functions in `modeling_rope_utils` read, by `rope_type`: required and optional keys, and what all
# read. A missing `original_max_position_embeddings` is max_position_embeddings.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "proportional": ((), ("factor",)),
}
_SHARED_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
ALL_KEYS = _SHARED_KEYS.union(*(keys for both in _KEYS.values() for keys in both))


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= torch.finfo(torch.float32).max


# What a value must be, by key; of all other keys, a number greater than 0.
_POSITIVE = ("a number greater than 0, finite in float32", lambda value: _is_number(value) and value > 0)
_NOT_NEGATIVE = ("a number at least 0, finite in float32", lambda value: _is_number(value) and value >= 0)
_NUMBERS = ("a list of numbers greater than 0", lambda value: type(value) is list and all(map(_POSITIVE[1], value)))
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rope_theta": ("a number greater than 1, finite in float32", lambda value: _is_number(value) and value > 1),
    "partial_rotary_factor": ("a number greater than 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "mscale": _NOT_NEGATIVE,
    "mscale_all_dim": _NOT_NEGATIVE,
    "truncate": ("True or False", lambda value: type(value) is bool),
    "original_max_position_embeddings": ("an integer, at least 2", lambda value: type(value) is int and value >= 2),
    "short_factor": _NUMBERS,
    "long_factor": _NUMBERS,
}


def _rope_type(parameters: dict[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _check_value(field: str, key: str, value: Any) -> None:
    allowed, holds = _VALUES.get(key, _POSITIVE)
    if not holds(value):
        raise ValueError(f"{field}={value!r} is not valid: it must be {allowed}.")


def check_rope_parameters(field: str, parameters: Any, config: Any) -> None:
    """Checks the keys and values of `rope_parameters`, which messages call `field`; raises ValueError."""
    if not isinstance(parameters, dict):
        raise ValueError(f"{field}={parameters!r} is not valid: it must be a dictionary or None.")
    kind = _rope_type(parameters)
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"{field}['rope_type']={kind!r} is not valid. {suggest(kind, _KEYS)}")
    if parameters.get("type", kind) != kind:
        raise ValueError(f"{field} has 'type' and 'rope_type' that differ: {parameters['type']!r} and {kind!r}.")
    required, optional = _KEYS[kind]
    allowed = sorted(_SHARED_KEYS.union(required, optional) - {"type"})
    for key in unused_keys(parameters):
        if key not in ALL_KEYS:
            raise ValueError(f"{field} has the unknown key {key!r}. {suggest(key, allowed)}")
        problem = f"has no effect with rope_type={kind!r}: remove it. Allowed: {allowed}."
        raise ValueError(f"{field}[{key!r}]={parameters[key]!r} {problem}")
    for key in required:
        if parameters.get(key) is None:
            raise ValueError(f"{field}[{key!r}] is missing: rope_type={kind!r} needs {list(required)}.")
    for key, value in parameters.items():
        if key not in ("rope_type", "type") and (value is not None or key in ("rope_theta", "partial_rotary_factor")):
            _check_value(f"{field}[{key!r}]", key, value)
    if kind == "llama3" and not parameters["high_freq_factor"] > parameters["low_freq_factor"]:
        raise ValueError(
            f"{field}['high_freq_factor']={parameters['high_freq_factor']!r} is not valid: it must be greater than "
            f"low_freq_factor={parameters['low_freq_factor']!r}."
        )
    channels, factor = head_dim(config), parameters.get("partial_rotary_factor", 1.0)
    rotated, least = int(channels * factor), 4 if kind == "dynamic" else 2
    if rotated < least or rotated % 2:
        what = f"{field}['partial_rotary_factor']={factor!r}" if factor != 1 else f"head_dim={channels!r}"
        what = f"{field}['rope_type']={kind!r}" if rotated == 2 else what
        raise ValueError(
            f"{what} is not valid: of {channels} channels of a head it rotates {rotated}; it must be an even number, "
            f"at least {least}."
        )
    for key in ("short_factor", "long_factor"):
        if key in parameters and len(parameters[key]) != rotated // 2:
            raise ValueError(
                f"{field}[{key!r}] has {len(parameters[key])} numbers; allowed: {rotated // 2}, one for each pair of "
                "rotated channels."
            )


def unused_keys(parameters: dict[str, Any]) -> list[str]:
    """Returns the keys that the type in `rope_parameters` does not use; none if there is no such type."""
    required, optional = _KEYS.get(str(_rope_type(parameters)), (ALL_KEYS, parameters))
    return [key for key in parameters if key not in _SHARED_KEYS.union(required, optional)]


def merged_parameters(given: dict[str, Any], config: Any) -> dict[str, Any]:
    """Returns `rope_parameters`, checked, from the fields that set them, under present and older names."""
    names = [name for name in ("rope_parameters", "rope_scaling") if name in given]
    for name in names:
        check_rope_parameters(name, given[name], config)
    if len(names) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise ValueError(
            f"rope_parameters={given['rope_parameters']!r} and rope_scaling={given['rope_scaling']!r} differ: they "
            "are two names of one field; give rope_parameters only."
        )
    merged = dict(given[names[0]]) if names else {}
    if "rope_theta" in given:
        theta = given["rope_theta"]
        _check_value("rope_theta", "rope_theta", theta)
        if merged.setdefault("rope_theta", theta) != theta:
            raise ValueError(
                f"rope_theta={theta!r} and {names[0]}['rope_theta']={merged['rope_theta']!r} differ: give one of them."
            )
    kind = _rope_type(merged)
    merged.pop("type", None)
    return {**merged, "rope_type": kind}


@dataclasses.dataclass(frozen=True)
class RotaryParameters(Parameters):
    """None of its own: RoPE is set by the configuration's `rope_parameters`."""

    unknown_key_hint = "RoPE is set by the field rope_parameters, for example rope_parameters={'rope_theta': 10000.0}."

    def resolve(self, config: Any) -> "RotaryParameters":
        if getattr(config, "rope_parameters", None) is not None:
            check_rope_parameters("rope_parameters", config.rope_parameters, config)
        return self


class RotaryTables(nn.Module):
    """Cosines and sines of the new tokens, once per forward pass."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # The one that knows partial_rotary_factor; otherwise it is Llama's.
        self.rotary_emb = GPTNeoXRotaryEmbedding(config=config)

    def forward(self, hidden: torch.Tensor, context: PositionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, each (1 or B, Q, R), dtype of `hidden`; R channels of a head are rotated."""
        return self.rotary_emb(hidden, position_ids=context.query_positions)


class RotaryPositionEncoding(PositionEncoding):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864): q and k are rotated by their position.

    Set by the configuration's `rope_parameters` (`rope_theta`; `rope_type` default, linear, dynamic, yarn, ...;
    `partial_rotary_factor`: the share of a head's channels, the first ones, that is rotated). Runs at any length;
    without scaling, quality falls off beyond the trained one.
    """

    name = "rope"
    paper = "Su et al. 2021 (2104.09864)"
    summary = "queries and keys rotated by their position; linear, dynamic, YaRN, llama3 scaling; all or some channels"
    parameters_class = RotaryParameters

    @classmethod
    def shared(cls, config: Any, parameters: Any) -> RotaryTables:
        return RotaryTables(config)

    def before_cache(
        self, query: torch.Tensor, key: torch.Tensor, context: PositionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return apply_rotary_pos_emb(query, key, *context.shared[self.name])
