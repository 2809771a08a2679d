"""What installed packages offer by name through entry points.

Plugins, models, data sources and tasks are chosen in recipes; commands, checkpoints, profiles and names are
asked for by core, which imports no package by itself.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint

from recpipe.common.process import imported_from
from recpipe.errors import UserError, did_you_mean, shown
from recpipe.plugin.calls import Origin
from recpipe.plugin.errors import PluginConflict, PluginLoadError, PluginNotFound

PLUGIN = "plugin"
GROUPS: Mapping[str, str] = {
    PLUGIN: "recpipe.plugins",
    "model": "recpipe.models",
    "data": "recpipe.data",
    "task": "recpipe.tasks",
}
"""The entry point group for each config group."""
NAMES, EVICTION = "names", "eviction"
BESIDE: Mapping[str, str] = {
    "command": "recpipe.commands",
    "checkpoint": "recpipe.checkpoints",
    "profile": "recpipe.profiles",
    EVICTION: "recpipe.evictions",
    NAMES: "recpipe.names",
}
"""The entry point groups without a config group.

A command is a ``recpipe.commands.Command``. A checkpoint opens directories of a package's own format for
scoring. A profile knows this machine for ``task=profile`` (``StepModel``). Names are a dict of public names
that left ``recpipe.kit`` or ``recpipe.plugin`` for the package, to ``module:name``. An eviction policy says
which ids of a table that grows lose their rows (``recpipe.tables.dynamic.policies``).
"""
WORDS: Mapping[str, str] = {
    PLUGIN: "plugin",
    "model": "model",
    "data": "data source",
    "task": "task",
    "command": "command",
    "checkpoint": "format of checkpoints",
    "profile": "profile",
    EVICTION: "eviction policy",
    NAMES: "list of names",
}
"""The word for a member of each group in messages."""
_ALL = {**GROUPS, **BESIDE}
BLOCK = "RECPIPE_BLOCK"
"""The environment variable with the packages and names that are not there for recpipe."""


MODULES = "RECPIPE_MODULES"
"""The environment variable with plugins that are in no package, as NAME=module:Class."""


class Offers(dict[str, EntryPoint]):
    """Installed entry points of one kind by name. A name that two packages use stands for the first, and is
    an error where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.clashing: dict[str, EntryPoint] = {}
        """The second one of each such name."""


def offered(kind: str) -> Offers:
    """Installed entry points of ``kind`` (a key of ``GROUPS`` or ``BESIDE``) by name; nothing is imported,
    and what is blocked is left out."""
    found, away = Offers(), blocked()
    installed = sorted(metadata.entry_points(group=_ALL[kind]), key=lambda ep: ep.name)
    if kind == PLUGIN:
        pairs = (word.partition("=") for word in os.environ.get(MODULES, "").split())
        installed += [EntryPoint(name, value, GROUPS[PLUGIN]) for name, _, value in pairs]
    for ep in installed:
        # A distribution's name is in its metadata, which is parsed each time.
        if away and (ep.name in away or _normal(origin_of(ep).distribution) in away):
            continue
        if ep.name in found and found[ep.name].value != ep.value:
            found.clashing[ep.name] = ep
        found.setdefault(ep.name, ep)
    return found


def with_modules(words: Sequence[str]) -> list[str]:
    """``words`` for Hydra, where ``+plugin=package.module:Class`` names a plugin that no package offers: its
    name is the class's, in lower case, and its knobs are those that ``words`` set.

    The name is known from now on in this process and in those that it starts.
    """
    made: dict[str, str] = {}
    kept: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("+") != PLUGIN or ":" not in value:
            kept.append(word)
            continue
        chosen = [part.strip("'\" ") for part in value.strip("[]").split(",")]
        for part in chosen:
            if ":" in part:
                made[part.rpartition(":")[2].lower()] = part
        if named := [part for part in chosen if ":" not in part]:
            kept.append(f"+{PLUGIN}=[{','.join(named)}]")
    for name, value in made.items():
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise UserError(f"+plugin={shown(value)}: say package.module:Class")
        installed = metadata.entry_points(group=GROUPS[PLUGIN])
        if any(ep.name == name for ep in installed):
            raise PluginConflict(f"+plugin={value}: a package offers '{name}' already; rename the class")
    if not made:
        return kept
    known = set(os.environ.get(MODULES, "").split()) | {f"{name}={value}" for name, value in made.items()}
    os.environ[MODULES] = " ".join(sorted(known))
    knobs = tuple(f"plugins.{name}." for name in made)
    kept = [f"+{word}" if word.startswith(knobs) else word for word in kept]
    return [*(f"+plugins.{name}={{}}" for name in made), *kept]


