"""The conformance tests that every plugin passes, ready to subclass."""

from __future__ import annotations

import json
import math
import pickle
import threading
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from recpipe.config.compose import active_plugins, compose
from recpipe.plugin.api import Context, Contribution, Invariant, Link, Plugin
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import activate, installed
from recpipe.tasks.plugins import SAMPLE, default_knobs, points

INEXACT = frozenset({Invariant.EXACT_GRADIENT, Invariant.SAMPLE_ORDER, Invariant.BATCH_SIZE})
"""A plugin that alters one of these need not reproduce the run without it."""
SMALL = (
    "data=synthetic",
    "data.samples=2000",
    "data.table_scale=0.01",
    "data.batch_size=64",
    "model.embedding_dim=8",
    "trainer.max_steps=12",
)
"""Overrides for a run of a few seconds."""
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Trained:
    """A finished run: the content of report.json and the exported parameters, by file and array name."""

    report: Mapping[str, Any]
    parameters: Mapping[str, np.ndarray[Any, Any]]


class PluginSuite:
    """Set ``plugin`` to its entry point's name; ``overrides`` go to every run, ``tolerance`` is absolute."""

    plugin: ClassVar[str] = ""
    overrides: ClassVar[Sequence[str]] = ()
    tolerance: ClassVar[float] = 1e-5
    context: ClassVar[Context] = SAMPLE

    def make(self) -> Plugin:
        """A new plugin object with the values of its yaml."""
        return activate(self._knobs())[0][1]

    def _knobs(self) -> dict[str, dict[str, Any]]:
        return active_plugins(compose([f"+plugin={self.plugin}"]))

    @pytest.fixture
    def baseline(self, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        """The small run without the plugin; once per session for all suites with the same overrides."""
        return _trained_once((*SMALL, *self.overrides), tmp_path_factory)

    @pytest.fixture
    def trained(self, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        """The same run with it."""
        return _trained_once((*SMALL, *self.overrides, f"+plugin={self.plugin}"), tmp_path_factory)

    def test_yaml_composes_into_its_own_node(self) -> None:
        knobs = self._knobs()
        assert list(knobs) == [self.plugin], (
            f"conf/plugin/{self.plugin}.yaml lacks '# @package plugins.{self.plugin}'"
        )
        assert isinstance(self.make(), Plugin)

    def test_pickles(self) -> None:
        plugin = self.make()
        assert type(pickle.loads(pickle.dumps(plugin))) is type(plugin)

    def test_contribute_is_pure(self) -> None:
        plugin = self.make()
        first, second = plugin.contribute(self.context), plugin.contribute(self.context)
        assert outline(first) == outline(second)
        assert outline(first) == outline(self.make().contribute(self.context))

    def test_contribute_is_cheap(self) -> None:
        plugin = self.make()
        with costs() as cost:
            plugin.contribute(self.context)
        assert cost.bytes < MEGABYTE, (
            "contribute() took more than 1 MB: build later, when a part is first called"
        )
        assert cost.threads == 0, "contribute() started a thread: start work when a part is first called"

    @pytest.mark.parametrize("first", [True, False])
    def test_composes_or_conflicts_with_every_other(self, first: bool) -> None:
        mine = self._knobs()[self.plugin]
        for other, ep in installed().items():
            if other == self.plugin or not _works_alone(ep, self.context):
                continue
            pair = [(self.plugin, mine), (other, default_knobs(ep))]
            active = dict(pair if first else pair[::-1])
            try:
                assemble(gather(activate(active), self.context), self.context.tables)
            except PluginError as conflict:
                if self.plugin not in str(conflict):
                    raise

    def test_reproduces_the_run_without_it(self, baseline: Trained, trained: Trained) -> None:
        loss = trained.report["quality"]["logloss"]
        assert loss is not None
        assert math.isfinite(loss), "the run with the plugin diverged"
        if self.make().alters & INEXACT:
            return
        assert loss == pytest.approx(baseline.report["quality"]["logloss"], abs=self.tolerance)
        assert trained.parameters.keys() == baseline.parameters.keys()
        for name, value in baseline.parameters.items():
            np.testing.assert_allclose(
                trained.parameters[name], value, rtol=0, atol=self.tolerance, err_msg=name
            )

    def test_reports(self, trained: Trained) -> None:
        assert self.plugin in trained.report["plugins"]
        assert {i.name for i in self.make().alters} <= set(trained.report["altered"])
        if self.make().contribute(self.context).report:
            assert trained.report["plugins"][self.plugin], (
                "the plugin has a reporter but no figures in report.json"
            )


_RUNS: dict[tuple[str, ...], Trained] = {}


def _trained_once(overrides: tuple[str, ...], folders: pytest.TempPathFactory) -> Trained:
    if overrides not in _RUNS:
        _RUNS[overrides] = train(overrides, folders.mktemp("run"))
    return _RUNS[overrides]


def train(overrides: Sequence[str], folder: Path) -> Trained:
    """Run a recipe in this process and read back what it leaves under ``folder``."""
    from recpipe.run import run

    export = folder / "parameters"
    run(compose([*overrides, f"task.export_parameters={export}"]), folder)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return Trained(report, dict(_arrays(export)))


def _arrays(folder: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for file in sorted(folder.iterdir()):
        content = np.load(file, allow_pickle=False)
        if file.suffix == ".npz":
            yield from ((f"{file.stem}/{key}", content[key]) for key in content.files)
        else:
            yield file.stem, content


def _works_alone(ep: EntryPoint, context: Context) -> bool:
    """Whether an installed plugin can be used at all; one that cannot is its own author's to mend."""
    try:
        assemble(gather(activate({ep.name: default_knobs(ep)}), context), context.tables)
    except Exception:
        return False
    return True


def outline(contribution: Contribution) -> dict[str, Any]:
    """What two equal contributions agree on: points used, labels and order of links, claims, keys, bytes."""
    chains: dict[str, Sequence[Link[Any]]]
    chains = {"stream": contribution.stream, "batch": contribution.batch, "step": contribution.step}
    return {
        "points": points(contribution),
        "chains": {name: [(k.name, k.before, k.after) for k in links] for name, links in chains.items()},
        "cache": [(claim.tables, type(claim)) for claim in contribution.cache],
        "quantizer": type(contribution.quantizer),
        "callbacks": [type(callback) for callback in contribution.callbacks],
    }


@dataclass
class Cost:
    """What a piece of code took: peak bytes (Python, numpy and new tensors) and threads left running."""

    bytes: int = 0
    threads: int = 0


@contextmanager
def costs() -> Iterator[Cost]:
    """Measure the body; torch's allocations are seen as the sizes of the tensors that operators return."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    cost, threads = Cost(), threading.active_count()

    class Tensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            cost.bytes += sum(t.nbytes for t in tree_leaves(result) if hasattr(t, "nbytes"))
            return result

    tracemalloc.start()
    try:
        with Tensors():  # type: ignore[no-untyped-call]
            yield cost
        cost.bytes += tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    cost.threads = threading.active_count() - threads
