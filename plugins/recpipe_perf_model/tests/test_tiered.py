"""Steps in tiers, predicted on a made-up machine whose laws give the answers in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from recpipe_perf_model.facts.facts import Facts, GroupFacts, Stretch
from recpipe_perf_model.kernels.linear import At
from recpipe_perf_model.statement import Moved, Phase, Statement, Work
from recpipe_perf_model.step.walk import Task
from recpipe_perf_model.tiers.predict import (
    RESIDENT,
    TieredPrediction,
    choices,
    merged,
    of_policy,
    predict_tiered,
)
from recpipe_perf_model.tiers.tiered import LOOK_UP, UPDATE, ResidentStep, Store, cold_rows

from recpipe.access.misses import SHARES, Curve
from recpipe.distributed.ranks import Emulation
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.blocks import BlockMap

MS = 1e-3
DENSE = 10 * MS
SAMPLES = 1000


@dataclass(frozen=True)
class Machine:
    """Work takes no time but for the kinds in ``per_row``: seconds for each row; ``fixed``: for a call."""

    per_row: Mapping[str, float] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kind: str, at: At) -> float:
        return self.fixed.get(kind, 0.0) + self.per_row.get(kind, 0.0) * float(at.get("rows", 0.0))


def resident(samples: int) -> ResidentStep:
    """10 ms for the dense part of a batch; all else takes no time."""
    return ResidentStep(
        [
            Task("read", "loader"),
            Task(LOOK_UP, "main", after={"read": 1}),
            Task("dense", "main", DENSE * samples / SAMPLES),
            Task(UPDATE, "main"),
            Task("loop", "main"),
        ],
        0.0,
        0.0,
    )


def group(hits: Sequence[float] = (), rows: int = 100_000) -> GroupFacts:
    """1,000 lookups of as many rows in each batch; ``hits``: of them, for each of ``SHARES``."""
    found = np.array(hits or np.linspace(0, 1000, len(SHARES)))
    curve = Curve(found, found, np.zeros(len(SHARES)), 1, 1000.0, 1000.0)
    ids = np.arange(4000, dtype=np.int64)
    stretch = Stretch(4, ids, ids * (rows // 4000), (ids % 1000 / 1000).astype(np.float32))
    curves = {"lru": curve, "lfu": curve, "hot": curve}
    windows = np.linspace(1000, 8000, 8)
    return GroupFacts((rows,), 16, 68, 1, True, 17, 1000.0, 1000.0, 0.0, curves, windows, stretch)


def facts(**changes: object) -> Facts:
    made = Facts(
        batch_size=SAMPLES, epoch_samples=10**6, steps=10**6, groups=(group(),), batch_bytes=0, share=0.1
    )
    return made.at(**changes)


def step(
    machine: Machine, statement: Statement, known: Facts | None = None, **others: Statement
) -> TieredPrediction:
    stated = {"technique": statement, **others}
    return predict_tiered(known or facts(), stated, RESIDENT, machine, resident, cores=8)


def fetching(rows: float, **more: object) -> Statement:
    """A statement of ``rows`` that every batch reads."""
    return Statement(why="test", phases=(Phase(moved=(Moved(read=rows),)),), **more)  # type: ignore[arg-type]


# -- overlap ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "expected"), [(2_000, 10.0), (9_000, 10.0), (30_000, 30.0)])
def test_a_prefetch_is_hidden_behind_the_batch_before(rows: float, expected: float) -> None:
    machine = Machine({"host read": 1e-6})  # 1 us a row, all of it waiting
    assert step(machine, fetching(rows)).step_seconds == pytest.approx(expected * MS, rel=1e-6)
    serial = step(machine, fetching(rows, ahead=0)).step_seconds
    assert serial == pytest.approx(rows * 1e-6 + DENSE, rel=1e-6), "without it, training waits for all"


@pytest.mark.parametrize("rows", [2_000, 7_000, 30_000])
def test_hotline_is_the_longer_of_fetch_and_popular_samples_plus_the_rest(rows: float) -> None:
    """With no prefetch of the next batch, max(T_fetch, T_popular) + T_rest."""
    machine, fetch, popular = Machine({"host read": 1e-6}), rows * 1e-6, 0.7 * DENSE
    found = step(machine, fetching(rows, early=0.7), facts(prefetch=False)).step_seconds
    assert found == pytest.approx(max(fetch, popular) + DENSE - popular, rel=1e-6)
    whole = step(machine, fetching(rows), facts(prefetch=False)).step_seconds
    assert whole == pytest.approx(fetch + DENSE, rel=1e-6)


@pytest.mark.parametrize(("least", "busy"), [(100, 5.0), (500, 0.7 * 5 + 3.0), (800, 10.0)])
def test_cores_may_share_the_batch_and_not_a_micro_batch(least: int, busy: float) -> None:
    """Two cores share what has ``least`` samples: both parts, the first of 700, or the whole alone."""

    def shared(samples: int) -> ResidentStep:
        if samples < least:
            return resident(samples)
        half = DENSE * samples / SAMPLES / 2
        return ResidentStep(
            [
                Task("read", "loader"),
                Task(LOOK_UP, "main", after={"read": 1}),
                Task("dense", "main", half),
                Task("backward of core 1", "core 1", half, after={LOOK_UP: 0}),
                Task("add up gradients", "core 1", after={"dense": 0, "backward of core 1": 0}),
                Task(UPDATE, "main", after={"add up gradients": 0}),
                Task("loop", "main", after={"backward of core 1": 0}),
            ],
            0.0,
            0.0,
        )

    stated = {"technique": fetching(1.0, early=0.7)}
    found = predict_tiered(facts(), stated, RESIDENT, Machine(), shared, cores=8)
    assert found.step_seconds == pytest.approx(busy * MS, rel=1e-6)


def test_what_is_faster_is_done_instead() -> None:
    """Cutting costs 2 ms of main's time: it pays where fetches are long."""
    machine = Machine({"host read": 1e-6}, {"reorder": 2 * MS})
    cut = Work(name="order", kind="reorder", place="main")
    for rows, pays in ((1_000, False), (6_000, True)):
        whole = fetching(rows)
        told = replace(whole, early=0.5, works=(cut,), instead=whole)
        found = step(machine, told, facts(prefetch=False))
        assert (found.statement.early > 0) is pays
        assert found.step_seconds == min(found.tried)


