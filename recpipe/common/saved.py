"""Checks for values read from a file before they are used: a file may be truncated, edited or from elsewhere.

Each check raises ``Damaged`` with the place in the file, the value and what belongs there. The caller, who
knows the file, adds its name and the remedy.
"""

from __future__ import annotations

import json
import reprlib
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

T = TypeVar("T")
LARGEST_JSON = 256 * 2**20
"""Most bytes of a JSON file; a plan of a million shards has fewer."""


class Damaged(ValueError):
    """The value read cannot be what was written."""


def read_json(file: Path) -> Any:
    """The content of a JSON file; ``OSError`` or ``ValueError`` if it cannot be read or parsed."""
    with file.open("rb") as stream:
        text = stream.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise Damaged(f"larger than {LARGEST_JSON >> 20} MiB")
    return parse_json(text)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ``ValueError`` if it is not JSON, is nested too deeply or has NaN."""

    def refuse(name: str) -> None:
        raise Damaged(f"{name} is no number")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise Damaged("nested too deeply") from None


def typed_as(kind: type[T], value: object, where: str = "") -> T:
    """``value`` converted to ``kind``: mappings with exactly its fields become a dataclass, lists become
    tuples."""
    found: T = _typed(kind, value, where)
    return found


def entries(hints: Mapping[str, Any], value: object, where: str = "") -> dict[str, Any]:
    """The entries of a mapping whose keys are in ``hints``, checked against their types; other keys are left
    out."""
    found = _mapping(value, where)
    lacking = next((key for key in hints if key not in found), None)
    if lacking is not None:
        raise Damaged(f"{where or 'it'} lacks {_short(lacking)}")
    return {key: _typed(hint, found[key], _inside(where, key)) for key, hint in hints.items()}


def _typed(hint: Any, value: Any, where: str) -> Any:
    """``value`` converted to the type ``hint``; ``where`` is its place in the file."""
    hint = _without_alias(hint)
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        found, (hints, required) = _mapping(value, where), _fields(hint)
        unknown = next((key for key in found if key not in hints), None)
        if unknown is not None:
            raise Damaged(f"{where or 'it'} has {_short(unknown)}, which is unknown")
        names = {key: each for key, each in hints.items() if key in found or key in required}
        return hint(**entries(names, found, where))
    if origin in (Union, types.UnionType):
        return _any_of(args, value, where)
    if origin is tuple or origin is list:
        return _sequence(origin, args, value, where)
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        keys, values = args
        return {
            _typed(keys, k, f"a key of {where}"): _typed(values, v, _inside(where, k))
            for k, v in _mapping(value, where).items()
        }
    if not _fits(hint, origin, args, value):
        raise Damaged(f"{where} is {_short(value)}, not {_spelled(hint)}")
    return value


def _without_alias(hint: Any) -> Any:
    """What ``hint`` stands for, if it is an alias of a ``type`` statement, as NDArray is since numpy 2.5."""
    origin = get_origin(hint)
    if hasattr(origin, "__value__"):
        return _without_alias(origin.__value__[get_args(hint)])
    return _without_alias(hint.__value__) if hasattr(hint, "__value__") else hint


def _fits(hint: Any, origin: Any, args: tuple[Any, ...], value: object) -> bool:
    if origin is Literal:
        return isinstance(value, str | int) and value in args
    if origin is np.ndarray:  # NDArray[X]
        return isinstance(value, np.ndarray) and value.dtype == get_args(args[1])[0]
    if hint is int:
        return type(value) is int
    if hint is float:
        # Not NaN, not infinite, and not an int too large for a float.
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return isinstance(value, type(None) if hint is None else hint)


def _any_of(args: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    if len(choices) == 1:
        return _typed(choices[0], value, where)
    for choice in choices:
        try:
            return _typed(choice, value, where)
        except Damaged:
            continue
    raise Damaged(f"{where} is {_short(value)}, not {' or '.join(map(_spelled, args))}")


def _sequence(kind: type, args: tuple[Any, ...], value: object, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise Damaged(f"{where} is {_short(value)}, not a list")
    hints = args[:1] * len(value) if kind is list or args[1:] == (...,) else args
    if len(hints) != len(value):
        raise Damaged(f"{where} has {len(value)} values, not {len(hints)}")
    return kind(_typed(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True)))


@cache
def _fields(cls: Any) -> tuple[dict[str, Any], set[str]]:
    """Types of a dataclass's fields, and which of them have no default."""
    hints = get_type_hints(cls)
    required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
    return {f.name: hints[f.name] for f in fields(cls)}, required


