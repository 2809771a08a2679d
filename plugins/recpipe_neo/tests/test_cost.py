"""Statistics of batches, profiles as files, and the fit of the cost model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from recpipe_neo import measure
from recpipe_neo.estimate import CostModel, owned, shared
from recpipe_neo.machine_profile import LOOKUPS, STEPS, LookupSample, MachineProfile, known_collectives
from recpipe_neo.planner import saved_profile
from recpipe_neo.stats import feature_stats
from recpipe_perf_model import Host, LookupWork, Sample, SharedProfile, nnls
from recpipe_perf_model import machine as perf

from plugins.recpipe_neo.tests.rig import bags, forward_ms, machine, made_up, uniform_stats
from recpipe.errors import UserError


def test_statistics_of_two_batches() -> None:
    """Feature a: ids 1 1 5 in four samples, then 1 2 7 9."""
    first = bags({"a": (np.array([1, 1, 5]), np.array([1, 0, 2, 0])), "b": (np.arange(4), np.ones(4))})
    second = bags({"a": (np.array([9, 2, 1, 7]), np.array([1, 1, 1, 1])), "b": (np.arange(4), np.ones(4))})
    stats = feature_stats([first, second])
    a = stats["a"]
    assert (a.lookups_per_sample, a.distinct) == (7 / 8, 3)
    assert a.within(0, 10, 4) == (3.5, 3)
    assert a.within(0, 3, 4) == (2.0, 1.5), "rows 1 1, and 1 2"
    assert a.within(10, 20, 4) == (0, 0)
    assert a.growth == 1, "half of the batches have 1 and 2 distinct rows, the whole ones twice that"
    assert stats["b"].lookups_per_sample == 1
    with pytest.raises(UserError, match="no batch to take statistics of"):
        feature_stats([])


def test_distinct_rows_of_other_batch_sizes() -> None:
    """A table of 50 rows is full either way; one of a million grows with the batch."""
    small, large = uniform_stats(50, 10, 1000), uniform_stats(1_000_000, 1, 1000)
    assert small.within(0, 50, 4000) == (40_000, 50)
    assert large.within(0, 1_000_000, 250)[1] == pytest.approx(250, rel=0.01)
    assert large.within(0, 500_000, 1000)[0] == pytest.approx(500, rel=0.1)


def test_the_fit_is_the_best_non_negative_one() -> None:
    """Against the best of all subsets of columns with a plain least-squares solution >= 0."""
    random = np.random.default_rng(0)
    for _ in range(5):
        a, b = random.random((12, 4)), random.normal(size=12)
        best = np.linalg.norm(b)
        for size in range(1, 5):
            for columns in itertools.combinations(range(4), size):
                x = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
                if (x >= 0).all():
                    best = min(best, np.linalg.norm(a[:, columns] @ x - b))
        found = nnls(a, b)
        assert (found >= 0).all()
        assert np.linalg.norm(a @ found - b) == pytest.approx(best, rel=1e-6)


def test_times_of_unseen_lookups_follow_the_machine_s_laws() -> None:
    model = CostModel(made_up(machine(2)))
    for rows, dim, samples, pooling in ((40_000, 32, 1000, 7), (500_000, 64, 3000, 30), (300, 16, 4000, 2)):
        work = LookupSample(1, rows, dim, samples, samples * pooling, min(rows, 5000), 0, 0)
        lookup = LookupWork(rows, dim, samples, samples * pooling, work.distinct)
        forward, backward = model.lookup(lookup, lookup.bytes)
        call = model.fixed("table_wise")[1] - 0.3  # the exchange's own
        assert forward + call == pytest.approx(forward_ms(work), rel=0.15)
        assert backward == pytest.approx(2 * forward, rel=0.1)


def test_exchanges_are_what_lookups_leave_over() -> None:
    """The made-up machine takes 1 ns for each float of each rank, and 0.3 ms for a step's phase."""
    model = CostModel(made_up(machine(2)))
    everyone = model.exchange("table_wise", shared("table_wise", 64, 1, 1000, 1024, 1024))
    owner = model.exchange("table_wise", owned(64, 2048, 2048))
    call = forward_ms(LookupSample(0, 0, 0, 0, 0, 0, 0, 0))
    assert model.fixed("table_wise") == pytest.approx([0.3, 0.3 + call, 0.3 + 2 * call], rel=0.05)
    assert everyone[0] == pytest.approx(1024e-6, rel=0.2)
    assert everyone[1:] == pytest.approx([64 * 1024e-6] * 2, rel=0.05)
    assert (everyone + owner)[1:] == pytest.approx([3 * 64 * 1024e-6] * 2, rel=0.05)
    assert model.idle("all_reduce", 1e6) == pytest.approx(0.55)


