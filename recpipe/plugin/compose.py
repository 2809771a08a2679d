"""Merging plugins' contributions: a slot has one owner, claims are disjoint, chains are ordered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from typing import Generic, TypeVar

from recpipe.errors import did_you_mean
from recpipe.plugin.api import Aspect, Contribution, Link, Origin, TableClaim, TablePolicy
from recpipe.plugin.blame import BlamedPolicy
from recpipe.plugin.errors import PluginConflict, PluginError, PluginOrderError
from recpipe.plugin.policy import Cache

P = TypeVar("P")
K = TypeVar("K")
Plugins = Sequence[tuple[Origin, Contribution]]
Claims = dict[tuple[str, Aspect], "Owned[TablePolicy]"]

SLOTS = ("order", "splitter", "skipper", "planner")
"""Fields of ``Contribution`` that only one plugin can fill; ``compose.prefer.<slot>=<plugin>`` chooses."""


METHODS: Mapping[str, tuple[str, ...]] = {"precision": ("data_type",)}
"""The methods of ``TablePolicy`` that carry out each aspect; a claim needs one of them."""


@dataclass(frozen=True)
class Owned(Generic[P]):
    """A part and who brought it; ``label`` is ``plugin`` or ``plugin.part``."""

    label: str
    origin: Origin
    part: P


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
    return Owned(f"{found[0][0].plugin}.{name}", *found[0]) if found else None


def keyed(name: str, wishes: Iterable[tuple[Origin, Mapping[K, P]]]) -> dict[K, Owned[P]]:
    """Parts that each own a key (a module type, a collective): one owner per key."""
    merged: dict[K, Owned[P]] = {}
    for origin, parts in wishes:
        for key, part in parts.items():
            if key in merged:
                shown = key.__name__ if isinstance(key, type) else key
                raise PluginConflict(
                    f"{merged[key].origin} and {origin} both bring the {name} of {shown}. Drop one"
                )
            merged[key] = Owned(f"{origin.plugin}.{name}", origin, part)
    return merged


def claims(tables: Iterable[str], plugins: Plugins) -> Claims:
    """Who owns which aspect of which table; two plugins may share a table, not an aspect of it.

    A fallback claim is for what nobody else has claimed.
    """
    tables = list(tables)
    merged: Claims = {}
    for origin, contribution in plugins:
        for claim in contribution.tables:
            _check_methods(origin, claim)
    _merge(merged, tables, plugins, fallback=False)
    _merge(merged, tables, plugins, fallback=True)
    return merged


def _check_methods(origin: Origin, claim: TableClaim) -> None:
    """Refuse a claim whose policy has nothing to carry it out with."""
    policy = type(claim.policy).__name__
    for aspect in sorted(claim.aspects):
        if aspect not in METHODS:
            hint = did_you_mean(aspect, METHODS)
            raise PluginError(
                f"{origin} claims '{aspect}' of tables '{claim.glob}', which is no aspect.{hint} "
                f"Aspects: {', '.join(METHODS)}"
            )
        if not any(overrides(claim.policy, method) for method in METHODS[aspect]):
            raise PluginError(
                f"{origin} claims the {aspect} of tables '{claim.glob}', but its {policy} overrides no "
                f"{' or '.join(f'{method}()' for method in METHODS[aspect])}; bring one or drop the aspect"
            )


def overrides(policy: TablePolicy, method: str) -> bool:
    """Whether a plugin's policy (blamed or not) brings ``method`` of its own."""
    policy = policy.policy if isinstance(policy, BlamedPolicy) else policy
    return getattr(getattr(policy, method), "__func__", None) is not getattr(TablePolicy, method)


def cache_claims(tables: Sequence[str], plugins: Plugins) -> dict[str, Owned[Cache]]:
    """Who owns the cache of which table; a fallback claim is for tables that nobody else has claimed."""
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
        raise _nothing_claimed(origin, claim.tables, tables)
    for table in hits:
        if table in taken:
            continue
        if table in merged:
            raise PluginConflict(
                f"{merged[table].origin} and {origin} both claim the cache of table '{table}': each decides "
                "which rows are resident. Drop one of the two, or narrow one to other tables if it has "
                "a knob for that"
            )
        merged[table] = Owned(f"{origin.plugin}.cache", origin, claim)


def _nothing_claimed(origin: Origin, pattern: str, tables: Sequence[str]) -> PluginConflict:
    return PluginConflict(
        f"{origin} claims tables '{pattern}', but the model has: {', '.join(tables)}. "
        f"Name some of these, for example plugins.{origin.plugin}.tables='*'"
    )


def _merge(merged: Claims, tables: Sequence[str], plugins: Plugins, *, fallback: bool) -> None:
    """Add the claims that are (not) ``fallback`` ones."""
    taken = frozenset(merged) if fallback else frozenset()
    for origin, contribution in plugins:
        for claim in contribution.tables:
            if claim.fallback != fallback:
                continue
            hits = [t for t in tables if fnmatchcase(t, claim.glob)]
            if not hits:
                raise _nothing_claimed(origin, claim.glob, tables)
            for table in hits:
                for aspect in sorted(claim.aspects):
                    if (table, aspect) in taken:
                        continue
                    if other := merged.get((table, aspect)):
                        raise PluginConflict(_clash(other.origin, origin, aspect, table))
                    merged[table, aspect] = Owned(f"{origin.plugin}.tables", origin, claim.policy)


def _clash(first: Origin, second: Origin, aspect: Aspect, table: str) -> str:
    if first == second:
        return f"{second} claims the {aspect} of table '{table}' twice; its globs must be disjoint"
    return (
        f"{first} and {second} both claim the {aspect} of table '{table}'. Drop one, or narrow one so that "
        f"they are disjoint, for example by plugins.{second.plugin}.tables if it has that knob"
    )


def chain(name: str, wishes: Iterable[tuple[Origin, Sequence[Link[P]]]]) -> list[Owned[P]]:
    """Links in running order; ties keep the plugin list's order."""
    parts: dict[str, tuple[Owned[P], Link[P]]] = {}
    for origin, links in wishes:
        for link in links:
            label = f"{origin.plugin}.{link.name}" if link.name else origin.plugin
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
    """Topological order of ``graph`` (label -> its predecessors), ties as in ``order``."""
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
