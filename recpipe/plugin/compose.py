"""Merging plugins' contributions: a slot has one owner, claims are disjoint, chains are ordered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

from recpipe.errors import did_you_mean
from recpipe.plugin.api import Contribution, Link
from recpipe.plugin.calls import Origin, Owned
from recpipe.plugin.errors import PluginConflict, PluginOrderError
from recpipe.plugin.policy import Cache

P = TypeVar("P")
K = TypeVar("K")
Plugins = Sequence[tuple[Origin, Contribution]]

SLOTS = ("order", "splitter", "skipper", "planner")
"""Fields of ``Contribution`` that only one plugin can fill; ``compose.prefer.<slot>=<plugin>`` chooses."""


def slot(name: str, wishes: Iterable[tuple[Origin, P | None]], prefer: str = "") -> Owned[P] | None:
    """The one part that fills a slot, or None when no plugin wants it."""
    wanted = [(o, p) for o, p in wishes if p is not None]
    found = [(o, p) for o, p in wanted if prefer in ("", o.plugin)]
    if prefer and not found:
        bring = ", ".join(o.plugin for o, _ in wanted) or "none"
        raise PluginConflict(
            f"compose.prefer.{name}={prefer}, but '{prefer}' brings no {name} to this run. "
            f"Active plugins that bring one: {bring}. Drop the setting or name one of them"
        )
    if len(found) > 1:
        raise PluginConflict(
            f"{' and '.join(str(o) for o, _ in found)} both want to be the {name}; only one can. "
            f"Drop one, or say which: compose.prefer.{name}={found[0][0].plugin}"
        )
    return Owned.of(*found[0]) if found else None


def keyed(name: str, wishes: Iterable[tuple[Owned[Any], Mapping[K, P]]]) -> dict[K, Owned[P]]:
    """What parts bring for each key (a module type, a collective): one owner per key."""
    merged: dict[K, Owned[P]] = {}
    for owner, parts in wishes:
        for key, part in parts.items():
            if key in merged:
                shown = key.__name__ if isinstance(key, type) else key
                raise PluginConflict(
                    f"{merged[key].origin} and {owner.origin} both bring the {name} of {shown}. Drop one"
                )
            merged[key] = replace(owner, part=part)
    return merged


def cache_claims(tables: Sequence[str], plugins: Plugins) -> dict[str, Owned[Cache]]:
    """The owner of each table's cache. A fallback claim gets the tables that no other plugin has claimed."""
    merged: dict[str, Owned[Cache]] = {}
    for fallback in (False, True):
        taken = frozenset(merged) if fallback else frozenset()
        for origin, contribution in plugins:
            for claim in contribution.cache:
                if claim.fallback == fallback:
                    _claim_cache(merged, taken, tables, origin, claim)
    return {table: merged[table] for table in tables if table in merged}


def _claim_cache(
    merged: dict[str, Owned[Cache]],
    taken: frozenset[str],
    tables: Sequence[str],
    origin: Origin,
    claim: Cache,
) -> None:
    hits = [table for table in tables if fnmatchcase(table, claim.tables)]
    if not hits:
        raise PluginConflict(
            f"{origin} claims tables '{claim.tables}', but the model has: {', '.join(tables)}. "
            f"Name some of these, for example plugins.{origin.plugin}.tables='*'"
        )
    for table in hits:
        if table in taken:
            continue
        if table in merged:
            raise PluginConflict(
                f"{merged[table].origin} and {origin} both claim the cache of table '{table}': each decides "
                "which rows are resident. Drop one of the two, or narrow one to other tables if it has "
                "a knob for that"
            )
        merged[table] = Owned.of(origin, claim)


def chain(name: str, wishes: Iterable[tuple[Origin, Sequence[Link[P]]]]) -> list[Owned[P]]:
    """Links in running order; ties keep the plugin list's order."""
    parts: dict[str, tuple[Owned[P], Link[P]]] = {}
    for origin, links in wishes:
        for link in links:
            label = f"{origin.plugin}.{link.name or name}"
            if label in parts:
                raise PluginConflict(f"{origin} adds '{label}' to {name} twice; give each link a name")
            parts[label] = (Owned(label, origin, link.part), link)
    order = list(parts)
    graph: dict[str, set[str]] = {label: set() for label in order}
    for label, (_, link) in parts.items():
        for other in order:
            names = {other, other.partition(".")[0]} - {label}
            if other != label and names & set(link.after):
                graph[label].add(other)
            if other != label and names & set(link.before):
                graph[other].add(label)
    return [parts[label][0] for label in _sorted(name, graph, order)]


def _sorted(name: str, graph: Mapping[str, set[str]], order: Sequence[str]) -> list[str]:
    """Topological order of ``graph`` (label -> its predecessors); ties are in the order of ``order``."""
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as fault:
        loop = " -> ".join(reversed(fault.args[1]))
        raise PluginOrderError(
            f"the order of {name} contradicts itself: {loop}. Drop one of these plugins"
        ) from None
    ready, done = list(sorter.get_ready()), []
    while ready:
        ready.sort(key=order.index)
        done.append(ready.pop(0))
        sorter.done(done[-1])
        ready += sorter.get_ready()
    return done


def check_preferences(prefer: Mapping[str, str]) -> None:
    """Refuse ``compose.prefer`` of something that is not a slot."""
    for name in prefer:
        if name not in SLOTS:
            hint = did_you_mean(name, SLOTS)
            raise PluginConflict(f"compose.prefer.{name}: no such slot.{hint} Slots: {', '.join(SLOTS)}")
