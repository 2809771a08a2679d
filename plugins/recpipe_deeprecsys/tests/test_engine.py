"""How requests become batches."""

from __future__ import annotations

import pytest
from recpipe_deeprecsys.engine import Batching, Queue


def nothing() -> None:
    pass


def taken(queue: Queue) -> list[list[int]]:
    """The sizes of the parts of each batch, until nothing waits."""
    found = []
    while queue.parts:
        found.append([part.size for part in queue.take()])
    return found


@pytest.mark.parametrize(("size", "most"), [(1, 1), (164, 128), (1024, 100), (7, 512)])
def test_parts_are_equal_and_cover_the_request(size: int, most: int) -> None:
    queue = Queue(Batching(most))
    queue.put((5, 5 + size), nothing, 0.0)
    parts = []
    while queue.parts:
        (part,) = queue.take()
        parts.append(part.range)
    lengths = [high - low for low, high in parts]
    assert [n for low, high in parts for n in range(low, high)] == list(range(5, 5 + size))
    assert len(parts) == -(-size // most)
    assert queue.size == 0
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1


def test_what_waits_is_put_together_up_to_the_batch() -> None:
    queue = Queue(Batching(100))
    for size in (60, 30, 20, 250):
        queue.put((0, size), nothing, 0.0)
    assert taken(queue) == [[60, 30], [20], [84], [83], [83]]


def test_without_merging_a_batch_is_a_part_of_one_request() -> None:
    queue = Queue(Batching(100, merge=False))
    for size in (60, 30, 150):
        queue.put((0, size), nothing, 0.0)
    assert taken(queue) == [[60], [30], [75], [75]]


def test_a_batch_that_is_not_full_waits_for_the_rest_of_its_time() -> None:
    queue = Queue(Batching(100, wait_ms=5))
    assert queue.due(0.0) is None
    queue.put((0, 60), nothing, 1.0)
    assert queue.due(1.002) == pytest.approx(0.003)
    due = queue.due(1.006)
    assert due is not None
    assert due <= 0
    queue.put((0, 40), nothing, 1.002)
    assert queue.due(1.002) == 0.0
    assert taken(queue) == [[60, 40]]
    hasty = Queue(Batching(100))
    hasty.put((0, 60), nothing, 1.0)
    assert hasty.due(1.0) == 0.0
