"""Which of pytest's arguments let tests see a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tests.hidden_gpus import asks_for_a_gpu, hide_gpus


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ([], False),
        (["-m", "not soak"], False),
        (["-m", "not gpu"], False),
        (["tests/test_gpu_benchmark.py", "-k", "gpu"], False),
        (["-m", "gpu"], True),
        (["-mgpu", "-n", "4"], True),
        (["-m", "cuda and gpu"], True),
        (["tests/gpu/test_waits.py::test_a"], True),
    ],
)
def test_the_suite_for_a_gpu_is_asked_for(words: list[str], asks: bool) -> None:
    assert asks_for_a_gpu(["/site/pytest/__main__.py", *words]) == asks


def test_gpus_are_hidden_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of pytest-xdist does not decide by its own arguments, which are not pytest's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    hide_gpus([])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    hide_gpus(["-m", "gpu"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    hide_gpus([])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_this_run_sees_none() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()