def test_writes_share_the_queue_of_fetches() -> None:
    machine = Machine({"host read": 1e-6, "host write": 1e-6})
    moved = Moved(read=8_000, evicted=8_000)
    found = step(machine, Statement(why="test", phases=(Phase(moved=(moved,)),)))
    assert found.step_seconds == pytest.approx(16 * MS, rel=1e-3)


def test_rows_of_frozen_tables_are_neither_written_nor_updated() -> None:
    """Reads take 4 ms beside 10 ms of training, writes would take 8, an update 3."""
    machine = Machine({"host read": 4e-6, "host write": 8e-6}, {"slots update": 3 * MS})
    statement = Statement(why="test", phases=(Phase(moved=(Moved(read=1000, returned=500, evicted=500),)),))
    frozen = facts(groups=(replace(group(), frozen=True),))
    found, trained = (step(machine, statement, known).step_seconds for known in (frozen, facts()))
    reads = replace(statement, phases=(Phase(moved=(Moved(read=1000),)),))
    assert found == step(machine, reads, frozen).step_seconds == pytest.approx(10 * MS, rel=1e-6)
    assert trained == pytest.approx(13 * MS, rel=1e-6)


def test_reading_ahead_in_bulk_saves_what_a_request_costs() -> None:
    ssd = Machine({"ssd read": 1e-6}, {"ssd read": 15 * MS})
    known = facts(store="ssd")
    alone = step(ssd, fetching(2_000), known).step_seconds
    bulk = step(ssd, fetching(2_000, ahead=16, together=8.0), known).step_seconds
    assert alone == pytest.approx(17 * MS, rel=1e-3)
    assert bulk == pytest.approx(DENSE, rel=1e-3), "15 / 8 + 2 ms are hidden"