def like(model: object, value: Any, where: str) -> None:
    """``Damaged`` unless ``value`` has the structure of ``model``: equal keys, types, dtypes, tensor shapes.

    Lengths of arrays and lists may differ. If ``model`` has None or an object of another kind at a place, any
    value is accepted there.
    """
    if isinstance(model, dict):
        found = _mapping(value, where)
        for key in (*model, *found):
            if key not in found or key not in model:
                raise Damaged(f"{where} {'lacks' if key in model else 'has unknown'} {_short(key)}")
            like(model[key], found[key], _inside(where, key))
    elif isinstance(model, list | tuple):
        for index, item in enumerate(_sequence(list, (Any,), value, where)):
            like(model[0] if model else None, item, f"{where}[{index}]")
    elif isinstance(model, np.ndarray):
        same = isinstance(value, np.ndarray) and (value.dtype, value.ndim) == (model.dtype, model.ndim)
        if not same:
            raise Damaged(f"{where} is {_short(value)}, not {model.ndim}-d {model.dtype}")
    elif isinstance(model, torch.Tensor):
        tensor(value, model.dtype, tuple(model.shape), where)
    elif isinstance(model, bool | int | float | str | np.generic):
        _typed(type(model.item() if isinstance(model, np.generic) else model), value, where)


def tensor(value: object, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> None:
    """``Damaged`` unless ``value`` is a tensor of this type and shape with its values in host memory."""
    if not isinstance(value, torch.Tensor) or (
        (value.dtype, tuple(value.shape)) != (dtype, shape)
        or (value.layout, value.device.type) != (torch.strided, "cpu")
    ):
        raise Damaged(f"{where} is {_short(value)}, not {dtype} {shape}")


def within(
    state: Mapping[str, Any], name: str, least: int, stop: int | None = None, size: int | None = None
) -> None:
    """``Damaged`` unless ``state[name]``, a number or an array of ``size``, is in [least, stop)."""
    values = np.asarray(state[name])
    if size is not None and values.shape != (size,):
        raise Damaged(f"{name} has {len(values)} values, not {size}")
    if values.size and (values.min() < least or (stop is not None and values.max() >= stop)):
        raise Damaged(f"{name} has a value that is not in [{least}, {'...' if stop is None else stop})")


def residents(state: Mapping[str, Any], name: str, slots: int, rows: int) -> None:
    """``Damaged`` unless ``state[name]`` has for each slot a row number below ``rows`` or -1, and no row
    twice."""
    within(state, name, -1, rows, size=slots)
    used = state[name][state[name] >= 0]
    if len(np.unique(used)) < len(used):
        raise Damaged(f"{name} has a row twice")


def _mapping(value: object, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise Damaged(f"{where or 'it'} is {_short(value)}, not a mapping of names to values")
    return value


def _inside(where: str, key: object) -> str:
    if not isinstance(key, str) or not key.isidentifier():
        return f"{where}[{_short(key)}]"
    return f"{where}.{key}" if where else key


def _short(value: object) -> str:
    """``value`` as a short text on one line."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
    return reprlib.repr(value).replace("\n", " ")[:80]


def _spelled(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    names = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(hint) or str(getattr(hint, "__name__", hint))
