"""Fixtures of all tests, recpipe's own and the plugins'."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recpipe.backend import calibrate
from recpipe.common.process import _LEVELS, _set_levels
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.data.sources.criteo_columns import SPARSE
from recpipe.plugin.offers import GROUPS
from recpipe.report import plots, run_page
from recpipe.testing import apart
from tests import baselines, composing, generating
from tests.arguments import leave_environment
from tests.drawing import DRAWN, leave_blank
from tests.loops import make_loops
from tests.meta import leave_undrawn
from tests.plugin.samples import FakeEntryPoint, write_package
from tests.processes import ROOT, Child, Cli
from tests.proposals import propose_few

Install = Callable[..., Path]
"""What the fixture ``install`` is."""
torch.set_num_threads(1)
"""Tests run at the same time, each in one thread. Tests of several threads ask for them."""
gc.set_threshold(20_000, 20, 20)
"""Looking for cycles took 8% of the tests' time with Python's own numbers."""


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets: RECPIPE_DATA, else ../shared/data; skips where there is none."""
    folder = Path(os.environ.get("RECPIPE_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set RECPIPE_DATA")
    return folder


@pytest.fixture(scope="session")
def criteo(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Real Criteo rows, with small tables: more collisions, the same skew, a run of a second."""
    file = data_dir / "criteo_80k.tsv.gz"
    if not file.is_file():
        pytest.skip(f"no {file}")
    recipe = {
        "name": "criteo",
        "path": str(file),
        "tables": dict.fromkeys(SPARSE, 1000),
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }
    return open_dataset(recipe, seed=1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What runs learn about data (popularity profiles) goes into a folder of this test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _made_loops(tmp_path_factory: pytest.TempPathFactory) -> None:
    """See ``tests.loops``; a test that is run by itself makes what it needs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        processes = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        make_loops(int(worker.removeprefix("gw")), processes, tmp_path_factory.getbasetemp().parent)


@pytest.fixture(autouse=True, scope="session")
def _shared_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """See ``tests.compiling``."""
    from tests import compiling  # brings torch's compiler, which pytest's first process need not import

    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        compiling.share(patch, folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def _forked_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The ranks of plugins' suites come from the server of ``tests.processes``; see ``tests.baselines``."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "PRELOAD", ["tests.preloaded"])
        baselines.share(patch, folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def _blank_plots() -> Iterator[None]:
    """See ``tests.drawing``."""
    with pytest.MonkeyPatch.context() as patch:
        leave_blank(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def _unwritten_pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """A run's page is written where the tests of a file look at one: it takes a tenth of a short run."""
    code = Path(request.module.__file__).read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        if "report.html" not in code and "run_page" not in code:
            patch.setattr(run_page, "write", lambda report, directory: directory / "report.html")
        yield


@pytest.fixture(autouse=True, scope="session")
def _few_rounds() -> Iterator[None]:
    """A back end's choices are measured once, and not in five rounds: all of them train the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "ROUNDS", 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def _undrawn_metas() -> Iterator[None]:
    """See ``tests.meta``."""
    with pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _few_proposals() -> Iterator[None]:
    """See ``tests.proposals``."""
    with pytest.MonkeyPatch.context() as patch:
        propose_few(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _quiet_libraries() -> None:
    """Runs find the levels of libraries' logs as they would set them, and put back after each."""
    _set_levels(_LEVELS)  # 20 times for each run otherwise, and each time the caches of all logs are emptied


@pytest.fixture(autouse=True, scope="session")
def _left_environment() -> Iterator[None]:
    """See ``tests.arguments``."""
    with pytest.MonkeyPatch.context() as patch:
        leave_environment(patch)
        yield


@pytest.fixture(autouse=True)
def _same_search_path() -> Iterator[None]:
    """The command line adds the current folder, and nothing is remembered of other folders' packages."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def _same_log_handlers() -> Iterator[None]:
    """Hydra's handlers write to what a test's output is caught in, which later tests do not have."""
    root = logging.getLogger()
    before = set(root.handlers)
    yield
    for added in set(root.handlers) - before:
        root.removeHandler(added)


@pytest.fixture(autouse=True, scope="session")
def _remembered_recipes() -> Iterator[None]:
    """See ``tests.composing``."""
    with pytest.MonkeyPatch.context() as patch:
        composing.remember(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _remembered_clicks() -> Iterator[None]:
    """See ``tests.generating``."""
    with pytest.MonkeyPatch.context() as patch:
        generating.remember(patch)
        yield


@pytest.fixture
def generated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clicks are drawn, each time."""
    generating.forget(monkeypatch)


@pytest.fixture
def composed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are composed from yaml, each time."""
    composing.forget(monkeypatch)


@pytest.fixture
def real_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are drawn."""
    for name, draw in DRAWN.items():
        monkeypatch.setattr(plots, name, draw)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name, yaml, code, kind)``: a package of ``write_package``, installed for this test."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    made: list[str] = []

    def make(name: str, yaml: str | None = None, code: str | None = None, kind: str = "plugin") -> Path:
        made.append(f"{name}_pkg")
        return write_package(site, name, yaml, code, kind)

    yield make
    for module in [module for module in sys.modules if module.partition(".")[0] in made]:
        del sys.modules[module]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, object], None]:
    """``offer(kind, name, part)``: as if an installed package, which has no yaml, offered ``part``."""
    real = importlib.metadata.entry_points
    parts: dict[str, list[FakeEntryPoint]] = {}

    def found(group: str | None = None) -> Any:
        if group is None:  # numba, when it first compiles
            return real()
        return [*real(group=group), *parts.get(group, ())]

    def add(kind: str, name: str, part: object) -> None:
        parts.setdefault(GROUPS[kind], []).append(FakeEntryPoint(name, part))

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    return add


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """``cli(*arguments, **environment)``: run ``python -m recpipe`` in an empty folder of its own."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return Child(tmp_path / "cli", *arguments, environment=environment).ended()

    return run
