"""The conformance suite must fail a plugin that breaks its word; test_packaging runs one that keeps it."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from recpipe import testing
from recpipe.plugin.api import Context, Contribution, Invariant, Link
from recpipe.plugin.load import installed
from recpipe.tasks.plugins import describe
from recpipe.testing import PluginSuite, Trained
from tests.plugin.samples import Good


class Suite(PluginSuite):
    """Not collected (no Test in its name): its tests are called one by one."""

    plugin = "bad"
    made: type[Good] = Good

    def make(self) -> Good:
        return self.made()


def suite(cls: type[Good]) -> Suite:
    checks = Suite()
    checks.made = cls
    return checks


class Fickle(Good):
    calls = 0

    def contribute(self, ctx: Context) -> Contribution:
        Fickle.calls += 1
        return Contribution(batch=[Link(abs, str(n)) for n in range(Fickle.calls)])


class Greedy(Good):
    def contribute(self, ctx: Context) -> Contribution:
        import torch

        torch.zeros(1 << 20)
        return Contribution()


class Eager(Good):
    def contribute(self, ctx: Context) -> Contribution:
        threading.Thread(target=threading.Event().wait, args=(0.5,)).start()
        return Contribution()


def test_fickle_contributions_fail() -> None:
    with pytest.raises(AssertionError):
        suite(Fickle).test_contribute_is_pure()
    suite(Good).test_contribute_is_pure()


@pytest.mark.parametrize(("cls", "message"), [(Greedy, "more than 1 MB"), (Eager, "started a thread")])
def test_costly_contributions_fail(cls: type[Good], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        suite(cls).test_contribute_is_cheap()
    suite(Good).test_contribute_is_cheap()


def trained(weights: Sequence[float], logloss: float = 0.5, figures: object = 1) -> Trained:
    report = {
        "quality": {"logloss": logloss},
        "plugins": {"bad": {"a": figures} if figures else {}},
        "altered": [],
    }
    return Trained(report, {"C1": np.array(weights)})


def test_a_silent_change_of_the_parameters_fails() -> None:
    suite(Good).test_reproduces_the_run_without_it(trained([1.0, 2.0]), trained([1.0, 2.0]))
    with pytest.raises(AssertionError, match="C1"):
        suite(Good).test_reproduces_the_run_without_it(trained([1.0, 2.0]), trained([1.0, 2.0001]))
    with pytest.raises(AssertionError):
        suite(Good).test_reproduces_the_run_without_it(trained([1.0]), trained([1.0], logloss=0.501))


def test_a_declared_change_passes_unless_it_diverges() -> None:
    class Declared(Good):
        alters = frozenset({Invariant.EXACT_GRADIENT})

    suite(Declared).test_reproduces_the_run_without_it(trained([1.0]), trained([2.0], logloss=0.6))
    with pytest.raises(AssertionError, match="diverged"):
        suite(Declared).test_reproduces_the_run_without_it(
            trained([1.0]), trained([1.0], logloss=float("nan"))
        )


def test_figures_and_alterations_must_arrive() -> None:
    class Reports(Good):
        def contribute(self, ctx: Context) -> Contribution:
            return Contribution(report=[lambda run: {"a": 1}])

    class Alters(Good):
        alters = frozenset({Invariant.ID_SPACE})

    suite(Reports).test_reports(trained([1.0]))
    with pytest.raises(AssertionError, match="no figures"):
        suite(Reports).test_reports(trained([1.0], figures=None))
    with pytest.raises(AssertionError):
        suite(Alters).test_reports(trained([1.0]))


@pytest.fixture
def poison(install) -> None:
    """An installed plugin that flips labels without saying so."""
    code = """
from recpipe import Contribution, Link, Plugin
class P(Plugin):
    api = (2, 0)
    def contribute(self, ctx):
        return Contribution(batch=[Link(self.flip)])
    def flip(self, batch):
        batch.labels = 1 - batch.labels
        return batch
"""
    install("poison", "# @package plugins.poison\n{}\n", code)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("yaml", "code"),
    [
        ("# @package _global_\ntiers: {resident_bytes: 100%}\nplugins: {broken: {}}\n", "Contribution()"),
        ("# @package plugins.broken\n{}\n", None),
        ("# @package plugins.broken\nknob: [\n", None),
        ("# @package plugins.broken\n{}\n", "1 / 0"),
    ],
)
def test_a_broken_package_of_others_fails_nobodys_suite(install, monkeypatch, yaml, code) -> None:
    imports = "from recpipe import Contribution, Plugin\n"
    plugin = f"{imports}class P(Plugin):\n    def contribute(self, ctx): return {code}\n"
    install("broken", yaml, code and plugin)
    found = {name: ep for name, ep in installed().items() if name in ("broken", "poison")}
    monkeypatch.setattr(testing, "installed", lambda: found)

    class Poisoned(PluginSuite):
        plugin = "poison"

    for first in (True, False):
        Poisoned().test_composes_or_conflicts_with_every_other(first)
    assert describe(found["broken"]).fault
    assert not describe(found["poison"]).fault


@pytest.mark.slow
@pytest.mark.usefixtures("poison")
def test_a_real_run_that_differs_fails(tmp_path: Path) -> None:
    from recpipe.testing import SMALL, train

    assert "poison" in {ep.name for ep in importlib.metadata.entry_points(group="recpipe.plugins")}

    class Poisoned(PluginSuite):
        plugin = "poison"

    baseline, again = train(SMALL, tmp_path / "a"), train(SMALL, tmp_path / "b")
    poisoned = train([*SMALL, "+plugin=poison"], tmp_path / "c")
    checks = Poisoned()
    checks.test_yaml_composes_into_its_own_node()
    checks.test_reproduces_the_run_without_it(baseline, again)
    with pytest.raises(AssertionError):
        checks.test_reproduces_the_run_without_it(baseline, poisoned)
