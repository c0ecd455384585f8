"""Validation of user input with pydantic: types, ranges and misspelt keys, with all errors in one message.

Subclasses of `Checked` declare fields; rules across fields go into `problems`. Every message gives the field's full
path, its value and what is allowed.
"""

import difflib
import operator
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic_core import PydanticCustomError

from whatwhere.validation import suggest

from .errors import Refused

C = TypeVar("C", bound="Checked")

# Types of fields with a range.
Count = Annotated[int, pydantic.Field(ge=1)]
NotNegative = Annotated[int, pydantic.Field(ge=0)]
Positive = Annotated[float, pydantic.Field(gt=0)]
Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]
NotNegativeFloat = Annotated[float, pydantic.Field(ge=0)]


class Checked(pydantic.BaseModel):
    """Base class of user input. Unknown keys, values of another type and non-finite numbers are errors."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def __repr__(self) -> str:
        return repr(self.model_dump(exclude_unset=True))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields (field, reason) for problems across fields that are valid separately."""
        yield from ()

    @classmethod
    def inner_keys(cls) -> Iterator[str]:
        """Yields keys inside of fields that are mappings, such as `model.hidden_size`, to suggest them."""
        yield from ()

    @classmethod
    def problems_of(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yields what `problems` would, of an instance with these fields, each of which is valid."""
        try:
            cls(**values)
        except pydantic.ValidationError as error:
            for entry in error.errors(include_url=False):
                yield from ((name, reason) for name, _, reason in entry["ctx"]["found"])

    @pydantic.model_validator(mode="after")
    def _check_problems(self) -> "Checked":
        if found := [(name, operator.attrgetter(name)(self), reason) for name, reason in self.problems()]:
            raise PydanticCustomError("problems", "not valid", {"found": found})
        return self


def parse(cls: type[C], values: Any, *, path: str = "") -> C:
    """Builds an instance from a mapping, or raises Refused with all problems; `path` is a prefix of field names."""
    try:
        return cls.model_validate(values)
    except pydantic.ValidationError as found:
        raise Refused(*_messages(cls, found, path)) from None


# Keys that change memory, speed, rounding and logs, and not what is computed: a resumed run may have other values.
_IMMATERIAL = {
    "data.workers",
    "distributed",
    "training.activation_checkpointing",
    "training.checkpoint_every",
    "training.chunked_loss",
    "training.compile",
    "training.ddp_timeout",
    "training.keep_checkpoints",
    "training.log_every",
    "training.micro_batch_size",
    "training.trackers",
    # Settings of `finetune`, which are not nested.
    "activation_checkpointing",
    "dp_shard",
    "save_every",
    # Of earlier versions; without `distill_from` it had no effect.
    "distill",
}


def material(old: Mapping[str, Any], new: Mapping[str, Any], *others: str) -> list[str]:
    """Returns the `differences` of two settings of runs without those of speed, memory and logs, and of `others`."""
    lines = {line.partition(": ")[0]: line for line in differences(old, new)}
    return [
        line for key, line in lines.items() if key not in (*_IMMATERIAL, *others) and not key.startswith("distributed.")
    ]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns a line `key: old → new` for every key in which two settings differ."""
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} → {after!r}")
    return lines


def _messages(cls: type[Checked], found: pydantic.ValidationError, path: str) -> list[str]:
    messages: dict[str, str] = {}
    for entry in found.errors(include_url=False):
        names, owner = _place(cls, entry["loc"])
        name = path + ".".join(names)
        if entry["type"] == "problems":
            for field, value, reason in entry["ctx"]["found"]:
                field = f"{name}.{field}" if names else path + field
                messages[f"{field}: {reason}"] = f"{field}={value!r} is not valid: {reason}."
            continue
        if entry["type"] == "extra_forbidden":
            message = f"unknown key {name!r} (given: {entry['input']!r}). {_meant(cls, owner, names, path)}"
        elif entry["type"] == "missing":
            if names[-1] != entry["loc"][-1]:
                name += f".{entry['loc'][-1]}"
            message = f"{name} is missing."
        else:
            reason = "input should be a mapping" if entry["type"].startswith("model_") else entry["msg"]
            message = f"{name}={entry['input']!r} is not valid: {reason[0].lower()}{reason[1:]}."
        # A union gives an error for each of its types: the first is reported, with the words that are allowed.
        key = f"{name}: {entry['type'] == 'missing'}"
        if entry["type"] == "literal_error" and key in messages:
            messages[key] = f"{messages[key][:-1]}, or {entry['ctx']['expected']}."
        messages.setdefault(key, message)
    return list(messages.values())


def _meant(cls: type[Checked], owner: type[Checked], names: list[str], path: str) -> str:
    """Returns the end of the message for an unknown key: the nearest key there or, if none is near, in other places."""
    *places, last = names
    text = suggest(last, owner.model_fields)
    near = difflib.get_close_matches(last.lower(), owner.model_fields, n=1)
    others = {key.rpartition(".")[2]: key for key in _keys(cls)}
    if near:
        found = ".".join([*places, near[0]])
    elif further := difflib.get_close_matches(last.lower(), others, n=1, cutoff=0.8):
        found = others[further[0]]
    else:
        return text
    return f"Did you mean {path + found!r}? {text[text.index('Allowed: ') :]}"


def _keys(cls: type[Checked]) -> Iterator[str]:
    """Yields the keys of a class, and those inside of them: `training.steps`."""
    yield from cls.inner_keys()
    for name, field in cls.model_fields.items():
        inner = _innermost(field.annotation)
        if isinstance(inner, type) and issubclass(inner, Checked) and typing.get_origin(field.annotation) is not dict:
            yield from (f"{name}.{key}" for key in _keys(inner))
        yield name


def _innermost(annotation: Any) -> Any:
    """Returns the class X of an annotation `list[X] | None`, or the annotation."""
    for argument in typing.get_args(annotation):
        if argument is not type(None):
            return _innermost(argument)
    return annotation


def _place(cls: type[Checked], place: tuple[int | str, ...]) -> tuple[list[str], type[Checked]]:
    """Returns the field names on the path to an error, and the class of the last field."""
    names: list[str] = []
    owner = cls
    inner: Any = cls
    for part in place:
        if isinstance(part, int):
            names[-1] += f"[{part}]"
        # Otherwise, it is the type of a union that the value was compared with.
        elif isinstance(inner, type) and issubclass(inner, Checked):
            names.append(part)
            owner, field = inner, inner.model_fields.get(part)
            inner = _innermost(field.annotation) if field else None
    return names, owner
