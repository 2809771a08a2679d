"""``recpipe plugins``: lists what packages offer, the extension points that each plugin uses, and what it
alters. ``recpipe plugins new KIND NAME`` writes a whole package, made of the example of the kind's page."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import fill
from typing import Never

from rich.markup import escape

from recpipe.common.console import Output
from recpipe.config.compose import conf_dir
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.plugin.api import Contribution, Plugin
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.calls import Origin
from recpipe.plugin.conf import knobs_in, package_conf
from recpipe.plugin.context import Context, GroupInfo, TableInfo
from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import installed, instantiate
from recpipe.plugin.offers import (
    GROUPS,
    PLUGIN,
    WORDS,
    entry,
    imported,
    is_core,
    is_offered,
    offered,
    origin_of,
)

_TABLES = {f"C{i}": TableInfo(f"C{i}", 1000, 16, state=4) for i in range(1, 27)}
_INDENT = " " * 4
TEMPLATES = Path(__file__).parent / "starters"
HERE = "@NAME@"
"""What stands for the package's name in a template."""
MADE = {
    "planner": "Spread",
    "cache": "TinyLfu",
    "splitter": "Warm",
    "skipper": "SkipSmall",
    "quantizer": "HalfCold",
    "model": "FactorizationMachine",
    "data": "open_clicks",
    "task": "skew",
}
"""What the entry point of each kind names in the package."""
PROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "recpipe-@NAME@"
version = "0.1.0"
dependencies = ["recpipe>=0.1,<1"]

[project.entry-points."{group}"]
@NAME@ = "recpipe_@NAME@:{made}"
"""
README = """\
# recpipe-@NAME@

A {kind} for recpipe. It begins as the example of recpipe's page about this kind
(docs/plugins/{kind}.md), which explains it; change it to what you need.

```sh
pip install -e .
recpipe plugins
python -m recpipe {word}
python -m pytest tests
```
"""


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
    parts = {field.name: getattr(contribution, field.name) for field in dataclasses.fields(contribution)}
    return tuple(
        name
        for name, part in parts.items()
        if (bool(part) if isinstance(part, (int, list, tuple, dict)) else part is not None)
    )


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
        # A plugin for finished models names the command that uses it, and contributes nothing to a run.
        command = getattr(plugin, "recpipe_command", None)
        if command is not None:
            uses: Sequence[str] = [f"recpipe {command}"]
        else:
            ((_, _, contribution),) = gather([(origin, plugin)], SAMPLE)
            uses = assemble([(origin, plugin, contribution)], SAMPLE.tables).points()
    except Exception as fault:
        return Listed(origin, fault=f"{type(fault).__name__}: {fault}".splitlines()[0])
    doc = (inspect.getdoc(type(plugin)) or "").splitlines()
    alters = tuple(sorted(i.name for i in plugin.alters))
    return Listed(origin, doc[0] if doc else "", tuple(uses), alters)


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
    """``recpipe plugins``: print what is installed, or write a new package (``new KIND NAME``). Returns 0
    even if a plugin is broken, which its row says."""
    if words:
        if len(words) != 3 or words[0] != "new":
            raise UserError(
                f"say recpipe plugins, or recpipe plugins new KIND NAME; kinds: {', '.join(MADE)}"
            )
        folder = write_starter(words[1], words[2])
        print(f"{folder} is a whole package: pip install -e {folder}; python -m pytest {folder}/tests")
        return 0
    rows = {ep.name: listed(ep) for ep in installed().values()}
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
    for name, row in (rows | parts).items():
        console.print(f"[bold]{escape(name)}[/]  {row.origin.distribution} {row.origin.version}")
        lines = ["BROKEN, see below"] if row.fault else [row.doc]
        if name in rows and not row.fault:
            lines.append(f"extension points: {', '.join(row.uses)}")
            lines.append(f"alters: {', '.join(row.alters) or 'nothing'}")
        for line in lines:
            text = fill(line, console.width, initial_indent=_INDENT, subsequent_indent=_INDENT)
            console.print(text, markup=False, highlight=False)
    for name, row in (rows | parts).items():
        if row.fault:
            print(f"broken: {name}: {row.fault}")
    print(
        "Shown for the values of each plugin's yaml; what other knobs make of it: task=plan +plugin=NAME ..."
    )
    console.print("Switch one on: python -m recpipe +plugin=NAME. Two: '+plugin=[a,b]'.", markup=False)
    return 0


def starter(kind: str, name: str) -> dict[str, str]:
    """The files of a package that offers a ``kind`` called ``name``, by their path in it.

    ``UserError`` for another kind or a name that no package can have.
    """
    if kind not in MADE:
        raise UserError(f"no kind '{shown(kind)}': {nearest_or_all(kind, MADE)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise UserError(f"'{shown(name)}' is no name: a lower-case letter, then such letters, digits and _")
    group = kind if kind in GROUPS else PLUGIN

    def read(template: str) -> str:
        return (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")

    word = f"+plugin={name}" if group == PLUGIN else f"{group}={name}"
    files = {
        "pyproject.toml": PROJECT.format(group=GROUPS[group], made=MADE[kind]),
        "README.md": README.format(kind=kind, word=word),
        f"recpipe_{name}/__init__.py": read(f"{kind}.py"),
        f"recpipe_{name}/conf/{group}/{name}.yaml": read(f"{kind}.yaml"),
        f"tests/test_{name}.py": read(f"{group}.test"),
    }
    return {file: text.replace(HERE, name) for file, text in files.items()}


def write_starter(kind: str, name: str) -> Path:
    """Write the package into the folder ``recpipe-NAME`` here; ``UserError`` if it or the name is taken."""
    files, folder = starter(kind, name), Path(f"recpipe-{name}")
    group = kind if kind in GROUPS else PLUGIN
    if is_offered(group, name):
        raise UserError(f"something installed offers a {group} named '{name}' already: choose another name")
    if folder.exists():
        raise UserError(f"{folder} is there already: choose another name, or move it away")
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
