"""A plugin's knobs are the keyword arguments of its ``__init__``; its yaml and the command line set them."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from recpipe.plugin.api import Origin, Plugin
from recpipe.plugin.errors import PluginError


def check_knobs(cls: type[Plugin], origin: Origin, knobs: Mapping[str, Any]) -> None:
    """Refuse unknown, missing and mistyped knobs with the key, the value and what would be right."""
    takes = {
        name: p
        for name, p in inspect.signature(cls).parameters.items()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    hints = _hints(cls)
    for name, value in knobs.items():
        key = f"plugins.{origin.plugin}.{name}"
        if name not in takes:
            near = difflib.get_close_matches(str(name), takes, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise PluginError(f"{key}: no such knob.{hint} {origin.plugin} has: {', '.join(takes) or 'none'}")
        if name in hints and not fits(value, hints[name]):
            raise PluginError(f"{key}={value!r}: must be {spelled(hints[name])}, not {type(value).__name__}")
    for name, p in takes.items():
        if p.default is p.empty and name not in knobs:
            raise PluginError(
                f"plugins.{origin.plugin}.{name} has no value: set it on the command line or in the yaml"
            )


def _hints(cls: type[Plugin]) -> dict[str, Any]:
    """Types of the knobs; none where an annotation names what only type checkers can import."""
    try:
        return get_type_hints(cls.__init__)
    except NameError:
        return {}


def fits(value: object, hint: Any) -> bool:
    """Whether a yaml value is of type ``hint``; an int is a float, a bool is neither."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in args
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if hint is None or hint is type(None):
        return value is None
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    base = origin or hint
    if not isinstance(base, type):
        return True
    if issubclass(list, base) or issubclass(tuple, base):
        items = isinstance(value, Sequence) and not isinstance(value, str)
        return items and (not args or all(fits(item, args[0]) for item in value))  # type: ignore[attr-defined]
    return isinstance(value, base)


def spelled(hint: Any) -> str:
    """A type as a user reads it: ``int or null``, ``one of host, ssd``."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(spelled(arg) for arg in get_args(hint))
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))
