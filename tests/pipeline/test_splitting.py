"""When batches are cut: always, never, or while it makes steps shorter."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recpipe.pipeline.splitting import AHEAD, BLOCK, LOOKED, WATCHED, Splitting
from recpipe.plugin.calls import Owned
from recpipe.plugin.errors import PluginError
from recpipe.plugin.splitter import Split, Splitter
from tests.pipeline.samples import Listed, collection_of, loader_of
from tests.plugin.samples import ACME

SAMPLES = 32
NEEDS_COLD = np.arange(SAMPLES) >= 20


class Early(Splitter):
    """The first samples first."""

    def __init__(self, early: int = 20) -> None:
        self.early = early

    def split(self, batch: Any, needs_cold: np.ndarray) -> Split:
        return Split(np.arange(len(needs_cold)), (self.early, len(needs_cold)))


class Clock:
    """Steps in which training waits for cold rows, unless they are cut."""

    def __init__(self, splitting: Splitting, waits: float, cost: float) -> None:
        self.splitting, self.waits, self.cost = splitting, waits, cost
        self.waited = 0.0
        self.lazy = False
        """Whether batches are passed by where the splitting does not want to look at them, as on a GPU."""
        self.looked = 0

    def epoch(self, steps: int, first: int = 0) -> list[bool]:
        """Whether each batch was cut; the next one is always cut before this one has been trained."""
        self.splitting.begin_epoch(first)
        cut = [self._cut()]
        for _ in range(steps):
            cut.append(self._cut())
            self.waited += 0.0 if cut[-2] else self.waits
            self.splitting.trained(1.0 + self.cost if cut[-2] else 1.0 + self.waits)
        return cut

    def _cut(self) -> bool:
        if self.lazy and not self.splitting.looks():
            self.splitting.pass_by()
            return False
        self.looked += 1
        return self.splitting.cut(None, NEEDS_COLD) is not None  # type: ignore[arg-type]


def clock(mode: str, waits: float = 0.0, cost: float = 0.0, early: int = 20) -> Clock:
    made: list[Clock] = []
    splitting = Splitting(
        Owned.of(ACME, Early(early)), mode, step=2, waited=lambda: made[0].waited if made else 0.0
    )
    made.append(Clock(splitting, waits, cost))
    return made[0]


def test_always_and_never() -> None:
    always, never = clock("always", waits=0.5), clock("never", waits=0.5)
    assert all(always.epoch(60))
    assert not any(never.epoch(60))
    assert (always.splitting.batches, never.splitting.batches) == (61, 0)
    assert always.splitting.verdict() == "splitting on: trainer.split=always"
    assert never.splitting.verdict() == "splitting off: trainer.split=never"


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_without_waits_few_batches_are_looked_at(mode: str) -> None:
    timed = clock(mode)
    timed.lazy = True
    assert not any(timed.epoch(79))
    assert timed.looked == 80 // LOOKED


@pytest.mark.parametrize(("mode", "waits"), [("always", 0.0), ("auto", 0.5)])
def test_all_batches_are_looked_at_where_that_may_pay(mode: str, waits: float) -> None:
    timed, other = clock(mode, waits, cost=0.1), clock(mode, waits, cost=0.1)
    timed.lazy = True
    cut = timed.epoch(80)
    assert timed.looked >= len(cut) - 2 * AHEAD
    assert cut[-20:] == other.epoch(80)[-20:] == [True] * 20


def test_it_is_on_where_waits_are_hidden() -> None:
    timed = clock("auto", waits=0.5, cost=0.1)
    cut = timed.epoch(80)
    assert not any(cut[: WATCHED + AHEAD - 1])
    assert all(cut[WATCHED + 4 * BLOCK + AHEAD :])
    verdict = timed.splitting.verdict()
    assert verdict == "splitting on after 40 batches: 1100.0 ms a batch with it, 1500.0 without"


@pytest.mark.parametrize(
    ("waits", "cost", "early", "why"),
    [
        (0.0, 0.2, 20, "splitting off: fetches were hidden or short, training waited 0.0% of its time"),
        (
            0.5,
            0.2,
            1,
            "splitting off: 0.0% of the samples need no cold row, too few to hide the waits, 33.3%",
        ),
        (0.2, 0.6, 20, "splitting off after 28 batches: 1600.0 ms a batch with it, 1200.0 without"),
    ],
)
def test_it_is_off_where_it_does_not_pay(waits: float, cost: float, early: int, why: str) -> None:
    timed = clock("auto", waits, cost, early)
    cut = timed.epoch(80)
    assert sum(cut) <= BLOCK
    assert timed.splitting.verdict().startswith(why)


def test_a_new_epoch_forgets_batches_that_were_not_trained() -> None:
    timed = clock("auto", waits=0.5, cost=0.1)
    timed.epoch(60)
    assert all(timed.epoch(40, first=60)), "the decision stays"


def test_a_short_run_says_so() -> None:
    timed = clock("auto", waits=0.5)
    timed.epoch(10)
    assert "the run ended after 10 batches" in timed.splitting.verdict()


def test_a_run_that_ends_while_it_is_compared_says_so() -> None:
    timed = clock("auto", waits=0.5)
    timed.epoch(WATCHED + BLOCK)
    assert timed.splitting.trial.compares
    assert f"the run ended after {WATCHED + BLOCK} batches" in timed.splitting.verdict()


def test_a_rare_wait_cuts_no_batch() -> None:
    """As for the rows that became popular when a policy had learned."""
    timed = clock("auto")
    for number in range(3 * WATCHED):
        timed.waits = 2.0 if number % WATCHED == 8 else 0.0
        timed.epoch(1, first=number)
    assert timed.splitting.batches == 0
    verdict = timed.splitting.verdict()
    assert verdict == "splitting off: training waited 11.1% of its time, but in few of its batches"


def test_a_splitter_with_another_purpose_is_not_judged() -> None:
    class Memory(Early):
        optional = False

    splitting = Splitting(Owned.of(ACME, Memory()), "auto", step=2)
    splitting.begin_epoch(0)
    assert splitting.cut(None, NEEDS_COLD) is not None  # type: ignore[arg-type]


def test_micro_batches_come_in_steps() -> None:
    splitting = Splitting(Owned.of(ACME, Early(19)), "always", step=8)
    splitting.begin_epoch(0)
    split = splitting.cut(None, NEEDS_COLD)  # type: ignore[arg-type]
    assert split is not None
    assert split.bounds == (16, SAMPLES)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "split() returned NoneType, not a Split"),
        (Split(np.arange(31), (31,)), "an order of int64 [31] for a batch of 32 samples"),
        (Split(np.arange(32) // 2, (32,)), "an order without sample 16: it must be a permutation of 0 .. 31"),
        (Split(np.arange(32), (20, 31)), "bounds (20, 31): they must grow and end with 32, the batch's"),
        (Split(np.arange(32), (20, 10, 32)), "bounds (20, 10, 32): they must grow and end with 32"),
        (Split(np.arange(32), ()), "bounds (): they must grow and end with 32"),
    ],
)
def test_what_is_no_split_is_told_with_the_plugins_name(made: Any, said: str) -> None:
    class Wrong(Splitter):
        def split(self, batch: Any, needs_cold: np.ndarray) -> Split:
            return made  # type: ignore[no-any-return]

    splitting = Splitting(Owned.of(ACME, Wrong()), "always", step=2)
    splitting.begin_epoch(0)
    with pytest.raises(PluginError, match=rf"^plugin {re.escape(str(ACME))}.*{re.escape(said)}"):
        splitting.cut(None, NEEDS_COLD)  # type: ignore[arg-type]


class Noting(Splitting):
    """Notes how many batches, from a trained one on, have been read when that one is noted as trained."""

    read, ended, most = 0, 0, 0

    def cut(self, batch: Any, needs_cold: np.ndarray) -> Split | None:
        self.read += 1
        return super().cut(batch, needs_cold)

    def trained(self, seconds: float) -> None:
        time.sleep(0.02)  # the loader's thread may read on
        self.most = max(self.most, self.read - self.ended)
        self.ended += 1
        super().trained(seconds)


def test_no_batch_is_read_before_the_decision_that_holds_for_it(tmp_path: Path) -> None:
    """Otherwise several trainers, which read at their own pace, could cut a batch in different ways."""
    dataset, embeddings = Listed(), collection_of("lru", "sgd", tmp_path)
    loader = loader_of(dataset, embeddings)
    loader.splitting = noting = Noting(Owned.of(ACME, Early(4)), "auto", step=2)
    assert len(list(loader)) == noting.read == 10
    assert noting.most <= AHEAD
    embeddings.close()
