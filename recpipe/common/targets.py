"""Makes objects of a user's choice: ``_target_: package.Class`` in a recipe, with arguments beside it.

This is the only place that makes them. Since a recipe can name any importable class, only the user's own yaml
and command line may have a ``_target_``; plugins contribute objects, not names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from hydra.utils import instantiate

from recpipe.errors import UserError

T = TypeVar("T")


def make(kind: type[T], chosen: Mapping[str, Any], key: str) -> T:
    """Make the object that ``chosen`` describes, which must be a ``kind``.

    Raises ``UserError`` for anything else, naming its ``key`` in the recipe.
    """
    if "_target_" not in chosen:
        raise UserError(f"{key}={dict(chosen)}: say which class, {key}={{_target_: package.Class, ...}}")
    target = chosen["_target_"]
    try:
        made = instantiate(dict(chosen), _convert_="all")
    except UserError:
        raise
    except Exception as fault:  # Hydra 1.4 hands on what the class raises
        raise UserError(f"{key}: cannot make {target}: {_reason(fault)}") from fault
    if not isinstance(made, kind):
        raise UserError(
            f"{key}: {target} makes a {type(made).__name__}, not a {kind.__module__}.{kind.__qualname__}"
        )
    return made


def made_within(value: Any, key: str) -> Any:
    """``value``, a plain value of a recipe, with each mapping that has a ``_target_`` replaced by the object.

    Raises ``UserError``, naming ``key``.
    """
    if not _has_target(value):
        return value
    try:
        return instantiate(value, _convert_="all") if isinstance(value, dict) else _listed(value, key)
    except UserError:
        raise
    except Exception as fault:
        raise UserError(f"{key}: cannot be made: {_reason(fault)}") from fault


def _listed(value: Any, key: str) -> list[Any]:
    return [made_within(item, f"{key}[{index}]") for index, item in enumerate(value)]


def _has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_target, value.values()))
    return isinstance(value, list) and any(map(_has_target, value))


def _reason(fault: BaseException) -> str:
    """The root cause of an error, in one line."""
    while fault.__cause__ is not None:
        fault = fault.__cause__
    return " ".join(str(fault).split()) or type(fault).__name__
