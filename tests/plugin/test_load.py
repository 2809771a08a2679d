"""Finding, importing and constructing plugins, and every way that fails."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from recpipe.plugin import load
from recpipe.plugin.api import API, Invariant
from recpipe.plugin.calls import Origin
from recpipe.plugin.errors import (
    PluginConflict,
    PluginError,
    PluginLoadError,
    PluginNotFound,
    PluginVersionError,
)
from tests.plugin.samples import FakeEntryPoint, Good, Relies, Shuffles, entry_points


class Old(Good):
    api = (0, 9)


class New(Good):
    api = (API[0], API[1] + 1)


class NeedsOldTorchRec(Good):
    torchrec = "<1.0"


class BadRange(Good):
    torchrec = "about 1.8"


@pytest.mark.parametrize(
    ("cls", "fault", "message"),
    [
        (int, PluginLoadError, "not a subclass of recpipe.Plugin"),
        (
            Old,
            PluginVersionError,
            f"plugin API 0.9; this recpipe speaks {API[0]}.{API[1]}. Upgrade: pip install -U recpipe-acme",
        ),
        (New, PluginVersionError, "pip install -U recpipe$"),
        (
            NeedsOldTorchRec,
            PluginVersionError,
            "needs torchrec <1.0, but .* is installed: see recpipe doctor",
        ),
        (BadRange, PluginLoadError, "'about 1.8' is not a version range"),
    ],
)
def test_misfits(cls: type, fault: type[Exception], message: str) -> None:
    with pytest.raises(fault, match=message):
        load.load("acme", entry_points(acme=cls))


def test_import_failure_keeps_its_cause() -> None:
    broken = FakeEntryPoint("acme", fault=ImportError("no module named fbgemm_gpu"))
    with pytest.raises(
        PluginLoadError, match="cannot be imported from .*ImportError: no module named"
    ) as caught:
        load.load("acme", {"acme": broken})  # type: ignore[dict-item]
    assert isinstance(caught.value.__cause__, ImportError)


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(
        PluginNotFound, match="no plugin 'hotlin'. Did you mean 'hotline'\\? Installed: hotline"
    ):
        load.load("hotlin", entry_points(hotline=Good))


def test_two_distributions_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = FakeEntryPoint("acme", dist="one"), FakeEntryPoint("acme", dist="two")
    two.value = "other:P"
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [one, two])
    said = r"named 'acme': one and two. Leave one out: '\+block=\[two\]', or pip uninstall two"
    with pytest.raises(PluginConflict, match=said):
        load.load("acme")
    two.dist.name = "recpipe"
    with pytest.raises(PluginConflict, match=r"block=\[one\]', or pip uninstall one"):
        load.load("acme")
    monkeypatch.setenv("RECPIPE_BLOCK", "other, One")
    assert load.installed() == {"acme": two}
    monkeypatch.setenv("RECPIPE_BLOCK", "acme")
    with pytest.raises(PluginNotFound, match="no plugin 'acme', which is blocked"):
        load.load("acme")


def test_whole_plugin_facts() -> None:
    class Needs(Good):
        requires = ("hotline",)

    class Rejects(Good):
        conflicts = ("b",)

    load.check_together({"a": Good(), "b": Shuffles()})
    with pytest.raises(
        PluginConflict, match=r"'a' relies on this: samples reach the model in the order.*'b' alters"
    ):
        load.check_together({"a": Relies(), "b": Shuffles()})
    with pytest.raises(PluginConflict, match=r"'a' needs 'hotline': add it, \+plugin=\[hotline,a\]"):
        load.check_together({"a": Needs()})
    with pytest.raises(PluginConflict, match="'a' and 'b' cannot run together"):
        load.check_together({"a": Rejects(), "b": Good()})


class ByKnob(Good):
    """Its class says one thing of each fact, its knob another."""

    alters = frozenset({Invariant.SAMPLE_ORDER})
    relies_on = frozenset({Invariant.ID_SPACE})
    requires = ("absent",)
    conflicts = ("other",)

    def __init__(self, **facts: object) -> None:
        for fact in ("alters", "relies_on", "requires", "conflicts"):
            setattr(self, fact, facts.get(fact, frozenset()))


@pytest.mark.parametrize(
    ("facts", "other", "message"),
    [
        ({}, Relies, None),
        ({"alters": {Invariant.SAMPLE_ORDER}}, Relies, "'other' relies on this: samples.*'acme' alters"),
        ({"relies_on": {Invariant.SAMPLE_ORDER}}, Shuffles, "'acme' relies on this: samples"),
        ({"requires": ["absent"]}, Good, "'acme' needs 'absent'"),
        ({"conflicts": {"other": "no room"}}, Good, r"cannot run together \(no room\)"),
    ],
)
def test_facts_are_those_of_the_plugin_object(monkeypatch, facts, other, message) -> None:
    monkeypatch.setattr(load, "installed", lambda: entry_points(acme=ByKnob, other=other))
    monkeypatch.setattr(load, "check_knobs", lambda *_: None)
    recipe = {"acme": facts, "other": {}}
    if message is None:
        assert [origin.plugin for origin, _ in load.activate(recipe)] == ["acme", "other"]
        return
    with pytest.raises(PluginConflict, match=message):
        load.activate(recipe)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"alpa": 1},
            "plugins.acme.alpa: no such knob. Did you mean 'alpha'\\? acme has: alpha, rows, names",
        ),
        ({"alpha": "high"}, "plugins.acme.alpha=high: must be float, not str"),
        ({"alpha": True}, "must be float, not bool"),
        ({"rows": 1.5}, "plugins.acme.rows=1.5: must be int or null, not float"),
        ({"names": "abc"}, "must be a list.*not str"),
        ({"alpha": 2.0}, r"acme \(.*\) refuses its knobs \(plugins.acme\): alpha must be at most 1"),
    ],
)
def test_wrong_knobs(monkeypatch: pytest.MonkeyPatch, knobs: dict[str, object], message: str) -> None:
    monkeypatch.setattr(load, "installed", lambda: entry_points(acme=Good))
    with pytest.raises(PluginError, match=message):
        load.instantiate("acme", knobs)


def test_right_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "installed", lambda: entry_points(acme=Good, other=Good))
    plugin = load.instantiate("acme", {"alpha": 1, "rows": None, "names": ["a", "b"]})
    assert isinstance(plugin, Good)
    active = load.activate({"other": {}, "acme": {"alpha": 0.1}})
    assert [origin for origin, _ in active] == [
        Origin("other", "recpipe-acme", "2.3.0"),
        Origin("acme", "recpipe-acme", "2.3.0"),
    ]


def test_required_knob_without_value(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wants(Good):
        def __init__(self, *, rows: int) -> None:
            self.rows = rows

    monkeypatch.setattr(load, "installed", lambda: entry_points(acme=Wants))
    with pytest.raises(PluginError, match=r"plugins.acme.rows has no value: set it"):
        load.instantiate("acme", {})


def test_the_api_does_not_import_torch() -> None:
    imported = "recpipe.plugin.assembly, recpipe.config.compose, recpipe.cli"
    code = f"import sys, {imported}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