def test_more_work_never_costs_less() -> None:
    """Of noisy measurements either: coefficients are times."""
    random = np.random.default_rng(1)
    profile = made_up(machine(2))
    noisy = [
        replace(
            s, forward=s.forward * random.uniform(0.6, 1.6), backward=s.backward * random.uniform(0.6, 1.6)
        )
        for s in profile.lookups
    ]
    model = CostModel(replace(profile, lookups=noisy))
    times = [model.lookup(LookupWork(1e5, 64, 1000, n, n / 2), 1e7) for n in (1e3, 1e4, 1e5)]
    assert times == sorted(times)
    assert min(times[0]) >= 0


def test_a_profile_that_lacks_a_benchmark_or_has_an_impossible_figure_is_none() -> None:
    profile = made_up(machine(2))
    families = profile.families()
    assert MachineProfile.of(families, profile.machine) is not None

    def changed(family: str, **at: float | str) -> dict[str, list[Sample]]:
        return {**families, family: [replace(s, at=s.at | at) for s in families[family]]}

    broken = [
        {name: samples for name, samples in families.items() if name != lacking} for lacking in families
    ]
    broken += [changed(LOOKUPS, rows=0.0), changed(LOOKUPS, dim=-1.0), changed(LOOKUPS, more=1.0)]
    broken += [changed(STEPS, sharding_type="x"), changed(STEPS, columns=0.0)]
    for found in broken:
        assert MachineProfile.of(found, profile.machine) is None


def test_what_was_measured_on_a_busy_machine_does_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are no strangers to each other: all their time is told."""
    monkeypatch.delenv("RECPIPE_BUSY", raising=False)
    monkeypatch.setattr(perf.Load, "now", lambda: perf.Load(10, 10, 0))
    two = made_up(machine(2))
    for seconds, kept in ((5.0, False), (9.5, True)):
        own = replace(SharedProfile.of(tmp_path, Host.current()), began=perf.Load(0, 0, 0))
        why = own.joined(two.families(), two.machine.at, seconds)
        assert why == ("" if kept else "other programs took 50% of this machine's processors")
        assert own.file.exists() is kept


def test_slow_ranks_measure_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, passes = made_up(machine(2)), []

    def lookups(*_: object) -> list[LookupSample]:
        passes.append(1)
        return profile.lookups

    monkeypatch.setattr(measure, "Clock", lambda device: None)
    monkeypatch.setattr(measure, "id_pools", lambda *_: {})
    monkeypatch.setattr(measure.Machine, "current", lambda *_: profile.machine)
    monkeypatch.setattr(measure, "measure_lookups", lookups)
    monkeypatch.setattr(measure, "measure_collectives", lambda *_: profile.collectives)
    monkeypatch.setattr(measure, "measure_exchanges", lambda *_: profile.exchanges)
    group = SimpleNamespace(rank=lambda: 0)
    for late, count in ((True, 1), (False, measure.PASSES)):
        monkeypatch.setattr(measure, "_late", lambda *_, late=late: late)
        passes.clear()
        found = measure.measure(group, torch.device("cpu"), EmbOptimType.EXACT_SGD)  # type: ignore[arg-type]
        assert (len(passes), found.lookups) == (count, profile.lookups)


@pytest.mark.parametrize(("each", "shapes"), [(0.01, len(measure.SHAPES)), (1.0, measure.NEEDED)])
def test_slow_ranks_measure_fewer_shapes_of_steps(
    each: float, shapes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a shape takes so many seconds."""
    now, repeated = [0.0], []

    def step(*given: object) -> NDArray[np.float64]:
        now[0] += each * (repeats := int(str(given[-1])))
        repeated.append(repeats)
        return np.ones(3)

    monkeypatch.setattr(measure, "_step", step)
    monkeypatch.setattr(measure, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure.dist, "all_reduce", lambda *_, **__: None)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    cpu = SimpleNamespace(device=torch.device("cpu"))
    found = list(measure.measure_exchanges(group, cpu, EmbOptimType.EXACT_SGD))  # type: ignore[arg-type]
    kinds = {sample.sharding_type for sample in found}
    assert kinds == set(measure.GENERATORS)
    assert len(found) == shapes * len(kinds)
    assert set(repeated[-3:]) == {measure.REPEATS if each < 1 else measure.FEWER}
    needed = np.array(measure.SHAPES[: measure.NEEDED])
    assert all(len(set(column)) > 1 for column in needed.T), "a fit needs shapes that differ in everything"


