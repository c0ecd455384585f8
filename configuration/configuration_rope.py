"""Checks of `rope_parameters`: the keys that each type of RoPE reads, and their ranges."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# The largest number of float32, and the smallest positive one with all of its digits.
FLOAT32_MAX = 3.4028234e38
FLOAT32_TINY = 1.1754944e-38

# What Transformers' functions in `modeling_rope_utils` read, by `rope_type`: required and optional keys. All read
# `rope_theta` and `partial_rotary_factor`. A missing `original_max_position_embeddings` is max_position_embeddings.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("original_max_position_embeddings", "factor", "attention_factor"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "proportional": ((), ("factor",)),
}
_SHARED_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")
_ALL_KEYS = sorted({key for both in _KEYS.values() for keys in both for key in keys} | set(_SHARED_KEYS))
# Ranges of numbers: greater than the first, or at least that; at most the last.
_RANGES: dict[str, tuple[float, bool, float]] = {
    "rope_theta": (1, False, FLOAT32_MAX),
    "partial_rotary_factor": (0, False, 1),
    "factor": (0, False, FLOAT32_MAX),
    "attention_factor": (0, False, FLOAT32_MAX),
    "beta_fast": (0, False, FLOAT32_MAX),
    "beta_slow": (0, False, FLOAT32_MAX),
    "mscale": (0, True, FLOAT32_MAX),
    "mscale_all_dim": (0, True, FLOAT32_MAX),
    "low_freq_factor": (0, False, FLOAT32_MAX),
    "high_freq_factor": (0, False, FLOAT32_MAX),
}


def nearest(name: Any, allowed: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the allowed name (lower case) that `name` probably means, whatever its case, or None."""
    return next(iter(difflib.get_close_matches(str(name).lower(), sorted(allowed), n=1, cutoff=cutoff)), None)


def rope_types() -> list[str]:
    """Returns the types of RoPE that are known here and to the installed Transformers."""
    return [kind for kind in _KEYS if kind == "default" or kind in ROPE_INIT_FUNCTIONS]


def check_number(field: str, value: Any, name: str) -> None:
    """Raises ValueError if `value` is not a number in the range of the key `name`; `field` is for the message."""
    least, including, most = _RANGES[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (least <= value <= most) or (value == least and not including):
        above = f"at least {least}" if including else f"greater than {least}"
        below = "finite in float32" if most == FLOAT32_MAX else f"at most {most}"
        raise ValueError(f"{field}={value!r} is not valid: it must be a number {above}, {below}.")


def check_rope_parameters(field: str, parameters: Any, head_dim: int) -> None:
    """Checks the keys and values of `rope_parameters`.

    Args:
        field: the name of the field in messages.
        parameters: its value.
        head_dim: channels of a head.

    Raises:
        ValueError: not a dictionary; an unknown type, a key that the type does not use or one that it needs and that is
            missing; a value of the wrong type or out of range; a number of rotated channels that is odd or too small.
    """
    if not isinstance(parameters, dict):
        raise ValueError(f"{field}={parameters!r} is not valid: it must be a dictionary or None.")
    kind = rope_type(parameters)
    if not isinstance(kind, str) or kind not in rope_types():
        near = nearest(kind, rope_types())
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"{field}['rope_type']={kind!r} is not valid.{hint} Allowed: {rope_types()}.")
    if parameters.get("type", kind) != kind:
        raise ValueError(f"{field} has 'type' and 'rope_type' that differ: {parameters['type']!r} and {kind!r}.")
    required, optional = _KEYS[kind]
    allowed = sorted({*_SHARED_KEYS, *required, *optional})
    for key, value in parameters.items():
        if key in allowed or key == "type":
            continue
        if key in _ALL_KEYS:
            raise ValueError(
                f"{field}[{key!r}]={value!r} has no effect with rope_type={kind!r}: remove it. Allowed: {allowed}."
            )
        near = nearest(key, allowed) or nearest(key, _ALL_KEYS)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"{field} has the unknown key {key!r}.{hint} Allowed for rope_type={kind!r}: {allowed}.")
    for key in required:
        if parameters.get(key) is None:
            raise ValueError(f"{field}[{key!r}] is missing: rope_type={kind!r} needs {list(required)}.")
    for key, value in parameters.items():
        if value is not None or key in ("rope_theta", "partial_rotary_factor"):
            _check_value(f"{field}[{key!r}]", key, value)
    if kind == "llama3" and not parameters["high_freq_factor"] > parameters["low_freq_factor"]:
        raise ValueError(
            f"{field}['high_freq_factor']={parameters['high_freq_factor']!r} is not valid: it must be greater than "
            f"low_freq_factor={parameters['low_freq_factor']!r}."
        )
    _check_channels(field, kind, parameters, head_dim)


def _check_value(field: str, key: str, value: Any) -> None:
    if key in _RANGES:
        check_number(field, value, key)
    elif key == "truncate" and not isinstance(value, bool):
        raise ValueError(f"{field}={value!r} is not valid: it must be True or False.")
    elif key == "original_max_position_embeddings" and (
        not isinstance(value, int) or isinstance(value, bool) or value < 2
    ):
        raise ValueError(f"{field}={value!r} is not valid: it must be an integer, at least 2.")
    elif key in ("short_factor", "long_factor"):
        if not isinstance(value, list):
            raise ValueError(f"{field}={value!r} is not valid: it must be a list of numbers.")
        for index, number in enumerate(value):
            check_number(f"{field}[{index}]", number, "factor")


def _check_channels(field: str, kind: str, parameters: dict[str, Any], head_dim: int) -> None:
    factor = parameters.get("partial_rotary_factor", 1.0)
    rotated = int(head_dim * factor)
    if rotated < 2 or rotated % 2:
        what = f"{field}['partial_rotary_factor']={factor!r}" if factor != 1 else f"head_dim={head_dim!r}"
        raise ValueError(
            f"{what} is not valid: of {head_dim} channels of a head it rotates {rotated}; it must be an even number, "
            "at least 2."
        )
    if kind == "dynamic" and rotated < 4:
        raise ValueError(
            f"{field}['rope_type']={kind!r} is not valid: of {head_dim} channels of a head it rotates {rotated}; it "
            "must be at least 4."
        )
    for key in ("short_factor", "long_factor"):
        if key in parameters and len(parameters[key]) != rotated // 2:
            raise ValueError(
                f"{field}[{key!r}] has {len(parameters[key])} numbers; allowed: {rotated // 2}, one for each pair of "
                "rotated channels."
            )


def rope_type(parameters: dict[str, Any]) -> Any:
    """Returns the type that `rope_parameters` name, under its present or its older key."""
    return parameters.get("rope_type", parameters.get("type", "default"))


def unused_keys(parameters: Any, *, unknown: bool) -> list[str]:
    """Returns the keys that the type in `rope_parameters` does not use.

    Args:
        parameters: the value of the field; what is not valid has no unused keys.
        unknown: whether keys that no type uses are among them.
    """
    if not isinstance(parameters, dict) or rope_type(parameters) not in rope_types():
        return []
    required, optional = _KEYS[rope_type(parameters)]
    used = {*_SHARED_KEYS, "type", *required, *optional}
    return [key for key in parameters if key not in used and (unknown or key in _ALL_KEYS)]


def is_float32(value: float) -> bool:
    """Returns True if a number is finite in float32, and neither NaN nor so small that it is lost there."""
    return math.isfinite(value) and (value == 0 or FLOAT32_TINY <= abs(value) <= FLOAT32_MAX)


__all__ = ["check_number", "check_rope_parameters", "is_float32", "nearest", "rope_type", "rope_types", "unused_keys"]
