"""Checks a recipe's values against types with pydantic; a one-line error has key, value and what it must be.

Types are plain hints. Limits stand beside them: ``Annotated[int, Interval(ge=1)]``, from ``annotated_types``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

from annotated_types import Interval, MultipleOf
from pydantic import AfterValidator, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import is_typeddict

from recpipe.errors import UserError, did_you_mean, nearest_or_all, shown

T = TypeVar("T")
NAME_MAX, PATH_MAX = 255, 4096 - 256
"""Most bytes of a file's name and of a path, leaving room for the names that a run adds."""
_NAMES = {
    "string": "str",
    "int_from_float": "int",
    "tuple": "a list",
    "dict": "a mapping",
    "dataclass": "a mapping",
}


def _spelled(value: Any) -> Any:
    return str(value) if type(value) is int else value


def _usable(text: str) -> str:
    try:
        encoded = os.fsencode(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111
    except UnicodeEncodeError:
        raise ValueError("is no path on this machine, whose file names have other characters") from None
    if "\0" in text:
        raise ValueError("is no path: it holds a zero byte")
    if len(encoded) > PATH_MAX or any(len(name) > NAME_MAX for name in encoded.split(b"/")):
        raise ValueError(
            f"is too long for a path ({len(encoded)} bytes; a name in it has at most {NAME_MAX})"
        )
    return text


@cache
def one_of(*names: str) -> AfterValidator:
    """One of ``names``, for ``Annotated[str, one_of("a", "b")]``; the error suggests the nearest name."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"is unknown; {nearest_or_all(value, names)}")
        return value

    return AfterValidator(check)


Dimension = Annotated[int, Interval(ge=4, le=2**20), MultipleOf(4)]
"""Dimension of a table's rows (float32 values); a multiple of 4, for FBGEMM's kernels."""
Count = Annotated[int, Interval(ge=0, le=2**63 - 1)]
"""A count, at least 0."""
Positive = Annotated[int, Interval(ge=1, le=2**63 - 1)]
"""A count, at least 1."""
Text = Annotated[str, BeforeValidator(_spelled)]
"""A name. A number is accepted too, since the command line reads ``2024`` as one."""
FilePath = Annotated[Text, AfterValidator(_usable)]
"""A path that this machine allows, whether it exists or not."""


# "3" and true are no ints, but an int is a float.
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, extra="forbid")
"""How values are read; a ``TypedDict`` that is the whole type has it by ``pydantic.with_config``."""


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=None if is_typeddict(hint) else STRICT)


def fitted(hint: Any, value: object, key: str) -> Any:
    """``value``, from yaml or the command line, converted to type ``hint``; otherwise ``UserError``, naming
    ``key``.

    A list becomes a tuple if the type asks for one; numbers must be finite.
    """
    try:
        # Through JSON, which has yaml's types: strict pydantic then accepts lists as tuples.
        return _adapter(hint).validate_json(json.dumps(value, default=str))
    except ValidationError as fault:
        raise UserError(_told(fault, hint, value, key)) from None
    except FieldError as fault:
        raise UserError(f"{key}.{fault}") from None


class FieldError(UserError):
    """What is wrong with a field of a dataclass, in words that begin with its name: ``fitted`` and
    ``typed`` put the section before it, so that the whole key is said."""


def typed(cls: type[T], values: object, section: str) -> T:
    """The dataclass ``cls`` filled from the mapping ``values``, the recipe's ``section``.

    Raises ``UserError``, naming key and value, if one is unknown, missing or unsuitable. A field whose type
    is a dataclass is filled in the same way.
    """
    values = mapping(values, section)
    hints = _hints(cast(Any, cls))
    made = {}
    for key, value in values.items():
        name = f"{section}.{key}"
        if key not in hints:
            raise UserError(
                f"no '{shown(name)}' in the recipe.{nearest_key(name, [f'{section}.{h}' for h in hints])}"
            )
        nested = is_dataclass(hints[key])
        made[key] = typed(hints[key], value, name) if nested else fitted(hints[key], value, name)
    for f in fields(cast(Any, cls)):
        if f.name not in made and f.default is f.default_factory is MISSING:
            raise no_value(f"{section}.{f.name}")
    try:
        return cls(**made)
    except FieldError as fault:
        raise UserError(f"{section}.{fault}") from None


@cache
def _hints(cls: Any) -> dict[str, Any]:
    """The types of a class's attributes, which take a millisecond to find: a recipe may have a thousand
    features."""
    return get_type_hints(cls, include_extras=True)


def typed_part(cls: type[T], values: object, section: str) -> tuple[T, dict[str, Any]]:
    """``typed`` for the keys that are fields of ``cls``, and the remaining keys, which are read elsewhere."""
    values = mapping(values, section)
    own = {f.name for f in fields(cast(Any, cls))}
    found = typed(cls, {key: value for key, value in values.items() if key in own}, section)
    return found, {key: value for key, value in values.items() if key not in own}


def chosen(kinds: Mapping[str, type[T]], values: object, section: str, also: Iterable[str] = ()) -> T:
    """The dataclass that ``values["name"]`` names among ``kinds``, filled from ``values``.

    ``also``: further valid names, for the message about an unknown one.
    """
    values = mapping(values, section)
    if "name" not in values:
        raise no_value(f"{section}.name")
    name = fitted(Annotated[Text, one_of(*kinds, *also)], values["name"], f"{section}.name")
    return typed(kinds[name], values, section)


def mapping(values: object, section: str) -> Mapping[str, Any]:
    """``values``, if they are keys and values; else ``UserError``."""
    if not isinstance(values, Mapping):
        raise UserError(f"{section}={_value(values)}: must map keys to values, as {section}.KEY=VALUE does")
    return values


def no_value(key: str) -> UserError:
    """The error for a key that must be set and is not."""
    return UserError(f"{key} has no value in this recipe: set it, {key}=VALUE")


def nearest_key(word: str, words: Sequence[str]) -> str:
    """A hint with the nearest whole key, or else a key that ends with the last part of ``word``; may be
    empty."""
    if hint := did_you_mean(word, words):
        return hint
    last = word.rpartition(".")[2]
    return next((f" Did you mean '{w}'?" for w in words if w.rpartition(".")[2] == last), "")


def _told(fault: ValidationError, hint: Any, value: object, key: str) -> str:
    errors = fault.errors(include_url=False)
    if errors[0]["type"] == "json_invalid" and "recursion" in errors[0]["msg"]:
        return f"{key}={_value(value)}: is nested too deeply"
    if errors[0]["type"] == "json_invalid":
        return f"{key}={_value(value)}: holds bytes that are no UTF-8 text"
    # Each member of a union has an error; take those that got furthest into the value.
    places = [_place(value, error["loc"]) for error in errors]
    deepest = max(places, key=len)
    there = [error for error, place in zip(errors, places, strict=True) if place == deepest]
    for step in deepest:
        value = value[step]  # type: ignore[index]
        key += f"[{step}]" if isinstance(step, int) else f".{shown(step)}"
    if there[0]["type"] == "missing":
        return str(no_value(f"{key}.{there[0]['loc'][-1]}"))
    if there[0]["type"] == "unexpected_keyword_argument":
        return f"no '{key}' in the recipe: leave it out"
    phrase = _phrase(there, not deepest and NoneType in get_args(hint), value)
    return f"{key}={_value(value)}{'' if phrase.startswith('is ') else ':'} {phrase}"


def _phrase(errors: Sequence[ErrorDetails], optional: bool, value: object) -> str:
    """What is wrong, to follow ``key=value``."""
    unfit = [e for e in errors if not (e["type"].endswith("_type") or e["type"] == "int_from_float")]
    if unfit:
        own = [str(error["ctx"]["error"]) for error in unfit if error["type"] == "value_error"]
        said = [re.sub(r"^\w+ should", "must", error["msg"]) for error in unfit]
        return (own or said)[0].removesuffix(" after validation, not 0")
    kinds = [error["type"].removesuffix("_type") for error in errors] + ["null"] * optional
    wanted = " or ".join(dict.fromkeys(_NAMES.get(kind, kind) for kind in kinds))
    return f"must be {wanted}, not {'null' if value is None else type(value).__name__}"


def _place(value: object, location: Sequence[int | str]) -> list[int | str]:
    """The keys and indices in ``location``, which also has the names of a union's members."""
    found: list[int | str] = []
    at: Any = value
    for step in location:
        inside: Container[Any] = (
            at if isinstance(at, Mapping) else range(len(at) if isinstance(at, list) else 0)
        )
        if step in inside:
            at = at[step]
            found.append(step)
    return found


def _value(value: object) -> str:
    """``value`` as yaml writes it, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return shown(value)