def test_measurements_join_the_machines_profile(tmp_path: Path) -> None:
    """That of a run of one process, which has more threads; those of other ranks and optimizers stay."""
    host = Host.current()
    whole = replace(host, threads=host.threads + 7)
    perf.MachineProfile(whole, "then", True, {"limits": (Sample("copy", {}, 1.0),)}).save(
        tmp_path / "machine-1.json"
    )
    perf.MachineProfile(replace(whole, torch_version="0"), "then", True).save(tmp_path / "machine-0.json")
    two, four = made_up(machine(2)), made_up(machine(4))
    for profile in (two, four, two):
        own = SharedProfile.of(tmp_path, host)
        assert own.file.name == "machine-1.json"
        own.joined(profile.families(), profile.machine.at)
        other = Sample("sharded ids", {"ranks": 2.0}, 1.0)
        if profile is four:
            SharedProfile.of(tmp_path, host).joined({"collectives": [other]}, {"ranks": 2.0})
    found = SharedProfile.of(tmp_path, host).profile
    assert found.samples["limits"]
    assert other in found.samples["collectives"], "what others measured stays"
    for profile in (two, four):
        read = MachineProfile.of(found.samples, profile.machine)
        assert read is not None
        assert [s.collective for s in read.collectives] == [s.collective for s in profile.collectives]
        assert read.machine == profile.machine
        pairs = zip(read.exchanges + read.lookups, profile.exchanges + profile.lookups, strict=True)
        for one, other in pairs:
            assert vars(one) == pytest.approx(vars(other))
    assert MachineProfile.of(found.samples, replace(machine(2), optimizer="exact_adagrad")) is None
    assert MachineProfile.of(found.samples, machine(3)) is None
    assert len(known_collectives(found.samples, 2, 1)) == 12
    with pytest.raises(UserError, match="has no measurements of 3 ranks"):
        saved_profile(tmp_path, 3, EmbOptimType.EXACT_SGD)
    assert saved_profile(tmp_path, 4, EmbOptimType.EXACT_SGD).machine.world == 4


def test_the_least_time_of_several_passes_counts() -> None:
    profile = made_up(machine(2))
    slow = [replace(s, forward=2 * s.forward, backward=s.backward / 2) for s in profile.lookups]
    least = MachineProfile.least([profile, replace(profile, lookups=slow)])
    assert least.exchanges == profile.exchanges
    assert [s.forward for s in least.lookups] == [s.forward for s in profile.lookups]
    assert [s.backward for s in least.lookups] == [s.backward for s in slow]


def test_a_clock_that_stood_still_measured_nothing() -> None:
    profile = made_up(machine(2))
    still = [replace(s, forward=0.0, backward=0.0) for s in profile.lookups]
    least = MachineProfile.least([replace(profile, lookups=still), profile])
    assert least == profile
    MachineProfile.least([replace(profile, lookups=still)]).check()
