"""Steps over ranks, predicted on a made-up machine whose laws give the answers in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from recpipe_het.costs import statement as het
from recpipe_perf_model.bench.ranks import measure_in
from recpipe_perf_model.facts.facts import Facts, Stretch
from recpipe_perf_model.kernels.linear import COLLECTIVES, FEATURES, At
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.statement import Moved, Phase, Statement
from recpipe_perf_model.tests import synthetic
from recpipe_perf_model.tests.test_tiered import DENSE, MS, SAMPLES, group, resident
from recpipe_perf_model.tests.test_tiered import facts as of_one
from recpipe_perf_model.tiers.predict import RESIDENT, TieredPrediction, of_policy, over_ranks, predict_tiered
from recpipe_perf_model.tiers.ranked import busiest_part, measured_with, share_of_distinct

from recpipe.config.compose import active_plugins, compose
from recpipe.distributed.ranks import Emulation
from recpipe.plugin.load import instantiate
from recpipe.profiling.limits import Sample
from tests.processes import start_ranks
from tests.ranks import joined


@dataclass(frozen=True)
class Machine:
    """Kinds of work take so long for each byte or row that they have; all else takes no time."""

    each: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kind: str, at: At) -> float:
        size = at.get("bytes", at.get("rows", at.get("lookups", at.get("seconds", 0.0))))
        return self.each.get(kind, 0.0) * float(size)


def facts(**changes: object) -> Facts:
    return of_one(trainers=2, **changes)


def step(
    machine: Machine, statement: Statement, known: Facts, cores: float = 8.0, network: Emulation | None = None
) -> TieredPrediction:
    return predict_tiered(known, {}, statement, machine, resident, cores, network)


def test_without_messages_two_ranks_take_half_of_the_time() -> None:
    assert step(Machine(), RESIDENT, facts()).step_seconds == pytest.approx(DENSE / 2, rel=1e-6)
    assert step(Machine(), RESIDENT, of_one()).step_seconds == pytest.approx(DENSE, rel=1e-6)


def test_replicas_send_each_other_rows_and_gradients() -> None:
    """Each tells the other 500 ids; gradients of 1,000 rows of 16 values go to the rank that adds them up."""
    known = facts(share=1.0)
    told = step(Machine({"all_to_all": 1e-8}), RESIDENT, known).step_seconds - DENSE / 2
    distinct = known.groups[0].distinct
    mine = distinct * share_of_distinct(known.groups[0], 2, SAMPLES)
    sent = 8 * 2 + 8 * mine * 2 + 4 * 16 * distinct
    assert told == pytest.approx(1e-8 * sent, rel=1e-3)


def test_shards_exchange_rows_instead() -> None:
    known, machine = facts(share=1.0), Machine({"all_to_all": 1.0, "sharded forward": 2e-6})
    told = step(machine, over_ranks(RESIDENT, known), replace(known, groups=(group(), group())))
    assert told.step_seconds > DENSE / 2, "dense gradients are added up"
    quiet = Machine({"sharded ids": 1e-6, "sharded forward": 2e-6, "sharded backward": 3e-6})
    two = replace(known, groups=(group(), group()))
    found = step(quiet, over_ranks(RESIDENT, two), two).step_seconds
    assert found == pytest.approx(DENSE / 2 + 6e-6 * 2 * 500, rel=1e-3)


def test_a_network_adds_its_delays_and_a_shared_disk_its_queue() -> None:
    known, machine = facts(store="ssd"), Machine({"ssd read": 1e-6})
    fetched = Statement(why="test", phases=(Phase(moved=(Moved(read=30_000),)),))
    here, alone = (step(machine, fetched, each).step_seconds for each in (known, of_one(store="ssd")))
    assert here == pytest.approx(2 * alone, rel=1e-6), "each serves both, and they share a disk"
    apart = step(machine, fetched, known, network=Emulation()).step_seconds
    assert apart == pytest.approx(alone, rel=1e-6)
    slow = step(machine, fetched, known, network=Emulation(latency_us=1000.0)).step_seconds
    assert slow > apart + 1 * MS


def test_ranks_share_the_cores_of_a_machine() -> None:
    """With half a core each, a rank's work takes twice as long."""
    assert step(Machine(), RESIDENT, facts(), cores=0.5).step_seconds == pytest.approx(DENSE, rel=1e-6)
    slow = Machine({"side by side": 1.5})
    assert step(slow, RESIDENT, facts()).step_seconds == pytest.approx(0.75 * DENSE, rel=1e-6)
    apart = step(slow, RESIDENT, facts(), network=Emulation()).step_seconds
    assert apart == pytest.approx(DENSE / 2, rel=1e-6), "others do not disturb"


