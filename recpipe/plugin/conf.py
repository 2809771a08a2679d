"""Packages' yaml: where it is found, and the check that it sets only its own plugin's knobs or its own
section."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from recpipe.plugin.errors import PluginError
from recpipe.plugin.offers import GROUPS, PLUGIN, WORDS, entry, is_core, offered

SCHEME = "recpipe-plugin"
TARGET = "_target_"
"""The key by which Hydra makes an object of any importable class."""
TASK = "task"
GLOBAL = "_global_"
CORE_KEYS = frozenset(
    [
        "compare",
        "compose",
        "data",
        "hydra",
        "metrics",
        "model",
        "optim",
        "overwrite",
        "plugins",
        "resume",
        "seed",
        "task",
        "tiers",
        "topology",
        "trainer",
    ]
)
"""Keys that recipes have without packages, which no task may call its own."""
SHOWN = 5
"""How many keys a message names before it counts the rest."""


def package_conf(ep: EntryPoint) -> Path | None:
    """The folder ``conf`` in an entry point's top-level package, found without importing it, or None.

    Core's own is on Hydra's search path already, and is none of a package's.
    """
    if is_core(ep):
        return None
    try:
        spec = find_spec(ep.module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    folders = [Path(place) / "conf" for place in (spec.submodule_search_locations or [])] if spec else []
    return next((folder.resolve() for folder in folders if folder.is_dir()), None)


def package_confs() -> dict[Path, list[str]]:
    """The ``conf`` folders of all packages that offer something, and what each offers, such as
    ``model/tower``."""
    owners: dict[Path, list[str]] = {}
    for kind in GROUPS:
        for name, ep in offered(kind).items():
            folder = package_conf(ep)
            if folder is not None:
                owners.setdefault(folder, []).append(f"{kind}/{name}")
    return owners


class PluginSearchPath(SearchPathPlugin):
    """Puts packages' yaml on Hydra's search path after recpipe's own, so that it can add files but not
    replace them."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder, offers in package_confs().items():
            search_path.append(f"package {' '.join(offers)}", f"{SCHEME}://{folder}")


class PluginSource(FileConfigSource):
    """A package's ``conf`` folder, for Hydra; its provider is ``package`` and what the package offers.

    A package can configure only what it offers itself: ``plugin/NAME.yaml`` of its own plugins, and the yaml
    of its own models, data sources and tasks. A task may have a section of its own name, or of that name's
    last word (``quality`` of ``time_to_quality``), beside ``task``; its file then begins with ``# @package
    _global_``. A file that sets anything else is refused, and so is any file with a ``_target_``, which only
    users may write. The check happens when a recipe asks for the file, so that a package that is only
    installed disturbs nobody. A package may add further options to any group; users choose them by name.
    """

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def is_config(self, config_path: str) -> bool:
        config = config_path.removesuffix(".yaml")
        kind, _, name = config.partition("/")
        if kind in GROUPS and config not in self._own and (kind == PLUGIN or name in offered(kind)):
            return False  # another package's
        return super().is_config(config_path)

    @property
    def _own(self) -> list[str]:
        return self.provider.split()[1:]

    def load_config(self, config_path: str) -> ConfigResult:
        config = config_path.removesuffix(".yaml")
        kind, _, name = config.partition("/")
        folder = Path(self.path)
        if config in self._own:
            entry(kind, name, offered(kind))  # which refuses a name that two packages use
        if kind == PLUGIN:
            knobs_in(folder, name)
        elif kind in GROUPS:
            _refuse_foreign(folder, kind, name)
        loaded, file = super().load_config(config_path), folder / f"{config}.yaml"
        if _mentions_target(OmegaConf.to_container(loaded.config, resolve=False)):
            raise PluginError(
                f"{file} has a {TARGET}, which a package's yaml may not: classes are chosen on the command "
                "line and in your own yaml. Ask the package's author for an entry point instead"
            )
        if kind != PLUGIN and config in self._own:
            # The section's name, by which the entry point is found.
            package = loaded.header["package"]
            owns_section = kind == TASK and package == GLOBAL
            if package not in (None, kind) and not owns_section:
                raise PluginError(f"{file} has a line '# @package {package}'; leave it out")
            assert isinstance(loaded.config, DictConfig)
            section = loaded.config.setdefault(kind, {}) if owns_section else loaded.config
            if section.setdefault("name", name) != name:
                raise PluginError(
                    f"{file} names another {WORDS[kind]} than its entry point, {name}; leave name out"
                )
        return loaded


