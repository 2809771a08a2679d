"""Reading ahead: the same batches, faults in their places, a bound on what is read, a thread that ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from recpipe.data.config import SyntheticConfig
from recpipe.data.make import open_dataset
from recpipe.pipeline.source import read_ahead
from recpipe.plugin.batch import Batch


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("recpipe-reader")]


@pytest.fixture
def batches() -> list[Batch]:
    return list(open_dataset(SyntheticConfig(samples=90, eval_fraction=0.0), 1).batches("train", 10))


@pytest.mark.parametrize("depth", [1, 2, 5, 50])
def test_the_same_batches_in_order(batches, depth):
    got = list(read_ahead(iter(batches), depth))
    assert len(got) == len(batches)
    assert all(one is other for one, other in zip(got, batches, strict=True))
    assert not readers()


@pytest.mark.parametrize("depth", [1, 3, 20])
def test_a_fault_comes_out_after_the_batches_before_it(batches, depth):
    def failing() -> Iterator[Batch]:
        yield from batches[:4]
        raise ZeroDivisionError("row 41")

    source = read_ahead(failing(), depth)
    assert [next(source) is batch for batch in batches[:4]] == [True] * 4
    with pytest.raises(ZeroDivisionError, match="row 41"):
        next(source)
    assert not readers()


def test_no_more_than_depth_are_read_in_advance_and_leaving_ends_the_thread(batches):
    read: list[int] = []

    def counted() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            read.append(number)
            yield batch

    source = read_ahead(counted(), 3)
    assert not read, "nothing is read before the first batch is asked for"
    next(source)
    deadline = time.monotonic() + 5
    while len(read) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert read == [0, 1, 2, 3]
    source.close()
    assert not readers()
    assert len(read) == 4
