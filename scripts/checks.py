"""How what users write is checked: types, ranges and misspelt keys, by pydantic, with all errors together.

A class derived from `Checked` declares its fields; rules across fields go into `problems`. Every message names the
field by its whole path, shows the value and says what is allowed.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic_core import PydanticCustomError

from whatwhere.position_base import suggest

C = TypeVar("C", bound="Checked")

# Types of fields with a range.
Count = Annotated[int, pydantic.Field(ge=1)]
NotNegative = Annotated[int, pydantic.Field(ge=0)]
Positive = Annotated[float, pydantic.Field(gt=0)]
Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]
NotNegativeFloat = Annotated[float, pydantic.Field(ge=0)]


class Refused(ValueError):
    """Input of a user that is not valid, with all known reasons."""

    # What is refused, for the message.
    what = "the input"

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = [f"{self.what} has {len(problems)} errors:", *problems]
        super().__init__(problems[0] if len(problems) == 1 else "\n- ".join(lines))


class Checked(pydantic.BaseModel):
    """Base of what users write: unknown keys, values of another type and numbers that are not finite are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields what is wrong with the fields together, which are valid one by one: a field, and the reason."""
        yield from ()

    @pydantic.model_validator(mode="after")
    def _check_problems(self) -> "Checked":
        if found := [(name, operator.attrgetter(name)(self), reason) for name, reason in self.problems()]:
            raise PydanticCustomError("problems", "not valid", {"found": found})
        return self


def parse(cls: type[C], values: Any, *, path: str = "", error: type[Refused] = Refused) -> C:
    """Builds an instance from a mapping.

    Args:
        cls: its class.
        values: what the user wrote.
        path: what stands before the names of fields in messages, such as `data.`.
        error: what is raised.

    Raises:
        Refused: of the class `error`, with all problems.
    """
    try:
        return cls.model_validate(values)
    except pydantic.ValidationError as found:
        raise error(*_messages(cls, found, path)) from None


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
            message = f"unknown key {name!r} (given: {entry['input']!r}). {suggest(names[-1], owner.model_fields)}"
        elif entry["type"] == "missing":
            message = f"{name} is missing."
        else:
            reason = "input should be a mapping" if entry["type"].startswith("model_") else entry["msg"]
            message = f"{name}={entry['input']!r} is not valid: {reason[0].lower()}{reason[1:]}."
        # Each type of a union has its own error: the first one counts.
        messages.setdefault(f"{name}: {entry['type'] == 'missing'}", message)
    return list(messages.values())


def _place(cls: type[Checked], place: tuple[int | str, ...]) -> tuple[list[str], type[Checked]]:
    """Returns the names of the fields on the way to an error, and the class that has the last of them."""
    names: list[str] = []
    for number, part in enumerate(place, 1):
        names.append(str(part))
        field = cls.model_fields.get(str(part))
        inner = field.annotation if field else None
        if number == len(place) or not (isinstance(inner, type) and issubclass(inner, Checked)):
            names[-1] += "".join(f"[{index}]" for index in place[number:] if isinstance(index, int))
            break
        cls = inner
    return names, cls


def checked_fields(name: str, fields: Mapping[str, Any]) -> type[Checked]:
    """Returns a class with these fields, by their annotations; all of them must be given."""
    return pydantic.create_model(name, __base__=Checked, **{key: (kind, ...) for key, kind in fields.items()})  # type: ignore[call-overload]
