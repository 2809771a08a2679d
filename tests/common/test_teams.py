"""Loops whose parts the threads of torch's operators take."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recpipe.common import teams
from recpipe.common.device import using_threads
from recpipe.common.loops import compiled, cut


@compiled
def scaled(
    numbers: NDArray[np.float32],
    counts: NDArray[np.int64],
    by: int,
    less: bool,
    out: NDArray[np.float32],
    low: int,
    high: int,
) -> None:
    """Numbers times counts and ``by``, minus 1 if ``less``."""
    for n in range(low, high):
        out[n] = numbers[n] * counts[n] * by - (1 if less else 0)


@compiled
def refusing(numbers: NDArray[np.float32], low: int, high: int) -> None:
    """Adds one, but has no memory for the part that ends at the end."""
    if high == len(numbers):
        raise MemoryError
    for n in range(low, high):
        numbers[n] += 1


def given(length: int = 1000) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    random = np.random.default_rng(1)
    numbers = random.standard_normal(length).astype(np.float32)
    return numbers, random.integers(9, size=length), np.zeros(length, np.float32)


@pytest.mark.parametrize("by_torch_s_threads", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_part_is_computed_once(monkeypatch, threads: int, by_torch_s_threads: bool) -> None:
    if not by_torch_s_threads:
        monkeypatch.setattr(teams, "_parallel", lambda: None)
    numbers, counts, out = given()
    for less in (True, False):
        teams.share_out(scaled, (numbers, counts, 3, less, out), cut(len(out), 100, threads))
        exact = numbers.astype(np.float64) * counts * 3 - less
        assert np.array_equal(out, exact.astype(np.float32))


def test_no_thread_is_begun_where_torch_has_some() -> None:
    """They are those of OpenMP, which torch's operators run on, and no thread of Python's."""
    assert teams._parallel() is not None
    numbers, counts, out = given()
    with using_threads(2):
        torch.randn(1 << 16).exp_()
        before = threading.active_count()
        teams.share_out(scaled, (numbers, counts, 1, False, out), [0, 500, 1000])
        assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numba says it, too
def test_a_part_that_has_no_memory_is_an_error() -> None:
    numbers = np.zeros(100, np.float32)
    with pytest.raises(MemoryError, match="refusing: no memory for 2 threads"):
        teams.share_out(refusing, (numbers,), [0, 50, 100])
    assert (numbers == np.repeat([1, 0], 50)).all(), "the other part is done"


@pytest.mark.parametrize(("length", "least", "most"), [(0, 5, 2), (9, 5, 2), (10, 5, 2), (1000, 1, 3)])
def test_parts_are_not_small(length: int, least: int, most: int) -> None:
    ends = cut(length, least, most)
    assert (ends[0], ends[-1], len(ends) - 1) == (0, length, max(1, min(most, length // least)))
    assert len(ends) == 2 or min(np.diff(ends)) >= least
