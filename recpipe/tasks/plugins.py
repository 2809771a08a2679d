"""``recpipe plugins``: lists what packages offer, the extension points that each plugin uses, and what it
alters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from textwrap import fill
from typing import Never

from rich.console import Console
from rich.markup import escape

from recpipe.common.console import Output
from recpipe.config.compose import conf_dir
from recpipe.errors import UserError
from recpipe.plugin.api import Contribution, Plugin
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.calls import Origin
from recpipe.plugin.conf import knobs_in, package_conf
from recpipe.plugin.context import Context, GroupInfo, TableInfo
from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import installed, instantiate
from recpipe.plugin.offers import GROUPS, PLUGIN, WORDS, entry, imported, is_core, offered, origin_of
from recpipe.tasks.starter import MADE, write_starter

_TABLES = {f"C{i}": TableInfo(f"C{i}", 1000, 16, state=4) for i in range(1, 27)}
_INDENT = " " * 4


def _no_batch(batch: object) -> Never:
    raise PluginError("no batch is read where plugins are listed")


SAMPLE = Context(
    tables=_TABLES,
    device="cpu",
    batch_size=2048,
    resident_bytes=1 << 20,
    groups=[GroupInfo(tuple(_TABLES), 80, (1 << 20) // 80)],
    lookups=_no_batch,
    seed=0,
    data_fingerprint="listing",
    steps=1000,
)
"""An example run to ask plugins about; nothing of it is built."""


@dataclass(frozen=True)
class Listed:
    """One installed plugin; ``fault`` says why it cannot be used, and is empty if it can."""

    origin: Origin
    doc: str = ""
    uses: tuple[str, ...] = ()
    alters: tuple[str, ...] = ()
    fault: str = ""


def points(contribution: Contribution) -> tuple[str, ...]:
    """Names of the extension points that ``contribution`` uses, in data-flow order."""
    return tuple(f.name for f in dataclasses.fields(contribution) if _used(getattr(contribution, f.name)))


def _used(part: object) -> bool:
    return bool(part) if isinstance(part, (int, list, tuple, dict)) else part is not None


def default_knobs(ep: EntryPoint) -> dict[str, object]:
    """The values of the plugin's own yaml; empty if it has none.

    Raises ``PluginError`` if the yaml sets more than the plugin's knobs.
    """
    folder = package_conf(ep)
    if folder is None or not (folder / "plugin" / f"{ep.name}.yaml").is_file():
        return {}
    return knobs_in(folder, ep.name)


def listed(ep: EntryPoint) -> Listed:
    """Describe a plugin by its contribution to the example run; a plugin that fails is listed with the
    reason."""
    origin = origin_of(ep)
    try:
        plugin: Plugin = instantiate(ep.name, default_knobs(ep))
        uses = _uses(origin, plugin)
    except Exception as fault:
        return Listed(origin, fault=f"{type(fault).__name__}: {fault}".splitlines()[0])
    doc = (inspect.getdoc(type(plugin)) or "").splitlines()
    alters = tuple(sorted(i.name for i in plugin.alters))
    return Listed(origin, doc[0] if doc else "", uses, alters)


def _uses(origin: Origin, plugin: Plugin) -> tuple[str, ...]:
    """The extension points of a plugin, or the command that uses it, which a plugin for finished models names
    as its ``recpipe_command``."""
    command = getattr(plugin, "recpipe_command", None)
    if command is not None:
        return (f"recpipe {command}",)
    ((_, _, contribution),) = gather([(origin, plugin)], SAMPLE)
    return tuple(assemble([(origin, plugin, contribution)], SAMPLE.tables).points())


def describe_part(kind: str, ep: EntryPoint) -> Listed:
    """Describe a model, data source or task; one that recipes cannot choose is listed with the reason."""
    origin, folder = origin_of(ep), package_conf(ep)
    try:
        entry(kind, ep.name, offered(kind))
        doc = (inspect.getdoc(imported(kind, ep)) or "").splitlines()
    except PluginError as fault:
        return Listed(origin, fault=str(fault))
    if folder is None or not (folder / kind / f"{ep.name}.yaml").is_file():
        return Listed(origin, fault=f"its package brings no conf/{kind}/{ep.name}.yaml")
    if (conf_dir() / kind / f"{ep.name}.yaml").is_file():
        return Listed(origin, fault=f"recpipe has a {WORDS[kind]} of this name; its author must rename it")
    return Listed(origin, doc[0] if doc else "")


def plugins(words: Sequence[str]) -> int:
    """``recpipe plugins``: print what is installed, or write a new package (``new KIND NAME``)."""
    if not words:
        return print_plugins()
    if len(words) != 3 or words[0] != "new":
        raise UserError(f"say recpipe plugins, or recpipe plugins new KIND NAME; kinds: {', '.join(MADE)}")
    folder = write_starter(words[1], words[2])
    print(f"{folder} is a whole package: pip install -e {folder}; python -m pytest {folder}/tests")
    return 0


def print_plugins() -> int:
    """Print what is installed; returns 0 even if a plugin is broken, which its row says."""
    rows = [listed(ep) for ep in installed().values()]
    parts = {
        f"{kind}={ep.name}": describe_part(kind, ep)
        for kind in GROUPS
        if kind != PLUGIN
        for ep in offered(kind).values()
        if not is_core(ep)
    }
    if not rows and not parts:
        print("no plugins are installed; recpipe's own appear after: pip install -e .")
        return 0
    console = Output()
    for row in rows:
        facts = f"extension points: {', '.join(row.uses)}", f"alters: {', '.join(row.alters) or 'nothing'}"
        _print(console, row.origin.plugin, row, *facts)
    for word, row in parts.items():
        _print(console, word, row)
    named = {**{row.origin.plugin: row for row in rows}, **parts}
    for name, row in named.items():
        if row.fault:
            print(f"broken: {name}: {row.fault}")
    print(
        "Shown for the values of each plugin's yaml; what other knobs make of it: task=plan +plugin=NAME ..."
    )
    console.print("Switch one on: python -m recpipe +plugin=NAME. Two: '+plugin=[a,b]'.", markup=False)
    return 0


def _print(console: Console, word: str, row: Listed, *more: str) -> None:
    """One entry: the name or the word that chooses it, its package, what it does, and ``more``."""
    console.print(f"[bold]{escape(word)}[/]  {row.origin.distribution} {row.origin.version}")
    for line in ["BROKEN, see below"] if row.fault else [row.doc, *more]:
        text = fill(line, console.width, initial_indent=_INDENT, subsequent_indent=_INDENT)
        console.print(text, markup=False, highlight=False)