def _normal(distribution: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def blocked() -> set[str]:
    """The names in ``RECPIPE_BLOCK``: of distributions, as package indexes compare them, and as written."""
    words = os.environ.get(BLOCK, "").replace(",", " ").split()
    return {*words, *map(_normal, words)}


def without_blocks(words: Sequence[str]) -> list[str]:
    """``words`` without ``+block=[NAME,...]``, whose names are blocked from now on in this process and in
    those that it starts.

    ``UserError`` for a name that no installed package has.
    """
    kept, named = [], []
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("+") != "block":
            kept.append(word)
            continue
        names = [name.strip("'\" ") for name in value.strip("[]").split(",")]
        if not all(names):
            raise UserError(f"{shown(word)}: names packages or what they offer: '+block=[acme]'")
        named += names
    if named:
        found = [ep for group in _ALL.values() for ep in metadata.entry_points(group=group)]
        known = {ep.name for ep in found} | {_normal(origin_of(ep).distribution) for ep in found}
        for name in named:
            if name not in known and _normal(name) not in known:
                hint = did_you_mean(name, known)
                raise UserError(f"+block={shown(name)}: nothing installed has that name.{hint}")
        os.environ[BLOCK] = " ".join([*os.environ.get(BLOCK, "").split(), *named])
    return kept


def is_offered(kind: str, name: object) -> bool:
    """Whether something installed of ``kind`` has this ``name``, which may be any value of a recipe."""
    return isinstance(name, str) and name in offered(kind)


def is_core(ep: EntryPoint) -> bool:
    """Whether core itself brings it, such as ``task=plan``."""
    return ep.module.partition(".")[0] == "recpipe"


def origin_of(ep: EntryPoint) -> Origin:
    """Name, distribution and version of an entry point."""
    return Origin(ep.name, *((ep.dist.name, ep.dist.version) if ep.dist else (ep.module, "in no package")))


def entry(kind: str, name: str, available: Mapping[str, EntryPoint]) -> EntryPoint:
    """The entry point ``name`` of ``available``; raises ``PluginNotFound`` with the nearest name, and
    ``PluginConflict`` if two packages use it."""
    if name not in available:
        known, hint = ", ".join(sorted(available)) or "none", did_you_mean(name, available)
        outdated = ""  # so is a checkout that has been updated since it was installed
        if not any(is_core(ep) for ep in metadata.entry_points(group=GROUPS["task"])):
            outdated = (
                ". recpipe's own tasks are not found either: its installation is older than its files, run "
                "recpipe doctor"
            )
        raise PluginNotFound(
            f"no {WORDS[kind]} '{name}'{blocked_words(name)}.{hint} Installed: {known}{outdated}"
        )
    if isinstance(available, Offers) and name in available.clashing:
        both = origin_of(available[name]), origin_of(available.clashing[name])
        other = next(one.distribution for one in reversed(both) if one.distribution != Origin.distribution)
        raise PluginConflict(
            f"two installed packages provide a {WORDS[kind]} named '{name}': {both[0].distribution} and "
            f"{both[1].distribution}. Leave one out: '+block=[{other}]', or pip uninstall {other}"
        )
    return available[name]


def blocked_words(name: str) -> str:
    """For a message about ``name``: that it is blocked, or nothing."""
    return f", which is blocked ({BLOCK})" if {name, _normal(name)} & blocked() else ""


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
        remedy = "Its module must be in the current directory or on PYTHONPATH"
        if ep.dist:
            remedy = f"Reinstall it: pip install --force-reinstall {origin.distribution}"
        there = "installed" if ep.dist else "named"
        raise PluginLoadError(
            f"{WORDS[kind]} {origin} is {there} but cannot be imported from '{ep.value}': "
            f"{type(fault).__name__}: {fault}. {remedy}"
        ) from fault


def moved_name(module: str, name: str) -> object:
    """The object that was ``module.name`` until its package took it over; packages written before import on.

    Raises ``AttributeError`` if no installed package has it, and warns where it is now.
    """
    for ep in offered(NAMES).values():
        names = imported(NAMES, ep)
        if isinstance(names, Mapping) and name in names:
            where = str(names[name])
            now = where.replace(":", ".")
            warnings.warn(f"{module}.{name} is {now} now", DeprecationWarning, stacklevel=3)
            return imported_from(where)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
