"""All plugins of a run, merged: which plugin owns what, and the order of chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from recpipe.errors import UserError
from recpipe.plugin.api import (
    Context,
    Contribution,
    Figure,
    Invariant,
    Origin,
    Plugin,
    Reporter,
    RunFigures,
    StepWrapper,
    TableInfo,
)
from recpipe.plugin.blame import blame, blame_callback, blame_order, blame_step, blame_stream, blaming
from recpipe.plugin.blamed import (
    BlamedCache,
    BlamedPlanner,
    BlamedSkipper,
    BlamedSplitter,
    blame_skipper,
)
from recpipe.plugin.compose import Owned, cache_claims, chain, check_preferences, slot
from recpipe.plugin.errors import PluginError
from recpipe.plugin.feed import Feed
from recpipe.plugin.planner import Planner
from recpipe.plugin.policy import Cache
from recpipe.plugin.quantizer import Quantizer
from recpipe.plugin.quantizing import Quantizing, quantizing
from recpipe.plugin.skipper import Skipper
from recpipe.plugin.splitter import Splitter

if TYPE_CHECKING:
    import lightning as L

    from recpipe.data.batch import Batch

P = TypeVar("P")
Active = Sequence[tuple[Origin, Plugin, Contribution]]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The merged ``Contribution`` of a run; a fault in any part names its plugin."""

    plugins: tuple[Origin, ...]
    altered_by: Mapping[str, frozenset[Invariant]]
    """The invariants that each plugin declares to alter."""
    feed: Feed
    splitter: Owned[Splitter] | None
    skipper: Owned[BlamedSkipper] | None
    planner: Owned[Planner] | None
    caches: Mapping[str, Owned[Cache]]
    """The cache of each table that a plugin has claimed."""
    quantizing: Quantizing
    step: Sequence[Owned[StepWrapper]]
    callbacks: Sequence[Owned[L.Callback]]
    reporters: Sequence[Owned[Reporter]]

    @property
    def altered(self) -> frozenset[Invariant]:
        """The invariants that at least one plugin alters."""
        return frozenset().union(*self.altered_by.values())

    @property
    def exact(self) -> bool:
        """Whether the run must reproduce the run without plugins."""
        return not self.altered

    @contextmanager
    def around_step(self, batch: Batch) -> Iterator[None]:
        """Enter every step wrapper, the first link outermost."""
        with ExitStack() as stack:
            for link in self.step:
                stack.enter_context(link.part(batch))
            yield

    def figures(
        self, run: RunFigures, plain: Callable[[object], Any] = lambda value: value
    ) -> tuple[dict[str, dict[str, Figure]], dict[str, str]]:
        """Every plugin's figures for report.json, made of ``plain`` values, and the faults of reporters.

        A plugin that reports none has an empty entry. A reporter that fails costs its own figures alone; its
        plugin then has a line among the faults.
        """
        merged: dict[str, dict[str, Figure]] = {origin.plugin: {} for origin in self.plugins}
        faults: dict[str, str] = {}
        for reporter in self.reporters:
            origin = reporter.origin
            mine = merged[origin.plugin]
            try:
                with blaming(origin, reporter.label):
                    answered = reporter.part(self._told(run, origin.plugin))
                    found = {str(key): plain(value) for key, value in answered.items()}
                if twice := mine.keys() & found.keys():
                    raise PluginError(
                        f"{origin} reports '{min(twice)}' twice; give each reporter keys of its own"
                    )
                mine.update(found)
            except UserError as fault:
                faults[origin.plugin] = "; ".join(filter(None, (faults.get(origin.plugin), str(fault))))
        return merged, faults

    def _told(self, run: RunFigures, plugin: str) -> RunFigures:
        """``run`` as ``plugin`` is told of it: without what another plugin's splitter has done."""
        owners = {
            "order": self.feed.order,
            "splitter": self.splitter,
            "skipper": self.skipper,
            "planner": self.planner,
        }
        fills = frozenset(slot for slot, owned in owners.items() if owned and owned.origin.plugin == plugin)
        run = replace(run, fills=fills)
        if "splitter" in fills:
            return run
        return replace(run, before_cold_seconds=0.0, after_cold_seconds=0.0, split_batches=0, splitting="")

    def to_dict(self) -> dict[str, Any]:
        """Owners and order, as assembly.json holds them."""
        table_claims = self.quantizing.owners()
        for table, cache in self.caches.items():
            table_claims.setdefault(table, {})["cache"] = cache.origin.plugin
        return {
            "plugins": [
                {"name": o.plugin, "distribution": o.distribution, "version": o.version} for o in self.plugins
            ],
            "altered": sorted(i.name for i in self.altered),
            "altered_by": {
                plugin: sorted(i.name for i in found) for plugin, found in self.altered_by.items()
            },
            "order": self.feed.order.origin.plugin if self.feed.order else None,
            "stream": [link.label for link in self.feed.stream],
            "batch": [link.label for link in self.feed.batch],
            "splitter": self.splitter.origin.plugin if self.splitter else None,
            "skipper": self.skipper.origin.plugin if self.skipper else None,
            "tables": table_claims,
            "planner": self.planner.origin.plugin if self.planner else None,
            "codecs": {
                f"{getattr(op, 'name', op)}.{way}": owner.origin.plugin
                for (op, way), owner in self.quantizing.codecs.items()
            },
            "step": [link.label for link in self.step],
            "callbacks": [owned.label for owned in self.callbacks],
            "report": [owned.label for owned in self.reporters],
        }