def test_phases_are_weighed_by_their_shares() -> None:
    machine = Machine({"host read": 1e-6})
    told = Statement(
        why="test",
        phases=(Phase(share=0.75, moved=(Moved(),)), Phase(share=0.25, moved=(Moved(read=30_000),))),
    )
    found = step(machine, told)
    assert found.step_seconds == pytest.approx(0.75 * DENSE + 0.25 * 30 * MS, rel=1e-6)
    assert found.read == pytest.approx(7_500)


def test_samples_left_out_shorten_the_dense_part() -> None:
    found = step(Machine(), Statement(why="test", kept=0.6))
    assert found.step_seconds == pytest.approx(0.6 * DENSE, rel=1e-6)


def test_an_emulated_link_delays_each_request() -> None:
    slow = facts(emulation=Emulation(latency_us=20_000, gbit_per_s=1.0), prefetch=False)
    rows = 1_000
    found = step(Machine(), fetching(rows), slow).step_seconds
    assert found == pytest.approx(DENSE + 0.02 + rows * 68 * 8e-9, rel=1e-6)


def test_no_miss_is_the_resident_step_and_its_planning() -> None:
    """Planning is in the loader's thread: it costs what is not hidden."""
    full = facts(groups=(group([1000.0] * len(SHARES)),), share=0.5)
    for policy in ("lru", "lfu", "hot"):
        quick = predict_tiered(full, {}, of_policy(policy, full), Machine(), resident, 8)
        assert (quick.step_seconds, quick.read) == (pytest.approx(DENSE), 0.0)
        slow = Machine(fixed={"plan lru": 25 * MS, "plan lfu": 25 * MS, "plan nocache": 25 * MS})
        assert predict_tiered(
            full, {}, of_policy(policy, full), slow, resident, 8
        ).step_seconds == pytest.approx(25 * MS)


@pytest.mark.parametrize("policy", ["lru", "lfu", "hot"])
def test_more_slots_are_never_predicted_slower(policy: str) -> None:
    machine = Machine({"host read": 20e-6, "host write": 20e-6})
    times = []
    for share in (0.001, 0.01, 0.1, 0.5, 1.0):
        known = facts(share=share)
        times.append(predict_tiered(known, {}, of_policy(policy, known), machine, resident, 2).step_seconds)
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(times))
    assert times[0] > times[-1] == pytest.approx(DENSE), "all rows resident, nothing moves"


# -- several plugins -------------------------------------------------------------------------
def test_statements_merge_by_aspect() -> None:
    hot = replace(fetching(500.0), yields=True, kept=0.7)
    popular = replace(fetching(200.0), early=0.5)
    coded = Statement(why="fewer bits", cold_bytes=(20.0,))
    for names in (("hot", "popular", "coded"), ("coded", "popular", "hot")):
        stated = {name: {"hot": hot, "popular": popular, "coded": coded}[name] for name in names}
        found = merged(stated, RESIDENT)
        assert found.phases == popular.phases, "a fallback cache gives way"
        assert (found.kept, found.early, found.cold_bytes) == (0.7, 0.5, (20.0,))


def test_each_plugin_falls_back_by_itself() -> None:
    one = replace(fetching(1.0), early=0.5, instead=fetching(1.0))
    two = Statement(why="two", kept=0.5, instead=Statement(why="nothing"))
    found = [(each.early, each.kept) for each in choices({"one": one, "two": two}, RESIDENT)]
    assert found == [(0.5, 0.5), (0.5, 1.0), (0.0, 0.5), (0.0, 1.0)]


