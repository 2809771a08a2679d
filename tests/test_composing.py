"""``tests.composing``: a remembered recipe is the one that Hydra composes, and so is what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigLoadError

from recpipe.config import compose as config
from recpipe.config.compose import compose
from recpipe.errors import UserError
from tests import composing

RECIPES = (
    ["data=criteo", "data.path=x", "seed=3", "resume=there", "optim=sgd", "+optim.dense.eps=1e-3"],
    ["+plugin=[hotline,bagpipe]", "compose.prefer.order=hotline", "++data.tables=null", "~trainer.logger"],
    ["data.batch_size=${size}", "+size=77", "data.tables={a: 3, b/c: 8}", "plugins={}"],
)
MISTAKES = (["trainer.max_stepz=1"], ["data.samples=1,2"], ["data=nope"], ["seed@a=3"], ["trainer.x=[1"])


def said(words: Sequence[str]) -> str:
    with pytest.raises(UserError) as refused:
        compose(words)
    return str(refused.value)


@pytest.mark.parametrize("words", RECIPES, ids=" ".join)
def test_recipes_are_equal(words: Sequence[str], request: pytest.FixtureRequest) -> None:
    remembered = [compose(words), compose(words)]
    remembered[0].seed = 100
    request.getfixturevalue("composed_anew")
    assert remembered[1] == compose(words) != remembered[0]
    with pytest.raises(UserError, match="no 'sead' in the recipe"):
        compose([*words, "sead=1"])


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_are_equal(words: Sequence[str], request: pytest.FixtureRequest) -> None:
    first = said(words)
    request.getfixturevalue("composed_anew")
    assert said(words) == first


def test_what_a_test_installs_is_not_remembered(install: Callable[..., object]) -> None:
    before = set(composing._bases)
    install("acme")
    assert list(config.active_plugins(compose(["+plugin=acme", "seed=1"]))) == ["acme"]
    assert set(composing._bases) == before


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("k: 1\n")
    source = FileConfigSource("mine", str(tmp_path))
    source.load_config("a").config.k = 7
    assert source.load_config("a").config.k == 1
    (tmp_path / "a.yaml").write_text("k: 22\n")
    assert source.load_config("a.yaml").config.k == 22
    (tmp_path / "a.yaml").unlink()
    with pytest.raises(ConfigLoadError, match="not found"):
        source.load_config("a")
