"""Every yaml in the framework and in the plugins composes, and stays values only."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from recpipe.common.process import quieted
from recpipe.config.compose import (
    CONFIG_NAME,
    _dotted,
    _mentioning,
    active_plugins,
    compose,
    conf_dir,
)
from recpipe.plugin.conf import package_conf, package_confs
from recpipe.plugin.load import installed
from recpipe.plugin.tables import KNOBS, TableOptimizer

ROOTS = [conf_dir(), *package_confs()]
missing = object()
FILES = sorted({file for root in ROOTS for file in root.glob("*/*.yaml")})


def selected(file: Path) -> DictConfig:
    """The recipe with ``file`` chosen in its group, added where the defaults do not name the group."""
    group, option = file.parent.name, file.stem
    sign = "+" if group == "plugin" else ""
    return compose([f"{sign}{group}={option}"])


def keys(recipe: DictConfig) -> set[str]:
    return set(_dotted(OmegaConf.to_container(recipe), ""))


@pytest.fixture(scope="module")
def default() -> set[str]:
    """The keys of a recipe in which nothing is chosen."""
    return keys(compose())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_composes(file: Path, default: set[str]) -> None:
    """And errors find each option by the keys that it adds. Nothing else chooses it alone, so that it is
    composed here, if not before."""
    recipe = selected(file)
    group, option = file.parent.name, file.stem
    assert "plugin" not in recipe
    if group == "plugin":
        assert list(active_plugins(recipe)) == [option]
    elif group != "experiment":
        assert all(option in _mentioning(key, group) for key in keys(recipe) - default)


@pytest.mark.parametrize("file", sorted((conf_dir() / "optim").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_fused_optimizers_settings_are_keys(file: Path) -> None:
    """Others cannot be set on the command line."""
    known = {"name", "lr", "eps", *KNOBS[file.stem], "schedule", "clip_row_norm"}
    known -= {"eps"} if file.stem in ("sgd", "ftrl") else set()
    assert set(selected(file).optim.tables) == known
    assert known <= {field.name for field in fields(TableOptimizer)}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_holds_values_only(file: Path) -> None:
    assert "_target_" not in file.read_text(encoding="utf-8")


def test_every_plugin_has_a_yaml_with_its_own_node() -> None:
    for name, ep in installed().items():
        folder = package_conf(ep)
        assert folder is not None
        first = (folder / "plugin" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        assert first == f"# @package plugins.{name}"


def test_the_default_recipe_has_what_the_command_line_promises() -> None:
    recipe = compose()
    for key in ("seed", "resume", "task.name", "compose.prefer", "plugins"):
        assert OmegaConf.select(recipe, key, default=missing) is not missing, key
    for key in ("data.batch_size", "data.eval_fraction", "model.embedding_dim", "tiers.store"):
        assert OmegaConf.select(recipe, key) is not None, key
    for key in ("trainer.max_steps", "trainer.max_epochs", "tiers.resident_bytes", "tiers.dir"):
        assert OmegaConf.select(recipe, key, default=missing) is not missing, key
    assert (conf_dir() / f"{CONFIG_NAME}.yaml").is_file()


@pytest.mark.parametrize(
    "said",
    [
        "The version_base parameter is deprecated and will be removed in Hydra 1.5.\nOmit the ...",
        "hydra.utils.instantiate() resolved _target_='recpipe.tasks.sweeps.SweepFolder' with no\n_exec...",
        "Hydra configured Python logging without an execution whitelist. This\npreserves legacy behavior ...",
    ],
)
def test_what_hydra_1_4_says_of_1_5_is_not_shown(said: str) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with quieted():
            warnings.warn(said, stacklevel=1)
            warnings.warn("a user's own", stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["a user's own"]


@pytest.mark.usefixtures("composed_anew")
def test_the_launchers_keys_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra 1.4 warns of a second time."""
    compose()
    stored: list[object] = []
    monkeypatch.setattr(ConfigStore, "store", lambda *_, **words: stored.append(words))
    compose()
    assert stored == []
