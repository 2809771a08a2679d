"""A plugin's knobs are the keyword arguments of its ``__init__``; its yaml and the command line set them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from recpipe.common.validation import fitted
from recpipe.errors import UserError, did_you_mean
from recpipe.plugin.api import Plugin
from recpipe.plugin.calls import Origin
from recpipe.plugin.errors import PluginError


def check_knobs(cls: type[Plugin], origin: Origin, knobs: Mapping[str, Any]) -> None:
    """Refuse unknown, missing and mistyped knobs; the message has the key, the value and what would be
    right."""
    takes = {
        name: p
        for name, p in inspect.signature(cls).parameters.items()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    hints = _hints(cls)
    for name, value in knobs.items():
        key = f"plugins.{origin.plugin}.{name}"
        if name not in takes:
            hint = did_you_mean(str(name), takes)
            raise PluginError(f"{key}: no such knob.{hint} {origin.plugin} has: {', '.join(takes) or 'none'}")
        if name in hints:
            _check_type(hints[name], value, key)
    for name, p in takes.items():
        if p.default is p.empty and name not in knobs:
            raise PluginError(
                f"plugins.{origin.plugin}.{name} has no value: set it on the command line or in the yaml"
            )


def _check_type(hint: Any, value: object, key: str) -> None:
    try:
        fitted(hint, value, key)
    except UserError as fault:
        raise PluginError(str(fault)) from None


def _hints(cls: type[Plugin]) -> dict[str, Any]:
    """Types of the knobs; empty if an annotation names what only type checkers import."""
    try:
        return get_type_hints(cls.__init__, include_extras=True)
    except NameError:
        return {}
