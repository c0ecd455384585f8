"""What `config.position_encoding` means: names, parameters, and the encodings of each layer."""

import dataclasses
from typing import Any

from .position_base import PositionEncoding, parse_parameters
from .position_registry import COMPLETE, PARTS, POSITION_ENCODINGS
from .validation import suggest

HINT = "install the package whatwhere and import it first."
# Supported sums, with their names in this order.
COMBINATIONS = ("cope+rope", "cope+relative", "cope+alibi", "fox+rope", "token_gated_cope+rope")

Part = tuple[type[PositionEncoding], Any]


def list_position_encodings() -> list[str]:
    """Returns every name that `config.position_encoding` takes."""
    sums = [name for name in COMBINATIONS if all(part in POSITION_ENCODINGS for part in name.split("+"))]
    return [*POSITION_ENCODINGS, *sums]


def check_name(name: Any) -> None:
    """Raises ValueError for a name that is not in `list_position_encodings`."""
    if not isinstance(name, str) or name not in list_position_encodings():
        known = list_position_encodings()
        if not COMPLETE:
            own = ", ".join(map(repr, known))
            raise ValueError(f"position_encoding={name!r} is not valid: this checkpoint has the code of {own}; {HINT}")
        meant = next((one for one in known if {*one.split("+")} == {*str(name).split("+")}), name)
        raise ValueError(
            f"position_encoding={name!r} is not valid. {suggest(meant, known)} Register your own: "
            "whatwhere.register_position_encoding, `whatwhere --import FILE COMMAND`; for vLLM WHATWHERE_IMPORT=FILE."
        )


def _check_pattern(pattern: list, config: Any) -> None:
    layers = config.num_hidden_layers
    if not pattern or layers % len(pattern):
        field = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise ValueError(
            f"position_encoding={pattern!r} is not valid: its length must be at least 1 and divide {field}={layers}."
        )
    for name in pattern:
        check_name(name)
        for part in name.split("+"):
            if POSITION_ENCODINGS[part].overrides("embedding"):
                raise ValueError(
                    f"position_encoding={pattern!r} is not valid: {part!r} acts on the embeddings, not in a layer."
                )


def parse(config: Any) -> dict[str, Part]:
    """Returns the classes that `config.position_encoding` names and their resolved parameters, by name."""
    given, pattern = config.position_encoding_parameters or {}, config.position_encoding
    field = "position_encoding_parameters"
    if isinstance(pattern, list):
        _check_pattern(pattern, config)
    else:
        check_name(pattern)
    names = config.encoding_names
    fields = {name: f"{field}[{name!r}]" for name in names}
    if not is_nested(pattern):
        given, fields = {pattern: given}, {pattern: field}
    for key in given:
        if key not in names:
            raise ValueError(
                f"{field} has the unknown key {key!r}; for position_encoding={pattern!r} it is nested by name. "
                f"{suggest(key, names)}"
            )
    parts = {}
    for name in names:
        cls = POSITION_ENCODINGS[name]
        parts[name] = cls, parse_parameters(cls.parameters_class, given.get(name, {}), config, fields[name])
    return parts


def is_nested(position_encoding: str | list[str]) -> bool:
    """Returns True if the parameters of this `position_encoding` are nested by name."""
    return isinstance(position_encoding, list) or "+" in position_encoding


def check(config: Any) -> dict:
    """Checks `position_encoding` and its parameters; returns these with resolved defaults, or raises ValueError."""
    parts = parse(config)
    planned = {cls for layer in layer_plan(config) for cls, _ in layer}
    for cls, parameters in parts.values():
        if cls not in planned:
            field = "position_encoding_parameters" + (f"[{cls.name!r}]" if is_nested(config.position_encoding) else "")
            raise ValueError(
                f"{field}={dataclasses.asdict(parameters)!r} is not valid: it excludes all layers of "
                f"{config.position_encoding!r}."
            )
        if config.key_value_shift and cls.overrides("before_cache"):
            raise ValueError(
                f"key_value_shift=True is not valid for position_encoding={config.position_encoding!r}: {cls.name!r} "
                "changes keys before they are cached, each by its own position. It must be False."
            )
    if config.attention_options and "options" not in PARTS:
        field = config.attention_options[0]
        raise ValueError(f"{field}={getattr(config, field)!r} is not valid: this checkpoint has no code for it; {HINT}")
    resolved = {name: dataclasses.asdict(parameters) for name, (_, parameters) in parts.items()}
    return resolved if is_nested(config.position_encoding) else next(iter(resolved.values()))


def layer_plan(config: Any) -> list[list[Part]]:
    """Returns the classes and parameters of each layer's encodings: the pattern, less what excludes the layer."""
    parts = parse(config)
    return [
        [parts[name] for name in config.layer_encodings(layer) if parts[name][1].in_layer(layer)]
        for layer in range(config.num_hidden_layers)
    ]


def max_lengths(config: Any) -> dict[str, int]:
    """Returns the lowest limit of each kind, see `Parameters.limits`, that the encodings have."""
    found: dict[str, int] = {}
    for _, parameters in parse(config).values():
        limit, kind = parameters.max_length(config), parameters.limits
        if limit is not None:
            found[kind] = min(limit, found.get(kind, limit))
    return found


def max_length(config: Any) -> int | None:
    """Returns the longest sequence, in tokens, that the encodings support, or None if there is no limit."""
    return min(max_lengths(config).values(), default=None)