def _refuse_foreign(folder: Path, kind: str, name: str) -> None:
    who = f"{WORDS[kind]} '{name}': {folder / kind / f'{name}.yaml'}"
    remedy = (
        f"Ask the package's author for a yaml that holds the keys of '{kind}' alone, without a package line"
    )
    node, defaults = _read(folder, kind, name, who, remedy)
    own = {name, name.rpartition("_")[2]} - CORE_KEYS if kind == TASK else set()
    apart = {key: value for key, value in node.items() if key not in own}
    foreign = [*defaults, *_outside(apart, (), (kind,))]
    if foreign or not isinstance(node.get(kind), dict):
        what = f"sets {_listed(foreign)}, but" if foreign else "must map keys to values, and"
        raise PluginError(f"{who} {what} may set the section {kind} alone. {remedy}")


def _mentions_target(node: Any) -> bool:
    if isinstance(node, dict):
        return any(map(_mentions_target, (*node, *node.values())))
    if isinstance(node, list):
        return any(map(_mentions_target, node))
    # A resolver such as oc.decode can turn text into mappings.
    return isinstance(node, str) and TARGET in node


def knobs_in(folder: Path, name: str) -> dict[str, Any]:
    """The knobs in ``folder/plugin/name.yaml``, with interpolations unresolved.

    Raises ``PluginError``, naming file and keys, if it sets anything else, and ``YAMLError``.
    """
    who = f"plugin '{name}': {folder / PLUGIN / f'{name}.yaml'}"
    remedy = (
        f"Ask the plugin's author for a yaml whose first line is '# @package plugins.{name}' and that holds "
        "knobs only"
    )
    node, defaults = _read(folder, PLUGIN, name, who, remedy)
    foreign = [*defaults, *_outside(node, (), ("plugins", name))]
    if foreign:
        raise PluginError(
            f"{who} sets {_listed(foreign)}, but may set plugins.{name} alone: a plugin must "
            f"not change the rest of a run unseen. {remedy}. Whoever wants such values sets them on "
            "the command line or in an experiment's yaml"
        )
    if name not in node.get("plugins", {}):
        raise PluginError(f"{who} sets nothing under plugins.{name}, so no plugin would be active. {remedy}")
    own = node["plugins"][name]
    if not isinstance(own, dict | None):
        raise PluginError(f"{who} must map knobs to values. {remedy}")
    return {str(knob): value for knob, value in (own or {}).items()}


def _listed(keys: list[str]) -> str:
    rest = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"{', '.join(keys[:SHOWN])}{rest}"


def _read(folder: Path, kind: str, name: str, who: str, remedy: str) -> tuple[dict[str, Any], list[str]]:
    """What the yaml adds to a recipe, as a tree from the recipe's root, and the entries of its defaults
    list."""
    try:
        loaded = FileConfigSource(kind, f"file://{folder}").load_config(f"{kind}/{name}")
    except (OSError, ValueError) as fault:
        raise PluginError(f"{who} cannot be read: {fault}. {remedy}") from fault
    node: Any = OmegaConf.to_container(loaded.config, resolve=False)
    if not isinstance(node, dict):
        raise PluginError(f"{who} must map {'knobs' if kind == PLUGIN else 'keys'} to values. {remedy}")
    listed = node.pop("defaults", None) or []
    entries = listed if isinstance(listed, list) else [listed]
    package = (loaded.header["package"] or kind).removeprefix("_global_").strip(".")
    for part in reversed(package.split(".") if package else []):
        node = {part: node}
    return node, [f"defaults: {entry}" for entry in entries if entry != "_self_"]


def _outside(node: Any, at: tuple[str, ...], own: tuple[str, ...]) -> Iterator[str]:
    """Dotted keys of ``node``, which is at ``at`` in the recipe, that are outside ``own``."""
    if at == own:
        return
    if isinstance(node, dict) and (node or at == own[: len(at)]):
        for key, value in node.items():
            yield from _outside(value, (*at, str(key)), own)
    else:
        yield ".".join(at)
