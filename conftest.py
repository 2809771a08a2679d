"""Fixtures and settings of all tests, recpipe's own and the plugins'."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recpipe.common.process import calm_threads
from tests.hidden_gpus import hide_gpus

gc.disable()  # until all is imported and collected
calm_threads()  # before torch is imported, as the command line does
hide_gpus(sys.argv)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job, which has no Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Every index into a table is checked: FBGEMM raises an error instead of reading foreign memory (0: FATAL).
os.environ.setdefault("FBGEMM_TBE_BOUNDS_CHECK_MODE", "0")
# What is compiled once stays for later runs of the tests, whose other caches are new each time.
for variable, folder in (("NUMBA_CACHE_DIR", "numba"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
    os.environ.setdefault(variable, str(Path(__file__).parent / ".pytest_cache" / folder))
# torch believes the processor, and does not compile a program for each of its instruction sets to see.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Several tests run at once, each of which the others disturb; what one has measured serves all.
os.environ.setdefault("RECPIPE_BUSY", "keep")

import torch  # noqa: E402

from recpipe.common.process import keep_all  # noqa: E402
from recpipe.data.dataset import Dataset  # noqa: E402
from recpipe.data.make import open_dataset  # noqa: E402
from recpipe.data.sources.criteo_columns import SPARSE  # noqa: E402
from recpipe.plugin.offers import GROUPS  # noqa: E402
from recpipe.report import plots  # noqa: E402
from recpipe.testing import apart  # noqa: E402
from tests import composing, generating  # noqa: E402
from tests.arguments import leave_environment  # noqa: E402
from tests.drawing import DRAWN, leave_blank  # noqa: E402
from tests.loops import make_loops  # noqa: E402
from tests.meta import leave_undrawn  # noqa: E402
from tests.plugin.samples import FakeEntryPoint, write_package  # noqa: E402
from tests.processes import ROOT, Child, Cli  # noqa: E402

Install = Callable[..., Path]
"""What the fixture ``install`` is."""
torch.set_num_threads(1)
"""Tests run at the same time, each in one thread. Tests of several threads ask for them."""
gc.set_threshold(20_000, 20, 20)
"""Looking for cycles took 8% of the tests' time with Python's own numbers."""

LONG = (
    "tests/plugin/test_cheats.py",
    "tests/answers/test_package.py",
    "tests/plugin/test_pages.py",
    "plugins/recpipe_slipstream/tests/test_plugin.py",
    "tests/test_api.py",
    "tests/tasks/test_compare.py",
    "plugins/recpipe_hotline/tests/test_plugin.py",
    "tests/training/test_trainer.py",
    "plugins/recpipe_het/tests/test_het_plugin.py",
    "tests/distributed/test_torchrun.py",
    "plugins/recpipe_slipstream/tests/test_filter.py",
    "plugins/recpipe_neo/tests/test_neo_ranks.py",
    "plugins/recpipe_neo/tests/test_neo_plugin.py",
    "tests/any_model/test_matrix.py",
    "plugins/recpipe_perf_model/tests/test_advise.py",
    "tests/tasks/test_sweep.py",
    "plugins/recpipe_low_precision/tests/test_layers.py",
    "tests/test_cli.py",
    "plugins/recpipe_low_precision/tests/test_low_precision.py",
    "tests/any_model/test_sharded.py",
    "plugins/recpipe_sdm/tests/test_scorer.py",
    "tests/answers/test_sequences.py",
    "tests/test_packaging.py",
    "tests/test_pretend_gpu.py",
    "tests/any_model/test_weighing.py",
    "tests/any_model/test_frozen.py",
)
"""Files that take 13 s and more of a core, the longest first."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first: one that came last would be waited for by one process, the others idle."""
    order = {ROOT / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        # What a plugin's suite leaves to soak, with what holds it in the default run.
        if isinstance(item, pytest.Function) and item.originalname in getattr(item.cls, "soak", ()):
            item.add_marker("soak")


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the garbage collector need not look at it again and again."""
    keep_all()
    gc.enable()


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
def _forked_ranks() -> Iterator[None]:
    """The ranks of plugins' suites come from the server of ``tests.processes``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "PRELOAD", ["tests.preloaded"])
        yield


@pytest.fixture(autouse=True, scope="session")
def _blank_plots() -> Iterator[None]:
    """See ``tests.drawing``."""
    with pytest.MonkeyPatch.context() as patch:
        leave_blank(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _undrawn_metas() -> Iterator[None]:
    """See ``tests.meta``."""
    with pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        yield


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
