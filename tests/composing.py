"""Recipes in the tests' own process: what composing them from yaml gave is remembered, for it takes 0.3 s.

A recipe's groups (``data=criteo``, ``+plugin=hotline``) are composed once; values of its keys are put into a
copy by Hydra's own function, as Hydra does. With a package that a test has installed, with another folder of
yaml, and for words of Hydra's own, nothing is remembered. The command line composes anew, and so does a
process of its own (``tests.processes``), from files that are read once as long as they stay as they are.
Tests of composing itself ask for the fixture ``composed_anew``.
"""

from __future__ import annotations

import copy
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

from recpipe.config import compose as config

COMPOSE, PARSE, ENTRY_POINTS = config._composed, OverridesParser.parse_rule, importlib.metadata.entry_points
LOAD = ConfigRepository.load_config
GET_MODE = Hydra.get_mode
CONF = config.conf_dir
_bases: dict[tuple[str, ...], DictConfig] = {}
_parsed: dict[str, Override] = {}
_installed: dict[str, Any] = {}
_files: dict[tuple[object, ...], ConfigResult] = {}


def places() -> frozenset[str]:
    """Where packages are looked for, but for the current folder, which the server of ``tests.processes`` has
    in place of pytest's first one, and setuptools' own, which it adds when a library imports it."""
    return frozenset(place for place in sys.path if place and not place.endswith("setuptools/_vendor"))


PATH = places()


def remember(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` ends."""
    patch.setattr(config, "_composed", composed)
    remember_parts(patch)


def remember_parts(patch: pytest.MonkeyPatch) -> None:
    """Recipes are composed anew, of words, files and lists of what is installed that are remembered."""
    patch.setattr(OverridesParser, "parse_rule", parse_rule)
    patch.setattr(importlib.metadata, "entry_points", entry_points)
    patch.setattr(ConfigRepository, "load_config", load_config)
    patch.setattr(Hydra, "get_mode", get_mode)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Recipes are composed anew until ``patch`` ends."""
    patch.setattr(config, "_composed", COMPOSE)
    patch.setattr(OverridesParser, "parse_rule", PARSE)
    patch.setattr(importlib.metadata, "entry_points", ENTRY_POINTS)
    patch.setattr(ConfigRepository, "load_config", LOAD)
    patch.setattr(Hydra, "get_mode", GET_MODE)


@contextmanager
def settled() -> Iterator[None]:
    """Within it, recipes are remembered with what is installed now, though a test has done so."""
    global PATH
    before, PATH = PATH, places()
    _installed.clear()
    _bases.clear()
    try:
        yield
    finally:
        PATH = before
        _installed.clear()
        _bases.clear()


def composed(overrides: Sequence[str]) -> DictConfig:
    """As ``recpipe.config.compose._composed``."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:
        return COMPOSE(overrides)
    if not _as_installed() or any(map(_is_hydras, parsed)):
        return COMPOSE(overrides)
    groups = tuple(word for word, one in zip(overrides, parsed, strict=True) if not _is_value(one))
    if groups not in _bases:
        _bases[groups] = COMPOSE(groups)
    recipe = copy.deepcopy(_bases[groups])
    ConfigLoaderImpl._apply_overrides_to_config([one for one in parsed if _is_value(one)], recipe)
    return recipe


def _as_installed() -> bool:
    """Whether no test has installed a package, or put other yaml in place."""
    found = importlib.metadata.entry_points in (ENTRY_POINTS, entry_points)
    return found and _same_packages() and config.conf_dir is CONF


def _same_packages() -> bool:
    """Whether packages are found where they were found at first: a folder without any makes no difference."""
    found = places()
    return found >= PATH and not any(any(Path(place).glob("*-info")) for place in found - PATH)


def _is_hydras(override: Override) -> bool:
    """What Hydra reads itself, and what is for it alone to refuse."""
    if override.key_or_group.startswith("hydra") or override.is_sweep_override():
        return True
    return not _is_value(override) and isinstance(override.value(), dict)  # may be a group's, or a key's


def _is_value(override: Override) -> bool:
    """Of a key and no group: no group's name has a dot. Folders of checkpoints differ from test to test."""
    return "." in override.key_or_group or override.key_or_group in ("seed", "resume")


def parse_rule(parser: OverridesParser, text: str, rule: str) -> Any:
    """As ``OverridesParser.parse_rule``."""
    if rule != "override":
        return PARSE(parser, text, rule)
    if text not in _parsed:
        _parsed[text] = PARSE(parser, text, rule)
    return copy.copy(_parsed[text])


def entry_points(**chosen: Any) -> Any:
    """As ``importlib.metadata.entry_points``."""
    if chosen.keys() != {"group"} or not _same_packages():
        return ENTRY_POINTS(**chosen)
    if chosen["group"] not in _installed:
        _installed[chosen["group"]] = ENTRY_POINTS(**chosen)
    return _installed[chosen["group"]]


def load_config(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """As ``ConfigRepository.load_config``."""
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    key = None if source is None else _version(source, config_path)
    if key is None:
        return LOAD(repository, config_path)
    if key not in _files:
        _files[key] = LOAD(repository, config_path)
    return copy.deepcopy(_files[key])


def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """As ``Hydra.get_mode``, which composes the whole recipe to see whether it sets ``hydra.mode``."""
    if any("hydra" in word for word in overrides) or any("--config" in word for word in sys.argv):
        return GET_MODE(hydra, config_name, overrides)
    return None


def _version(source: ConfigSource, config_path: str) -> tuple[object, ...] | None:
    """Tells ``source``'s file from all others, and from what it was before it was changed; None: not to be
    remembered, as a package's yaml, which may be refused."""
    if source.scheme() == "pkg":  # Hydra's own
        return source.path, config_path
    if source.scheme() != "file":
        return None
    file = Path(source.path) / source._normalize_file_name(config_path)
    state = file.stat()
    return source.provider, file, state.st_mtime_ns, state.st_size
