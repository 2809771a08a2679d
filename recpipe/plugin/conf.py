"""Plugins' yaml: where it lies, and what it may set: the knobs of its own plugin and nothing else."""

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
from omegaconf import OmegaConf

from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import installed

SCHEME = "recpipe-plugin"
GROUP = "plugin"
"""The config group of ``+plugin=NAME``."""
SHOWN = 5
"""Keys that a message names before it counts the rest."""


def plugin_conf(ep: EntryPoint) -> Path | None:
    """``conf`` in a plugin's top-level package, found without importing it; None where there is none."""
    try:
        spec = find_spec(ep.module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    folders = [Path(place) / "conf" for place in (spec.submodule_search_locations or [])] if spec else []
    return next((folder.resolve() for folder in folders if folder.is_dir()), None)


class PluginSearchPath(SearchPathPlugin):
    """Puts installed plugins' yaml on Hydra's search path, behind the framework's: it adds, never shadows."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        owners: dict[Path, list[str]] = {}
        for name, ep in installed().items():
            folder = plugin_conf(ep)
            if folder is not None:
                owners.setdefault(folder, []).append(name)
        for folder, names in owners.items():
            search_path.append(f"plugin {' '.join(names)}", f"{SCHEME}://{folder}")


class PluginSource(FileConfigSource):
    """A package's ``conf`` folder, for Hydra; its provider is ``plugin`` and the names of its plugins.

    ``plugin/NAME.yaml`` is there for these names alone, so that no package speaks for another one's
    plugin, and is refused where it sets anything but ``plugins.NAME``. Both happen when a recipe asks for
    the file: a package that is merely installed disturbs nobody. Other groups add options, which a user
    chooses by name.
    """

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def is_config(self, config_path: str) -> bool:
        group, _, option = config_path.removesuffix(".yaml").partition("/")
        return (group != GROUP or option in self.provider.split()[1:]) and super().is_config(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        if group == GROUP:
            knobs_in(Path(self.path), name)
        return super().load_config(config_path)


def knobs_in(folder: Path, name: str) -> dict[str, Any]:
    """The knobs in ``folder/plugin/name.yaml``, interpolations as they are written.

    Raises ``PluginError`` that names the file and the keys where it sets anything else, and ``YAMLError``.
    """
    who = f"plugin '{name}': {folder / GROUP / f'{name}.yaml'}"
    node, defaults = _read(folder, name, who)
    foreign = [*defaults, *_outside(node, (), ("plugins", name))]
    if foreign:
        rest = f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
        raise PluginError(
            f"{who} sets {', '.join(foreign[:SHOWN])}{rest}, but may set plugins.{name} alone: a plugin must "
            f"not change the rest of a run unseen. {_remedy(name)}. Whoever wants such values sets them on "
            "the command line or in an experiment's yaml"
        )
    if name not in node.get("plugins", {}):
        raise PluginError(
            f"{who} sets nothing under plugins.{name}, so no plugin would be active. {_remedy(name)}"
        )
    own = node["plugins"][name]
    if not isinstance(own, dict | None):
        raise PluginError(f"{who} must map knobs to values. {_remedy(name)}")
    return {str(knob): value for knob, value in (own or {}).items()}


def _read(folder: Path, name: str, who: str) -> tuple[dict[str, Any], list[str]]:
    """What the yaml adds to a recipe, from its root on, and the entries of its defaults list."""
    try:
        loaded = FileConfigSource(GROUP, f"file://{folder}").load_config(f"{GROUP}/{name}")
    except (OSError, ValueError) as fault:
        raise PluginError(f"{who} cannot be read: {fault}. {_remedy(name)}") from fault
    node: Any = OmegaConf.to_container(loaded.config, resolve=False)
    if not isinstance(node, dict):
        raise PluginError(f"{who} must map knobs to values. {_remedy(name)}")
    listed = node.pop("defaults", None) or []
    entries = listed if isinstance(listed, list) else [listed]
    package = (loaded.header["package"] or GROUP).removeprefix("_global_").strip(".")
    for part in reversed(package.split(".") if package else []):
        node = {part: node}
    return node, [f"defaults: {entry}" for entry in entries if entry != "_self_"]


def _outside(node: Any, at: tuple[str, ...], own: tuple[str, ...]) -> Iterator[str]:
    """Dotted keys of ``node``, which stands at ``at``, that are not in ``own``."""
    if at == own:
        return
    if isinstance(node, dict) and (node or at == own[: len(at)]):
        for key, value in node.items():
            yield from _outside(value, (*at, str(key)), own)
    else:
        yield ".".join(at)


def _remedy(name: str) -> str:
    return (
        f"Ask the plugin's author for a yaml whose first line is '# @package plugins.{name}' and that holds "
        "knobs only"
    )
