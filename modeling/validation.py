"""Checks of what users give: types, and the nearest valid name."""

import difflib
import types
import typing
from typing import Any, Literal


def matches_type(value: Any, annotation: Any) -> bool:
    """Returns True if `value` is of the annotated type; see `Parameters`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(matches_type(value, argument) for argument in typing.get_args(annotation))
    if typing.get_origin(annotation) is Literal:
        return value in typing.get_args(annotation)
    if typing.get_origin(annotation) is list:
        return isinstance(value, list) and all(matches_type(one, *typing.get_args(annotation)) for one in value)
    if annotation in (int, float):
        return isinstance(value, (int, annotation)) and not isinstance(value, bool)
    return isinstance(value, annotation)


def describe_type(annotation: Any) -> str:
    """Returns what an error says of the annotated type."""
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(map(describe_type, typing.get_args(annotation)))
    if typing.get_origin(annotation) is list:
        return f"a list, each {' '.join(map(describe_type, typing.get_args(annotation)))}"
    return "None" if annotation is type(None) else f"of type {annotation.__name__}"


def suggest(name: str, allowed: typing.Iterable[str]) -> str:
    """Returns the end of an error message: the nearest valid name in any case, if any, and the allowed names."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(name).lower(), [one.lower() for one in allowed], n=1)
    found = [one for one in allowed if near and one.lower() == near[0]]
    return (f"Did you mean {found[0]!r}? " if found else "") + f"Allowed: {', '.join(map(repr, allowed)) or 'nothing'}."