def assemble(
    active: Active,
    tables: Mapping[str, TableInfo],
    *,
    prefer: Mapping[str, str] | None = None,
) -> Assembly:
    """Merge the contributions of ``active`` by the five laws, before memory is allocated.

    ``prefer`` maps a slot to the plugin that fills it (``compose.prefer``). Raises ``PluginConflict`` or
    ``PluginOrderError``.
    """
    prefer = dict(prefer or {})
    check_preferences(prefer)
    parts = [(origin, contribution) for origin, _, contribution in active]
    splitter = slot("splitter", [(o, c.splitter) for o, c in parts], prefer.get("splitter", ""))
    order = slot("order", [(o, c.order) for o, c in parts], prefer.get("order", ""))
    skipper = slot("skipper", [(o, c.skipper) for o, c in parts], prefer.get("skipper", ""))
    planner = slot("planner", [(o, c.planner) for o, c in parts], prefer.get("planner", ""))
    altered_by = {origin.plugin: frozenset(plugin.alters) for origin, plugin, _ in active}
    return Assembly(
        plugins=tuple(origin for origin, _ in parts),
        altered_by=altered_by,
        feed=Feed(
            _replaced(order, blame_order) if order else None,
            {name for name, altered in altered_by.items() if Invariant.SAMPLE_SET in altered},
            [_blamed(o, blame_stream) for o in chain("stream", [(o, c.stream) for o, c in parts])],
            [_blamed(o, blame) for o in chain("batch", [(o, c.batch) for o, c in parts])],
        ),
        splitter=_replaced(splitter, BlamedSplitter) if splitter else None,
        skipper=_blamed_skipper(skipper, active) if skipper else None,
        planner=_replaced(planner, BlamedPlanner) if planner else None,
        caches=_blamed_caches(cache_claims(list(tables), parts)),
        quantizing=quantizing(tables, parts),
        step=[_blamed(o, blame_step) for o in chain("step", [(o, c.step) for o, c in parts])],
        callbacks=[
            _blamed_callback(o, cb, Invariant.SAMPLE_SET in altered_by[o.plugin])
            for o, c in parts
            for cb in c.callbacks
        ],
        reporters=[Owned(f"{o.plugin}.report", o, r) for o, c in parts for r in c.report],
    )


def _blamed(owned: Owned[P], wrap: Callable[[Origin, str, P], P]) -> Owned[P]:
    return Owned(owned.label, owned.origin, wrap(owned.origin, owned.label, owned.part))


def _replaced(owned: Owned[P], wrap: Callable[[Origin, P], P]) -> Owned[P]:
    return Owned(owned.label, owned.origin, wrap(owned.origin, owned.part))


def _blamed_callback(origin: Origin, callback: L.Callback, may_stop: bool) -> Owned[L.Callback]:
    label = f"{origin.plugin}.{type(callback).__name__}"
    return Owned(label, origin, blame_callback(origin, label, callback, may_stop))


def _blamed_caches(merged: Mapping[str, Owned[Cache]]) -> dict[str, Owned[Cache]]:
    """Wrap each cache once, so that its tables still share it."""
    wrapped = {id(owner.part): _replaced(owner, BlamedCache) for owner in merged.values()}
    return {table: wrapped[id(owner.part)] for table, owner in merged.items()}


def _blamed_skipper(owned: Owned[Skipper], active: Active) -> Owned[BlamedSkipper]:
    plugin = next(plugin for origin, plugin, _ in active if origin == owned.origin)
    return Owned(owned.label, owned.origin, blame_skipper(owned.origin, plugin, owned.part))


def gather(active: Sequence[tuple[Origin, Plugin]], context: Context) -> Active:
    """Call ``contribute(context)`` of each plugin."""
    gathered = []
    for origin, plugin in active:
        with blaming(origin, "contribute"):
            contribution = plugin.contribute(context)
        if not isinstance(contribution, Contribution):
            raise PluginError(f"plugin {origin}: contribute() returned {contribution!r}, not a Contribution")
        _check_kinds(origin, contribution)
        gathered.append((origin, plugin, contribution))
    return gathered


KINDS = {"planner": Planner, "splitter": Splitter, "skipper": Skipper, "quantizer": Quantizer}
"""The class of the part that fills each slot; ``cache`` takes a list of ``Cache``."""


def _check_kinds(origin: Origin, contribution: Contribution) -> None:
    """``PluginError`` if a part is not an instance of its class."""
    parts = [(name, getattr(contribution, name), kind) for name, kind in KINDS.items()]
    parts += [("cache", each, Cache) for each in contribution.cache]
    for name, part, kind in parts:
        if part is not None and not isinstance(part, kind):
            raise PluginError(
                f"plugin {origin}: Contribution.{name} is {part!r}, which is no "
                f"recpipe.plugin.{kind.__name__}: derive it from that class"
            )