# -- caches ----------------------------------------------------------------------------------
def test_nothing_leaves_a_cache_that_never_fills() -> None:
    (long,), (short,) = (facts(steps=steps).cached("lru") for steps in (10**6, 4))
    assert long.read == long.evicted == short.read > 0
    assert short.evicted == 0


def test_rows_that_the_next_batch_needs_stay_in_the_slab() -> None:
    again = facts(groups=(replace(group(), repeated=300.0),))
    (moved,) = again.cached("nocache")
    assert (moved.slab, moved.read, moved.returned) == (1000, 700, 700)
    (through,) = again.at(prefetch=False).cached("nocache")
    assert (through.read, through.returned) == (1000, 1000)


# -- the ssd store ---------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "wanted"), [(200_000, 300), (200_000, 3_000), (30_000, 3_000)])
def test_blocks_and_requests_are_those_of_random_rows(rows: int, wanted: int) -> None:
    one, blocks = group(rows=rows), BlockMap(StoreLayout(("",), (rows,), 17))
    found = []
    for seed in range(5):
        ids = np.random.default_rng(seed).choice(rows, wanted, replace=False)
        own = np.unique(blocks.places(ids).blocks)
        bridged = blocks.bridged(own)
        requests = [1 + int((np.diff(each) != 1).sum()) for each in (bridged, own)]
        found.append((len(bridged), requests[0], len(own), requests[1]))
    store = Store(facts(share=0.0), one, Machine())
    read, write = (store.touched(wanted, bridged) for bridged in (True, False))
    for mine, real in zip((*read, *write), np.mean(found, axis=0), strict=True):
        assert mine == pytest.approx(real, rel=0.1, abs=4)


def test_cold_rows_are_spread_as_lookups_are_until_a_table_is_full() -> None:
    ids = np.array([0, 1, 10, 11, 12, 13, 14, 15])
    stretch = Stretch(1, np.arange(8), ids, np.full(8, np.inf, np.float32))
    both = replace(group(), table_rows=(10, 1000), stretch=stretch)
    assert cold_rows(both, 4.0, 0.5) == pytest.approx([1.0, 3.0])
    assert cold_rows(both, 100.0, 0.5) == pytest.approx([10.0, 90.0])


def test_blocks_stay_staged_if_the_area_holds_two_batches() -> None:
    """1,000 rows of a large table touch about 1,000 blocks; the area has at least 2,048."""
    many = Store(facts(store="ssd", share=0.0), group(rows=10**7), Machine())
    assert many.staged(900.0, 900.0) == 1.0
    assert many.staged(1_900.0, 1_900.0) == 0.0, "each batch pushes the last one's out"
    assert 0 < many.staged(1_200.0, 300.0) < 1
    machine = Machine({"ssd write": 1e-6, "ssd rewrite": 3e-6})
    half = Store(facts(store="ssd", share=0.0), group(), machine).write(1000.0, staged=0.5)
    assert half.busy + half.waits == pytest.approx(2 * MS)


def test_main_waits_for_the_interpreter_as_far_as_it_runs_python() -> None:
    machine = Machine(fixed={"plan lru": 4 * MS})

    def python(share: float) -> float:
        def step(samples: int) -> ResidentStep:
            return replace(resident(samples), python=share)

        told = {"technique": fetching(10.0)}
        return predict_tiered(facts(), told, RESIDENT, machine, step, cores=8).step_seconds

    assert python(0.0) == pytest.approx(DENSE)
    assert python(0.5) == pytest.approx(DENSE + 2 * MS)


def test_coded_rows_are_smaller_and_take_time_to_code() -> None:
    machine = Machine({"decode int8": 1e-6})
    plain, coded = Store(facts(), group(), machine), Store(facts(), group(), machine, 20.0, "int8")
    assert (plain.width, coded.width) == (17, 5)
    assert plain.request("read", 1000.0).busy == 0
    assert coded.request("read", 1000.0).busy == pytest.approx(1 * MS)
