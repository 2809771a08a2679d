"""What installed packages offer by name through entry points: plugins, models, data sources and tasks."""

from __future__ import annotations

import importlib.metadata as metadata
from collections.abc import Mapping
from importlib.metadata import EntryPoint

from recpipe.errors import UserError, did_you_mean
from recpipe.plugin.api import Origin
from recpipe.plugin.errors import PluginConflict, PluginLoadError, PluginNotFound

PLUGIN = "plugin"
GROUPS: Mapping[str, str] = {
    PLUGIN: "recpipe.plugins",
    "model": "recpipe.models",
    "data": "recpipe.data",
    "task": "recpipe.tasks",
}
"""The entry point group for each config group."""
WORDS: Mapping[str, str] = {PLUGIN: "plugin", "model": "model", "data": "data source", "task": "task"}
"""The word for a member of each group in messages."""


def offered(kind: str) -> dict[str, EntryPoint]:
    """Installed entry points of ``kind`` (a key of ``GROUPS``) by name; nothing is imported.

    Raises ``PluginConflict`` if two packages use one name.
    """
    found: dict[str, EntryPoint] = {}
    for ep in metadata.entry_points(group=GROUPS[kind]):
        if ep.name in found and found[ep.name].value != ep.value:
            one, two = (origin_of(e).distribution for e in (found[ep.name], ep))
            raise PluginConflict(
                f"two installed packages provide a {WORDS[kind]} named '{ep.name}': {one} and {two}. "
                f"Uninstall one: pip uninstall {two}"
            )
        found[ep.name] = ep
    return dict(sorted(found.items()))


def is_offered(kind: str, name: object) -> bool:
    """Whether something installed of ``kind`` has this ``name``, which may be any value of a recipe."""
    return isinstance(name, str) and name in offered(kind)


def origin_of(ep: EntryPoint) -> Origin:
    """Name, distribution and version of an entry point."""
    return Origin(ep.name, ep.dist.name if ep.dist else "?", ep.dist.version if ep.dist else "?")


def entry(kind: str, name: str, available: Mapping[str, EntryPoint]) -> EntryPoint:
    """The entry point ``name`` of ``available``; raises ``PluginNotFound`` with the nearest name."""
    if name in available:
        return available[name]
    known = ", ".join(sorted(available)) or "none"
    raise PluginNotFound(f"no {WORDS[kind]} '{name}'.{did_you_mean(name, available)} Installed: {known}")


def imported(kind: str, ep: EntryPoint) -> object:
    """Import what the entry point names; raises ``PluginLoadError`` if that fails."""
    try:
        return ep.load()
    except UserError as fault:
        raise PluginLoadError(f"{WORDS[kind]} {origin_of(ep)} cannot be imported: {fault}") from fault
    except KeyboardInterrupt:
        raise
    except BaseException as fault:  # sys.exit at import among them
        origin = origin_of(ep)
        raise PluginLoadError(
            f"{WORDS[kind]} {origin} is installed but cannot be imported from '{ep.value}': "
            f"{type(fault).__name__}: {fault}. "
            f"Reinstall it: pip install --force-reinstall {origin.distribution}"
        ) from fault
