"""The conformance suite's judgements, one by one; ``test_cheats`` runs it whole over plugins that cheat."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from recpipe.plugin.api import Contribution, Invariant, Link
from recpipe.plugin.context import Context
from recpipe.plugin.load import installed
from recpipe.plugin.splitter import Split, Splitter
from recpipe.tasks.plugins import listed
from recpipe.testing import PluginSuite, Trained
from recpipe.testing import suite as checks
from recpipe.testing.judgements import idle
from recpipe.testing.watch import Record
from tests.plugin.samples import Good


class Suite(PluginSuite):
    """Not collected (no Test in its name): its tests are called one by one."""

    plugin = "bad"
    made: type[Good] = Good

    def make(self) -> Good:
        return self.made()


def suite(cls: type[Good]) -> Suite:
    made = Suite()
    made.made = cls
    return made


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
    with pytest.raises(AssertionError, match="'bad': the held-out logloss is 0.501, and 0.5"):
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
    monkeypatch.setattr(checks, "installed", lambda: found)

    class Poisoned(PluginSuite):
        plugin = "poison"

    for first in (True, False):
        Poisoned().test_composes_or_conflicts_with_every_other(first)
    assert listed(found["broken"]).fault
    assert not listed(found["poison"]).fault


class Whole(Splitter):
    def split(self, batch, needs_cold) -> Split:
        return Split(np.arange(len(needs_cold)), (len(needs_cold),))


class FakeStep:
    """A batch that was not cut, and what it moved."""

    bounds = ()

    def __init__(self, placed: list[int], evicted: list[int]) -> None:
        self.moves = [{"placed": np.array(placed), "evicted": np.array(evicted)}]


@pytest.mark.parametrize(
    ("step", "parts", "said"),
    [
        (
            FakeStep([1], [2]),
            Contribution(splitter=Whole()),
            "cut none of 1 batches under tiers.policy=lfu",
        ),
        (FakeStep([1], [2]), Contribution(splitter=Whole()), '"tiers.resident_bytes=60%"'),
        (
            FakeStep([], []),
            Contribution(),
            "placed no row in 1 batches under .*tiers.resident_bytes=30%; set knobs",
        ),
        (
            FakeStep([1], [-1]),
            Contribution(),
            "a smaller budget, overrides = .*resident_bytes=10%.*pins = True",
        ),
    ],
)
def test_what_had_nothing_to_do_is_told_the_remedy(step: FakeStep, parts: Contribution, said: str) -> None:
    run = trained([1.0])
    run.record.steps.append(step)
    report = {
        "recipe": {"tiers": {"policy": "lfu", "resident_bytes": "30%"}},
        "assembly": {"tiers": {"groups": [{"cache": "bad"}]}},
    }
    [fault] = idle("bad", parts, Trained(report, run.parameters, run.record), pins=False)
    assert re.search(said, fault)
    assert not list(idle("bad", Contribution(), Trained(report, {}, Record()), pins=False))
