"""Plugins and entry points that the tests of the plugin core share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recpipe.plugin.api import Contribution, Invariant, Plugin
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.calls import Origin
from recpipe.plugin.context import Context, Io, RunFigures, TableInfo
from recpipe.plugin.offers import GROUPS
from recpipe.plugin.splitter import Split, Splitter

HOTLINE = Origin("hotline", "recpipe", "0.1.0")
BAGPIPE = Origin("bagpipe", "recpipe", "0.1.0")
ACME = Origin("acme", "recpipe-acme", "2.3.0")
RUN = RunFigures(
    steps=7, samples=14, lookups=4, io=Io(store="host"), before_cold_seconds=0.0, after_cold_seconds=0.0
)
TABLES = {name: TableInfo(name, 100, 8) for name in ("t_cat_0", "t_cat_1", "user_id")}


class Good(Plugin):
    """Does nothing, well."""

    api = (2, 0)

    def __init__(self, *, alpha: float = 0.5, rows: int | None = None, names: tuple[str, ...] = ()) -> None:
        if alpha > 1:
            raise ValueError("alpha must be at most 1")
        self.alpha = alpha

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution()


class Splits(Splitter):
    """Splits as a function says."""

    def __init__(self, split: Callable[[Any, Any], Split]) -> None:
        self.function = split

    def split(self, batch: Any, needs_cold: Any) -> Split:
        return self.function(batch, needs_cold)


class Shuffles(Good):
    alters = frozenset({Invariant.SAMPLE_ORDER})


class Leaves(Good):
    """Says what a skipper alters."""

    alters = frozenset({Invariant.EXACT_GRADIENT, Invariant.SAMPLE_SET, Invariant.BATCH_SIZE})


class Relies(Good):
    relies_on = frozenset({Invariant.SAMPLE_ORDER})


class FakeEntryPoint:
    """As much of an EntryPoint as loading needs; ``fault`` is raised on import."""

    def __init__(
        self, name: str, cls: object = Good, fault: Exception | None = None, dist: str = "recpipe-acme"
    ):
        self.name, self.cls, self.fault = name, cls, fault
        self.value, self.module = f"{name}_pkg.plugin:P", f"{name}_pkg.plugin"
        self.dist = SimpleNamespace(name=dist, version="2.3.0")

    def load(self) -> Any:
        if self.fault:
            raise self.fault
        return self.cls


def write_package(
    site: Path, name: str, yaml: str | None = None, code: str | None = None, kind: str = "plugin"
) -> Path:
    """A distribution in ``site`` that offers ``P`` of its module ``NAME_pkg.plugin`` as ``name``, a ``kind``.

    Without ``code``, its module fails when imported.
    """
    package = site / f"{name}_pkg"
    write(package / "__init__.py", "" if code else "raise RuntimeError('imported')\n")
    if code:
        write(package / "plugin.py", code)
    knobs = f"# @package plugins.{name}\n{name}_knob: 1\n" if yaml is None else yaml
    write(package / "conf" / kind / f"{name}.yaml", knobs)
    info = site / f"{name}_pkg-1.0.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}_pkg\nVersion: 1.0\n")
    write(info / "entry_points.txt", f"[{GROUPS[kind]}]\n{name} = {name}_pkg.plugin:P\n")
    importlib.invalidate_caches()
    return package


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def entry_points(**classes: object) -> dict[str, EntryPoint]:
    return {name: FakeEntryPoint(name, cls) for name, cls in classes.items()}  # type: ignore[misc]


def merged(
    *contributions: tuple[Origin, Contribution],
    prefer: Mapping[str, str] | None = None,
) -> Assembly:
    active = [(o, Leaves() if c.skipper else Good(), c) for o, c in contributions]
    return assemble(active, TABLES, prefer=prefer)