def test_tables_of_their_own_hide_no_fetch() -> None:
    machine = Machine({"host read": 1e-6})
    moved = (Phase(moved=(Moved(read=5_000),)),)
    inside = Statement(why="test", phases=moved, inside=True)
    assert step(machine, inside, of_one()).step_seconds == pytest.approx(DENSE + 5 * MS, rel=1e-3)
    hidden = step(machine, replace(inside, inside=False), of_one()).step_seconds
    assert hidden == pytest.approx(DENSE, rel=1e-3)


def test_a_share_of_a_batch_has_some_of_its_distinct_rows() -> None:
    """Rows that all samples look up are in each share; rows of one sample are in one."""
    known = group()
    samples = np.repeat(np.arange(2 * SAMPLES), 2)
    own = np.stack([np.zeros(2 * SAMPLES, np.int64), 1 + np.arange(2 * SAMPLES)], axis=1).ravel()
    stretch = Stretch(2, samples, own, np.where(own == 0, 0.0, 0.5).astype(np.float32))
    mixed = replace(known, stretch=stretch)
    assert share_of_distinct(mixed, 4, SAMPLES) == pytest.approx((1 + SAMPLES / 4) / (1 + SAMPLES))
    assert share_of_distinct(mixed, 4, SAMPLES, above=0.3) == pytest.approx(1 / 4)
    assert share_of_distinct(mixed, 1, SAMPLES) == 1.0


def test_the_busiest_rank_has_the_largest_tables() -> None:
    """Loads 2, 1.5, 1.5 make 3 and 2; of 3 and 1 the larger is cut: 1.5 and 1.5 and 1 make 2.5 and 1.5."""
    three = tuple(replace(group(), lookups=load) for load in (1500.0, 2000.0, 1500.0))
    assert busiest_part(facts(groups=three)) == pytest.approx(3 / 5)
    cut = facts(groups=(replace(group(), lookups=3000.0), group()))
    assert busiest_part(cut) == pytest.approx(2.5 / 4)
    assert busiest_part(facts()) == pytest.approx(1 / 2), "a table alone is cut, too"
    neo: Any = instantiate("neo", active_plugins(compose(["+plugin=neo"]))["neo"])
    assert neo.costs(cut).spread == pytest.approx(2.5 / 4)
    assert neo.costs(of_one()).spread == 1.0


def test_het_pushes_what_waits_too_long_and_what_leaves() -> None:
    """A cache that is not full pushes nothing before the bound; without a bound each row is pushed."""
    begun = of_one(steps=50, late=False, share=0.9)
    (phase,) = het(begun, "lfu", 100).phases
    assert phase.moved[0].written == 0
    (at_once,) = het(begun, "lfu", 0).phases
    assert at_once.moved[0].written > 0
    full = het(of_one(steps=10**6, share=0.05), "lfu", 100).phases[0].moved[0]
    assert full.written > 0.9 * of_one().groups[0].misses("lfu", 0.05).rows
    two = het(facts(share=0.05), "lfu", 0)
    kinds = {work.kind for work in two.works}
    assert "all_to_all" in kinds
    assert "all_to_all" not in {work.kind for work in het(of_one(share=0.05), "lfu", 0).works}


def test_messages_of_as_many_ranks_count_if_there_are_any() -> None:
    samples = tuple(Sample("all_to_all", {"bytes": 8.0, "ranks": ranks}, 1.0) for ranks in (2.0, 4.0))
    profile = MachineProfile(synthetic.HOST, "then", False, {"collectives": samples})
    assert measured_with(profile, 4).samples["collectives"] == samples[1:]
    assert measured_with(profile, 8).samples["collectives"] == samples


@pytest.mark.soak  # two ranks
def test_two_ranks_measure_messages_and_sharded_steps(tmp_path: Path) -> None:
    start_ranks(_measures, (2, str(tmp_path / "meet")), 2)


def _measures(rank: int, world: int, meeting: str) -> None:
    with joined(rank, world, meeting):
        group = dist.group.WORLD
        assert group is not None
        found = list(measure_in(group, True))
        messages = {f"{name}{busy}" for name in COLLECTIVES for busy in ("", " busy")}
        sharded = {"sharded ids", "sharded forward", "sharded backward"}
        assert {sample.kind for sample in found} == messages | sharded | {"side by side"}
        for sample in found:
            assert sample.seconds > 0
            assert np.isfinite(FEATURES[sample.kind](sample.at)).all()


def test_a_policy_over_replicas_plans_the_whole_batch() -> None:
    known = facts(share=0.1)
    machine = Machine({"plan lru": 1e-6})
    assert step(machine, of_policy("lru", known), known).step_seconds >= DENSE / 2
