"""Makes the plugin objects of a recipe's ``plugins:``; found by entry point, imported only if named."""

from __future__ import annotations

import importlib.metadata as metadata
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any, get_type_hints

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from recpipe.common.validation import fitted
from recpipe.errors import UserError, did_you_mean
from recpipe.plugin.api import API, Invariant, Plugin
from recpipe.plugin.calls import Origin, blaming
from recpipe.plugin.errors import (
    PluginConflict,
    PluginError,
    PluginFault,
    PluginLoadError,
    PluginVersionError,
)
from recpipe.plugin.offers import PLUGIN, entry, imported, offered, origin_of


def installed() -> dict[str, EntryPoint]:
    """Plugins on this machine by name, without importing any."""
    return offered(PLUGIN)


def load(name: str, available: Mapping[str, EntryPoint] | None = None) -> tuple[type[Plugin], Origin]:
    """Import one plugin class and check that it fits this version of the contract.

    Raises ``PluginNotFound`` (with the nearest name), ``PluginLoadError`` or ``PluginVersionError``.
    """
    ep = entry(PLUGIN, name, installed() if available is None else available)
    origin = origin_of(ep)
    cls = imported(PLUGIN, ep)
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise PluginLoadError(
            f"plugin {origin}: '{ep.value}' is not a subclass of recpipe.Plugin; correct its entry point"
        )
    major, minor = cls.api
    if major != API[0] or minor > API[1]:
        upgrade = "recpipe" if (major, minor) > API else origin.distribution
        raise PluginVersionError(
            f"plugin {origin} is written for plugin API {major}.{minor}; this recpipe speaks "
            f"{API[0]}.{API[1]}. Upgrade: pip install -U {upgrade}"
        )
    if cls.torchrec:
        try:
            wanted = SpecifierSet(cls.torchrec)
        except InvalidSpecifier:
            raise PluginLoadError(
                f"plugin {origin}: torchrec = '{cls.torchrec}' is not a version range such as '>=1.6,<1.9'"
            ) from None
        have = metadata.version("torchrec")
        if not wanted.contains(have, prereleases=True):
            raise PluginVersionError(
                f"plugin {origin} needs torchrec {wanted}, but {have} is installed: see recpipe doctor"
            )
    return cls, origin


def check_together(active: Mapping[str, Plugin]) -> None:
    """Check what plugins say about each other: requires, conflicts, and invariants that one needs and another
    alters.

    Takes plugin objects, not classes, because knobs may decide what a plugin alters.
    """
    for name, plugin in active.items():
        for other in plugin.requires:
            if other not in active:
                raise PluginConflict(f"plugin '{name}' needs '{other}': add it, +plugin=[{other},{name}]")
        reasons = plugin.conflicts
        for other in reasons:
            if other in active:
                reason = reasons[other] if isinstance(reasons, Mapping) else f"'{name}' says so"
                raise PluginConflict(
                    f"plugins '{name}' and '{other}' cannot run together ({reason}). Drop one of the two"
                )
        for other, theirs in active.items():
            broken: frozenset[Invariant] = plugin.relies_on & theirs.alters
            if other != name and broken:
                what = "; ".join(i.value for i in sorted(broken, key=lambda i: i.name))
                raise PluginConflict(
                    f"plugin '{name}' relies on this: {what}. Plugin '{other}' alters it. Drop one of the two"
                )


def instantiate(name: str, knobs: Mapping[str, Any]) -> Plugin:
    """The installed plugin ``name`` with its yaml's keys; raises ``PluginError`` for a wrong knob."""
    cls, origin = load(name)
    return _construct(cls, origin, knobs)


def _construct(cls: type[Plugin], origin: Origin, knobs: Mapping[str, Any]) -> Plugin:
    check_knobs(cls, origin, knobs)
    with blaming(origin, "__init__"):
        try:
            return cls(**knobs)
        except (TypeError, ValueError) as fault:
            raise PluginFault(
                f"plugin {origin} refuses its knobs (plugins.{origin.plugin}): {fault}"
            ) from fault


def activate(plugins: Mapping[str, Mapping[str, Any]]) -> list[tuple[Origin, Plugin]]:
    """The plugins of a recipe (``plugins:`` as plain dicts), in its order, checked alone and together."""
    available = installed()
    loaded = [(*load(name, available), knobs or {}) for name, knobs in plugins.items()]
    made = [(origin, _construct(cls, origin, knobs)) for cls, origin, knobs in loaded]
    check_together({origin.plugin: plugin for origin, plugin in made})
    return made


def check_knobs(cls: type[Plugin], origin: Origin, knobs: Mapping[str, Any]) -> None:
    """Refuse unknown, missing and mistyped knobs; the message has the key, the value and what would be
    right."""
    takes = {
        name: p
        for name, p in inspect.signature(cls).parameters.items()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    try:
        hints = get_type_hints(cls.__init__, include_extras=True)
    except NameError:  # an annotation names what only type checkers import: types are not checked
        hints = {}
    for name, value in knobs.items():
        key = f"plugins.{origin.plugin}.{name}"
        if name not in takes:
            hint = did_you_mean(str(name), takes)
            raise PluginError(f"{key}: no such knob.{hint} {origin.plugin} has: {', '.join(takes) or 'none'}")
        if name in hints:
            try:
                fitted(hints[name], value, key)
            except UserError as fault:
                raise PluginError(str(fault)) from None
    for name, p in takes.items():
        if p.default is p.empty and name not in knobs:
            raise PluginError(
                f"plugins.{origin.plugin}.{name} has no value: set it on the command line or in the yaml"
            )
