"""Objects named as ``module:name``, which are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def imported_from(where: str) -> Any:
    """The object that ``where``, a ``module:name``, names; its module is imported now."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def lazily(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``, whose public names are objects at ``places``."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return imported_from(places[name])

    return get
