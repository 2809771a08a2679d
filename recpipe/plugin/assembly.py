"""All plugins of a run, merged: which plugin owns what, and the order of chains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from recpipe.errors import UserError, did_you_mean
from recpipe.plugin.api import Contribution, Figure, Invariant, Plugin, Reporter, StepWrapper
from recpipe.plugin.calls import (
    Origin,
    Owned,
    blame,
    blame_callback,
    blame_order,
    blame_step,
    blame_stream,
    blaming,
)
from recpipe.plugin.compose import METHODS, SLOTS, Feed, Quantizing, cache_claims, chain, quantizing, slot
from recpipe.plugin.context import Context, RunFigures, TableInfo
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.plugin.planner import Planner
from recpipe.plugin.policy import Cache
from recpipe.plugin.quantizer import Quantizer
from recpipe.plugin.skipper import Skipper, overrides
from recpipe.plugin.splitter import Splitter

if TYPE_CHECKING:
    import lightning as L

    from recpipe.plugin.batch import Batch

P = TypeVar("P")
Active = Sequence[tuple[Origin, Plugin, Contribution]]
KINDS = {"planner": Planner, "splitter": Splitter, "skipper": Skipper, "quantizer": Quantizer}
"""The class of the part that fills each slot; ``cache`` takes a list of ``Cache``."""


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The merged ``Contribution`` of a run; a fault in any part names its plugin."""

    plugins: tuple[Origin, ...]
    altered_by: Mapping[str, frozenset[Invariant]]
    """The invariants that each plugin declares to alter."""
    feed: Feed
    splitter: Owned[Splitter] | None
    skipper: Owned[Skipper] | None
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
                slots = self.slots().items()
                fills = frozenset(name for name, own in slots if own and own.origin.plugin == origin.plugin)
                told = replace(run, fills=fills)
                if "splitter" not in fills:  # what another plugin's splitter has done is not told
                    told = replace(told, before_cold_seconds=0.0, after_cold_seconds=0.0)
                    told = replace(told, split_batches=0, splitting="")
                with blaming(origin, reporter.label):
                    answered = reporter.part(told)
                    found = {str(key): plain(value) for key, value in answered.items()}
                if twice := mine.keys() & found.keys():
                    raise PluginError(
                        f"{origin} reports '{min(twice)}' twice; give each reporter keys of its own"
                    )
                mine.update(found)
            except UserError as fault:
                faults[origin.plugin] = "; ".join(filter(None, (faults.get(origin.plugin), str(fault))))
        return merged, faults

    def slots(self) -> dict[str, Owned[Any] | None]:
        """What fills each slot of ``Contribution``."""
        return {
            "order": self.feed.order,
            "splitter": self.splitter,
            "skipper": self.skipper,
            "planner": self.planner,
        }

    def points(self) -> list[str]:
        """The extension points in use, in the order in which data flows, each with its parts:
        ``cache (acme.TinyLfu)``. A quantizer is followed by what it decides."""
        slots, made = self.slots(), self.quantizing
        deciding = {method: {owned.label for owned in getattr(made, method).values()} for method in METHODS}
        quantizers = []
        for owned in made.brought:
            decided = [method for method, labels in deciding.items() if owned.label in labels]
            quantizers.append(f"{owned.label}: {', '.join(decided) or 'nothing'}")
        parts: dict[str, Iterable[Owned[Any] | None]] = {
            "order": [slots["order"]],
            "stream": self.feed.stream,
            "batch": self.feed.batch,
            "planner": [slots["planner"]],
            "cache": self.caches.values(),
            "splitter": [slots["splitter"]],
            "skipper": [slots["skipper"]],
            "quantizer": (),
            "step": self.step,
            "callbacks": self.callbacks,
            "report": self.reporters,
        }
        named = {point: [owned.label for owned in found if owned] for point, found in parts.items()}
        named["quantizer"] = quantizers
        return [f"{point} ({', '.join(dict.fromkeys(names))})" for point, names in named.items() if names]

    def to_dict(self) -> dict[str, Any]:
        """Owners and order, as assembly.json holds them; ``parts`` names the part that each owner brings."""
        slots, made = self.slots(), self.quantizing
        codecs = {f"{getattr(op, 'name', op)}.{way}": owned for (op, way), owned in made.codecs.items()}
        claims: dict[str, Mapping[str, Owned[Any]]] = {
            "cache": self.caches,
            "cold": made.cold,
            "storage": made.storage,
            "codecs": codecs,
        }
        tables: dict[str, dict[str, str]] = {}
        parts: dict[str, Any] = {slot: owned.label for slot, owned in slots.items() if owned}
        for aspect, claimed in claims.items():
            for key, owned in claimed.items():
                parts.setdefault(aspect, {}).setdefault(owned.label, []).append(key)
                if aspect != "codecs":
                    tables.setdefault(key, {})[aspect] = owned.origin.plugin
        return {
            "plugins": [
                {"name": o.plugin, "distribution": o.distribution, "version": o.version} for o in self.plugins
            ],
            "altered": sorted(i.name for i in self.altered),
            "altered_by": {
                plugin: sorted(i.name for i in found) for plugin, found in self.altered_by.items()
            },
            **{slot: owned.origin.plugin if owned else None for slot, owned in slots.items()},
            "stream": [link.label for link in self.feed.stream],
            "batch": [link.label for link in self.feed.batch],
            "tables": tables,
            "codecs": {key: owned.origin.plugin for key, owned in codecs.items()},
            "step": [link.label for link in self.step],
            "callbacks": [owned.label for owned in self.callbacks],
            "report": [owned.label for owned in self.reporters],
            "parts": parts,
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
    for name in prefer:
        if name not in SLOTS:
            hint = did_you_mean(name, SLOTS)
            raise PluginConflict(f"compose.prefer.{name}: no such slot.{hint} Slots: {', '.join(SLOTS)}")
    parts = [(origin, contribution) for origin, _, contribution in active]
    splitter = slot("splitter", [(o, c.splitter) for o, c in parts], prefer.get("splitter", ""))
    order = slot("order", [(o, c.order) for o, c in parts], prefer.get("order", ""))
    skipper = slot("skipper", [(o, c.skipper) for o, c in parts], prefer.get("skipper", ""))
    planner = slot("planner", [(o, c.planner) for o, c in parts], prefer.get("planner", ""))
    altered_by = {origin.plugin: frozenset(plugin.alters) for origin, plugin, _ in active}
    if skipper is not None:
        _check_skipper(skipper, altered_by[skipper.origin.plugin])
    return Assembly(
        plugins=tuple(origin for origin, _ in parts),
        altered_by=altered_by,
        feed=Feed(
            _blamed(order, blame_order) if order else None,
            {name for name, altered in altered_by.items() if Invariant.SAMPLE_SET in altered},
            [_blamed(o, blame_stream) for o in chain("stream", [(o, c.stream) for o, c in parts])],
            [_blamed(o, blame) for o in chain("batch", [(o, c.batch) for o, c in parts])],
            {origin.plugin for origin, plugin, _ in active if plugin.takes_rows},
        ),
        splitter=splitter,
        skipper=skipper,
        planner=planner,
        caches=cache_claims(list(tables), parts),
        quantizing=quantizing(tables, parts),
        step=[_blamed(o, blame_step) for o in chain("step", [(o, c.step) for o, c in parts])],
        callbacks=[
            _blamed(Owned.of(o, cb), partial(blame_callback, Invariant.SAMPLE_SET in altered_by[o.plugin]))
            for o, c in parts
            for cb in c.callbacks
        ],
        reporters=[Owned(f"{o.plugin}.report", o, r) for o, c in parts for r in c.report],
    )


def _blamed(owned: Owned[P], wrap: Callable[[Origin, str, P], P]) -> Owned[P]:
    return replace(owned, part=wrap(owned.origin, owned.label, owned.part))


def _check_skipper(owned: Owned[Skipper], alters: Collection[Invariant]) -> None:
    """``PluginError`` if a skipper overrides nothing, or if its plugin, which ``alters`` so much, does not
    declare what it alters."""
    keeps, updates = overrides(owned.part, Skipper.keep), overrides(owned.part, Skipper.update)
    if not keeps and not updates:
        raise PluginError(
            f"{owned}, a skipper, overrides neither keep() nor update(), so that it would leave nothing out; "
            "bring one of them, or leave Contribution.skipper out"
        )
    altered = {Invariant.EXACT_GRADIENT}
    if keeps:
        altered |= {Invariant.SAMPLE_SET, Invariant.BATCH_SIZE}
    unsaid = sorted(invariant.name for invariant in altered.difference(alters))
    if unsaid:
        what = "samples out of batches" if keeps else "rows out of updates"
        raise PluginError(
            f"{owned}, leaves {what}, and the plugin's 'alters' lacks {' and '.join(unsaid)}; add "
            f"{', '.join(f'Invariant.{invariant}' for invariant in unsaid)}"
        )


def gather(active: Sequence[tuple[Origin, Plugin]], context: Context) -> Active:
    """Call ``contribute(context)`` of each plugin."""
    gathered = []
    for origin, plugin in active:
        with blaming(origin, "contribute"):
            contribution = plugin.contribute(context)
        if not isinstance(contribution, Contribution):
            raise PluginError(f"plugin {origin}: contribute() returned {contribution!r}, not a Contribution")
        parts = [(name, getattr(contribution, name), kind) for name, kind in KINDS.items()]
        parts += [("cache", each, Cache) for each in contribution.cache]
        for name, part, kind in parts:
            if part is not None and not isinstance(part, kind):
                raise PluginError(
                    f"plugin {origin}: Contribution.{name} is {part!r}, which is no "
                    f"recpipe.plugin.{kind.__name__}: derive it from that class"
                )
        gathered.append((origin, plugin, contribution))
    return gathered
