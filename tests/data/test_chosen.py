"""Batches chosen at random: each at most once, in order, and neighbours from one read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recpipe.data.dataset import chosen_batches


class Reads:
    """Ten batches that are their own numbers; ``at``: where reading began, and ``read``: how many came."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.read = 0

    def __call__(self, first: int) -> Iterator[int]:
        self.at.append(first)
        for number in range(first, 10):
            self.read += 1
            yield number


@pytest.mark.parametrize("count", [0, 1, 4, 7, 10])
def test_each_is_read_once_and_neighbours_together(count: int) -> None:
    reads = Reads()
    found = list(chosen_batches(reads, 10, count, seed=3))
    assert found == sorted(set(found))
    assert len(found) == reads.read == count
    assert reads.at == [number for number in found if number - 1 not in found]


def test_the_seed_decides() -> None:
    first, again, other = (list(chosen_batches(Reads(), 10, 4, seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_of_no_batches_there_are_none() -> None:
    assert list(chosen_batches(Reads(), 0, 0, seed=3)) == []
