"""Work on tables beside the training thread: the same rows, whoever is faster."""

from __future__ import annotations

import threading
from time import sleep
from typing import ClassVar

import lightning as L
import pytest
import torch

from recpipe.common.device import using_threads
from recpipe.data.dataset import Dataset
from recpipe.pipeline import batch as beside
from recpipe.pipeline.batch import TableWorkers
from recpipe.tables.group_rows import GroupRows
from tests.any_model.runs import train
from tests.any_model.zoo import TECHNIQUES, Events, Trained, events, make


@pytest.fixture(scope="module")
def batches(criteo: Dataset) -> list[Events]:
    return events(criteo, 6)


@pytest.fixture
def always(monkeypatch) -> None:
    """Threads are begun for all work."""
    monkeypatch.setattr(beside, "WORTH", -1.0)


@pytest.fixture
def threads(always):
    made = TableWorkers(1)
    yield made
    made.close()


def two_towers(batches: list[Events], *words: str) -> Trained:
    with using_threads(2):
        return train(make("two_tower"), batches, "rowwise_adagrad", "trainer.max_epochs=2", *words)


def same(left: Trained, right: Trained) -> bool:
    pairs = [(left.parameters, right.parameters), (left.states, right.states)]
    return all(torch.equal(mine[name], theirs[name]) for mine, theirs in pairs for name in theirs)


@pytest.mark.parametrize(
    "technique",
    [
        # The others move rows as these do.
        pytest.param(each, marks=[pytest.mark.soak] * (each not in ("resident", "lru_ssd", "hotline", "het")))
        for each in TECHNIQUES
    ],
)
def test_tables_beside_each_other_train_as_one_after_the_other(
    batches, monkeypatch, always, technique
) -> None:
    words, updated_in = TECHNIQUES[technique], set()
    update = GroupRows.backward

    def watched(self, *args) -> None:
        updated_in.add(threading.current_thread().name)
        sleep(0.002)  # the dense optimizer is faster
        update(self, *args)

    monkeypatch.setattr(GroupRows, "backward", watched)
    mine = two_towers(batches, *words)
    assert "recpipe-tables_0" in updated_in
    monkeypatch.setattr("recpipe.backend.build.TableWorkers", lambda count: None)
    updated_in.clear()
    theirs = two_towers(batches, *words)
    assert updated_in == {"MainThread"}
    assert same(mine, theirs)


def test_work_that_is_begun_and_left_is_seen(batches, monkeypatch, always) -> None:
    """The negative control: whoever forgets what no thread has taken up trains something else."""
    theirs, go = two_towers(batches), threading.Event()
    update = GroupRows.backward

    def waits(self, *args) -> None:
        go.wait()
        update(self, *args)

    def forgets(self) -> None:
        begun, self._begun = self._begun, []
        for _, end in begun:
            end.cancel()
        go.set()
        for _, end in begun:
            if not end.cancelled():
                end.result()
        go.clear()

    begin, finish, latest = TableWorkers.begin, TableWorkers.finish, [""]

    def noted(self, kind, works) -> None:
        latest[0] = kind
        begin(self, kind, works)

    monkeypatch.setattr(GroupRows, "backward", waits)
    monkeypatch.setattr(TableWorkers, "begin", noted)
    monkeypatch.setattr(
        TableWorkers, "finish", lambda self: (forgets if latest[0] == "update" else finish)(self)
    )
    assert not same(two_towers(batches), theirs)


def test_what_no_thread_has_taken_up_is_done_by_whoever_waits(threads) -> None:
    done, go = [], threading.Event()
    works = [lambda: (go.wait(), done.append("first")), *(lambda n=n: done.append(n) for n in range(3))]
    threads.begin("update", works)
    assert threads.busy == 1
    threading.Timer(0.05, go.set).start()
    threads.finish()
    assert done == [2, 1, 0, "first"]
    assert not threads.busy


def test_short_work_wakes_nobody() -> None:
    threads, names = TableWorkers(1), []

    def named() -> None:
        names.append(threading.current_thread().name)

    threads.begin("update", [named])
    assert not threads.busy
    threads.begin("update", [lambda: sleep(2 * beside.WORTH)])
    threads.begin("look up", [named])
    threads.begin("update", [named])
    sleep(0.1)  # else it would be done here
    threads.finish()
    threads.close()
    assert names == ["MainThread", "MainThread", "recpipe-tables_0"]


def test_its_threads_use_one_core_and_others_their_own(threads) -> None:
    with using_threads(2):
        counts = []
        threads.begin("update", [lambda: counts.append((torch.ones(99).sum(), torch.get_num_threads())[1])])
        sleep(0.1)
        threads.finish()
        assert (counts, torch.get_num_threads()) == ([1], 2)


def test_a_fault_comes_out_where_it_is_waited_for(threads) -> None:
    def faulty() -> None:
        raise ValueError("no such row")

    threads.begin("update", [faulty])
    with pytest.raises(ValueError, match="no such row"):
        threads.finish()
    threads.begin("update", [int])
    threads.finish()


class Looks(L.Callback):
    """Finds out before every dense step whether all tables have been updated."""

    updated = 0
    seen: ClassVar[list[int]] = []

    def on_before_optimizer_step(self, *_) -> None:
        Looks.seen.append(Looks.updated)


def test_a_callback_between_the_backward_pass_and_the_dense_step_finds_tables_updated(
    batches, monkeypatch, always
) -> None:
    update = GroupRows.backward

    def counted(self, *args) -> None:
        sleep(0.005)
        update(self, *args)
        Looks.updated += 1

    monkeypatch.setattr(GroupRows, "backward", counted)
    Looks.updated, Looks.seen = 0, []
    two_towers(batches, f"trainer.callbacks=[{{_target_: {__name__}.Looks}}]")
    groups = Looks.updated // len(Looks.seen)
    assert groups > 1
    assert Looks.seen == [groups * step for step in range(1, len(Looks.seen) + 1)]
