"""The suite for a GPU: bodies of the CPU's tests with the device changed, and what only a GPU can show.

``RECPIPE_GPU_SUITE=cpu`` runs it on a CPU, without what only a GPU can show, so that a GPU's time is not
spent on mistakes that have nothing to do with CUDA; tests/emulated_gpu/run.sh on an emulated GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from recpipe.common.device import same_bits, use_device
from recpipe.data.config import SyntheticConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from tests.any_model import test_matrix, zoo
from tests.pretend_gpu import cuda
from tests.tables import samples
from tests.training import test_trainer

HERE = Path(__file__).parent
WHERE = os.environ.get("RECPIPE_GPU_SUITE", "cuda")
"""cuda; or to try the suite itself, cpu, or pretend: tests/pretend_gpu in the GPU's place."""
if WHERE == "pretend":
    cuda.install()
WORDS = (f"trainer.device={'cpu' if WHERE == 'cpu' else 'cuda'}", "trainer.deterministic=true")
"""Words of every recipe here."""
ELSEWHERE = {
    "het": "het keeps its caches in host memory and refuses a GPU (test_runs.py)",
}
"""Techniques of the shared bodies that have no part on a GPU."""
NOT_PRETENDED = {
    "TestNeo": "DistributedDataParallel makes gradients where the pretended GPU does not look",
    "test_a_comparison_ends_with_a_table": "its rows are processes from the beginning, which do not pretend",
}
"""Tests that cannot run on the pretended GPU, by a part of their name, and why."""
NOT_EMULATED = {
    "test_a_recording_that_cuda_gives_up": "its stand-in for graphs records everything",
    "test_a_wrong_index_ends_the_process": "FBGEMM's check of the CPU raises an error instead",
    "test_stochastic_rounding_keeps_steps": "FBGEMM's kernels of the CPU round to the nearest",
}
"""Of those of the emulated one (tests/emulated_gpu)."""
LONG = ("test_a_comparison_ends_with_a_table", "test_races.py")
"""Tests that start processes from the beginning and take a minute, by a part of their name, longest first."""
LACKING = NOT_PRETENDED if WHERE == "pretend" else NOT_EMULATED if "EMULATED_GPU" in os.environ else {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: shows what only a GPU can show")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the suite, say why a test of it cannot run here, and begin with the long ones."""
    absent = WHERE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        technique = getattr(item, "callspec", None) and item.callspec.params.get("technique")
        if absent:
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or not asked for (-m gpu)"))
        elif WHERE != "cuda" and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="only a GPU can show it"))
        elif why := [w for n, w in LACKING.items() if n in item.nodeid]:
            item.add_marker(pytest.mark.skip(reason=why[0]))
        elif technique in ELSEWHERE:
            item.add_marker(pytest.mark.skip(reason=ELSEWHERE[technique]))
    if not absent:
        here = [item for item in items if item.path.is_relative_to(HERE)]
        long = [item for name in LONG for item in here if name in item.nodeid]
        items[:] = [item for item in items if item not in long]
        for number, item in enumerate(long):  # pytest-xdist gives each process two tests to begin with
            items.insert(2 * number, item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After an illegal access nothing works in this process any more: it ends with that test's error, and
    pytest-xdist goes on with a new one."""
    report = yield
    if report.failed and WHERE == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            print(f"{report.nodeid}\n{report.longreprtext}", file=sys.__stderr__, flush=True)
            os._exit(1)
    return report


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the suite runs."""
    return torch.device("cpu") if WHERE == "cpu" else torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _there(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables, batches and recipes of the shared bodies are on ``device``, with bits that do not change from
    run to run."""
    use_device(device)
    monkeypatch.setattr(samples, "HERE", device)
    monkeypatch.setattr(test_trainer, "SMALL", (*test_trainer.SMALL, *WORDS))
    for name, words in zoo.OVERRIDES.items():
        monkeypatch.setitem(zoo.OVERRIDES, name, (*words, *WORDS))
    # A loop by hand on a CPU adds in another order than a GPU's matrix products do.
    monkeypatch.setattr(test_matrix, "BOUND", dict.fromkeys(test_matrix.BOUND, 2e-5))
    with same_bits(True, device):
        yield


@pytest.fixture(scope="session")
def criteo() -> Dataset:
    """Generated clicks with 26 features, in place of real rows, which a GPU machine may lack."""
    return open_dataset(SyntheticConfig(samples=6000, table_scale=0.02), seed=1)
