"""Merging plugins' contributions: a slot has one owner, claims are disjoint, chains are ordered."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, TypeVar

from recpipe.errors import did_you_mean
from recpipe.plugin.api import BatchTransform, Contribution, EpochOrder, Link, StreamWrapper
from recpipe.plugin.calls import Origin, Owned, blamed
from recpipe.plugin.context import TableInfo
from recpipe.plugin.errors import PluginConflict, PluginError, PluginOrderError
from recpipe.plugin.policy import Cache
from recpipe.plugin.quantizer import STORAGES, Direction, Quantizer, RecordLayout, RowCodec

if TYPE_CHECKING:
    from torchrec.distributed.types import CommOp, QuantizedCommCodec

P = TypeVar("P")
Plugins = Sequence[tuple[Origin, Contribution]]

SLOTS = ("order", "splitter", "skipper", "planner")
"""Fields of ``Contribution`` that only one plugin can fill; ``compose.prefer.<slot>=<plugin>`` chooses."""
METHODS = ("cold", "storage", "codecs")
"""What a quantizer may override."""


@dataclass(frozen=True)
class Feed:
    """What plugins do with training batches between the data and the loader."""

    order: Owned[EpochOrder] | None = None
    """The plugin's order of an epoch's samples; None: the data's own."""
    leaving_out: Collection[str] = ()
    """The plugins that declare that they change which samples an epoch trains (SAMPLE_SET)."""
    stream: Sequence[Owned[StreamWrapper]] = ()
    batch: Sequence[Owned[BatchTransform]] = ()
    taking_rows: Collection[str] = ()
    """The plugins whose streams take rows in the place of keys (``Plugin.takes_rows``)."""

    @property
    def is_data_itself(self) -> bool:
        """Whether batches reach the loader unchanged."""
        return self.order is None and not self.stream and not self.batch


@dataclass(frozen=True)
class Quantizing:
    """What the plugins' quantizers ask for. Tables and collectives that are missing have no owner."""

    cold: Mapping[str, Owned[RowCodec]]
    """The codec of each table. Tables with one owner and one record layout share a codec."""
    storage: Mapping[str, Owned[str]]
    """The storage type of each table that has an owner; it may be float32."""
    codecs: Mapping[tuple[CommOp, Direction], Owned[QuantizedCommCodec[Any]]]
    brought: Sequence[Owned[Quantizer]] = ()
    """All quantizers, also those that decide nothing."""


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


def cache_claims(tables: Sequence[str], plugins: Plugins) -> dict[str, Owned[Cache]]:
    """The owner of each table's cache. A fallback claim gets the tables that no other plugin has claimed."""
    merged: dict[str, Owned[Cache]] = {}
    for fallback in (False, True):
        taken = frozenset(merged) if fallback else frozenset()
        claims = [(origin, claim) for origin, c in plugins for claim in c.cache if claim.fallback == fallback]
        for origin, claim in claims:
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
                        f"{merged[table].origin} and {origin} both claim the cache of table '{table}': each "
                        "decides which rows are resident. Drop one of the two, or narrow one to other tables "
                        "if it has a knob for that"
                    )
                merged[table] = Owned.of(origin, claim)
    return {table: merged[table] for table in tables if table in merged}


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
    before: dict[str, set[str]] = {label: set() for label in order}
    for label, (_, link) in parts.items():
        for other in order:
            names = {other, other.partition(".")[0]} - {label}
            if other != label and names & set(link.after):
                before[label].add(other)
            if other != label and names & set(link.before):
                before[other].add(label)
    sorter = TopologicalSorter(before)
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
    return [parts[label][0] for label in done]


def quantizing(tables: Mapping[str, TableInfo], plugins: Plugins) -> Quantizing:
    """Merge the quantizers of ``plugins`` over ``tables``, by name.

    ``PluginConflict`` if two want the same aspect, ``PluginError`` if a quantizer returns something invalid.
    """
    brought = [Owned.of(origin, c.quantizer) for origin, c in plugins if c.quantizer is not None]
    cold: dict[str, Owned[RowCodec]] = {}
    storage: dict[str, Owned[str]] = {}
    codecs: dict[tuple[CommOp, Direction], Owned[QuantizedCommCodec[Any]]] = {}
    for owned in brought:
        origin, quantizer = owned.origin, owned.part
        if all(getattr(type(quantizer), method) is getattr(Quantizer, method) for method in METHODS):
            raise PluginError(
                f"{owned}, a quantizer, overrides none of {', '.join(f'{method}()' for method in METHODS)}; "
                "bring one of them, or leave the quantizer out"
            )
        own = [table for name, table in tables.items() if fnmatchcase(name, quantizer.tables)]
        if not own:
            raise PluginConflict(
                f"{origin} quantizes tables '{quantizer.tables}', but the model has: {', '.join(tables)}."
                f"{did_you_mean(quantizer.tables, tables)} Name some of these, for example "
                f"plugins.{origin.plugin}.tables='*'"
            )
        made: dict[RecordLayout, RowCodec | None] = {}
        for table in own:
            layout = RecordLayout(table.dim, table.dim + table.state)
            if layout not in made:
                made[layout] = owned.call(Quantizer.cold, layout, wrong=_wrong_codec)
            said = owned.call(Quantizer.storage, table)
            if said is not None and said not in STORAGES:
                raise PluginError(
                    f"{owned}: storage() stores table '{table.name}' in {said!r}; choose one of "
                    f"{', '.join(STORAGES)}"
                )
            _claim(cold, "cold", table.name, owned, made[layout])
            _claim(storage, "storage", table.name, owned, said)
    for owned in brought:
        for key, codec in owned.call(Quantizer.codecs).items():
            if key in codecs:
                raise PluginConflict(
                    f"{codecs[key].origin} and {owned.origin} both bring the codec of {key}. Drop one"
                )
            part = blamed(owned.origin, f"{owned.label}.codecs", codec)
            codecs[key] = Owned(owned.label, owned.origin, part)
    return Quantizing(cold, storage, codecs, brought)


def _wrong_codec(made: object) -> str | None:
    """What is wrong with the result of ``Quantizer.cold``."""
    if made is None:
        return None
    if not isinstance(made, RowCodec):
        return f": cold() must return a RowCodec or None, not {type(made).__name__}"
    size = getattr(made, "bytes_per_record", None)
    if isinstance(size, int) and size >= 1:
        return None
    return (
        f": {type(made).__name__}.bytes_per_record must be a whole number of bytes, at least 1, not {size!r}"
    )


def _claim(
    merged: dict[str, Owned[P]], aspect: str, table: str, owned: Owned[Quantizer], part: P | None
) -> None:
    if part is None:
        return
    if table in merged:
        raise PluginConflict(
            f"{merged[table].origin} and {owned.origin} both want to decide the {aspect} of table "
            f"'{table}': one quantizer does that. Drop one, or narrow one to other tables, for example by "
            f"plugins.{owned.origin.plugin}.tables if it has that knob"
        )
    merged[table] = Owned(owned.label, owned.origin, part, made_by=aspect)
