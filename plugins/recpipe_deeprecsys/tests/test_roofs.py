"""Roofs of a machine that does not exist: which limit bounds what, and limits that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recpipe_deeprecsys.characterize import roofs
from recpipe_deeprecsys.characterize.config import CharacterizeConfig
from recpipe_deeprecsys.characterize.operators import FC, FORWARD, VIEWS, Call, Timed
from recpipe_deeprecsys.characterize.roofs import Machine, Roofs, Work
from recpipe_deeprecsys.characterize.steps import Stepped
from recpipe_deeprecsys.characterize.task import told_model
from recpipe_deeprecsys.characterize.told import told_steps
from recpipe_perf_model.bench.caches import FOOTPRINTS, TABLES, measure_caches
from recpipe_perf_model.machine import Host, MachineProfile

from recpipe.profiling.limits import Sample

PEAK, CACHE, MEMORY, ROWS = 1e11, 5e10, 1e10, 4e9
SMALL, LARGE = 2.0**18, 2.0**28


def samples(faster: float = 1.0) -> Iterator[Sample]:
    """As the micro-benchmarks give them: a product, streams, and rows of two sizes."""
    for dtype, times in (("float32", 1.0), ("bfloat16", 2.0)):
        yield Sample(f"gemm {dtype}", {"amount": PEAK * times * faster}, 1.0)
    yield Sample("copy", {"amount": 1e20}, 1.0)  # not one of these roofs
    for footprint, speed in ((2.0**16, CACHE / 2), (SMALL, CACHE), (2.0**24, 2 * MEMORY), (LARGE, MEMORY)):
        yield Sample("stream", {"footprint": footprint, "amount": speed * faster}, 1.0)
    for footprint, times in ((SMALL, 5.0), (LARGE, 1.0)):
        for size in (64.0, 256.0):
            at = {"footprint": footprint, "row_bytes": size, "amount": times * faster * ROWS * size / 64}
            yield Sample("rows at random", at, 1.0)


ROOFS = Roofs.of(samples(), 2)


@pytest.mark.parametrize(
    ("work", "seconds", "bound"),
    [
        (Work(1e9, 1e6, 0, 2**28), 1e9 / PEAK, "arithmetic"),
        (Work(1e9, 1e6, 0, 2**28, "bfloat16"), 1e9 / PEAK / 2, "arithmetic"),
        (Work(1e6, 1e9, 0, 2**28), 1e9 / MEMORY, "memory"),
        (Work(1e6, 1e9, 0, 2**18), 1e9 / CACHE, "cache"),
        (Work(1e6, 1e9, 0, 2**23), 1e9 / CACHE, "cache"),  # it may still fit the smaller cache
        (Work(1e6, 0, 1e9, 2**28, row_bytes=64), 1e9 / ROWS, "random rows"),
        (Work(1e6, 0, 1e9, 2**28, row_bytes=128), 1e9 / ROWS / 2, "random rows"),
        (Work(1e12, 0, 1e9, 2**28, "int64", row_bytes=256), 1e9 / MEMORY, "memory"),
        (Work(), 0.0, "call"),
    ],
)
def test_the_longest_of_the_least_times_bounds(work: Work, seconds: float, bound: str) -> None:
    least, found = ROOFS.least(work)
    assert found == bound
    assert least == pytest.approx(seconds)


def test_a_small_streams_call_does_not_lower_the_roof() -> None:
    assert ROOFS.stream_rate(2**16) == CACHE
    assert ROOFS.stream_rate(1) == CACHE
    assert ROOFS.stream_rate(2**40) == MEMORY


def test_the_best_of_two_measurements_counts() -> None:
    assert Roofs.of([*samples(0.5), *samples()], 2) == ROOFS == Roofs.of([*samples(), *samples(0.5)], 2)


def row(seconds: float, flops: float, moved: float, name: str = "addmm", calls: float = 1) -> Timed:
    weights = flops / 128
    work = Work(flops, moved, 0.0, LARGE, weights=weights)
    return Timed(Call(FC, name, FORWARD, "MLP", "64 x 2 x 3"), work, calls, seconds)


VIEW = Timed(Call("other", VIEWS, FORWARD, "MLP", ""), Work(), 10, 1e-5)


def test_shares_are_of_the_whole_step_and_classes_add_up() -> None:
    found = told_steps(64, Stepped(0.01, [row(4e-3, 1e8, 1e6), row(2e-3, 1e7, 1e7), VIEW], 5), ROOFS)
    shares = [each["share"] for each in found["classes"].values()]
    assert sum(shares) + found["between"]["share"] == pytest.approx(1)
    own = found["classes"]["FC"]
    assert own["share"] == pytest.approx(0.6)
    assert own["share_of_operators"] == pytest.approx(6e-3 / 6.01e-3)
    assert own["per_weight"] == pytest.approx(128)
    assert own["least_seconds"] == pytest.approx(1e8 / PEAK + 1e7 / MEMORY)
    assert [each["bound"] for each in found["operators"]] == ["arithmetic", "memory", "call"]
    assert found["operators"][0]["of_roof"] == pytest.approx(0.25)
    assert found["operators"][1]["roof_flops_per_s"] == pytest.approx(MEMORY)  # an operation a byte
    assert not found["above"]


def test_many_short_calls_are_bound_by_being_called() -> None:
    found = told_steps(1, Stepped(1e-3, [row(1e-4, 1e6, 1e4, calls=20), VIEW], 5), ROOFS)
    assert found["call_seconds"] == pytest.approx(1e-6)
    assert found["operators"][0]["bound"] == "call"
    found = told_steps(1, Stepped(1e-3, [row(1e-4, 1e6, 1e4), VIEW], 5), ROOFS)
    assert found["operators"][0]["bound"] == "arithmetic"


class Told:
    """A machine whose limits are told, and others when they are measured again."""

    def __init__(self, again: float) -> None:
        self.roofs, self.again, self.disturbed, self._then = ROOFS, False, "", again

    def measure_again(self) -> None:
        self.again = True
        self.roofs = Roofs.of([*samples(), *samples(self._then)], 2)


@pytest.mark.parametrize(
    ("seconds", "then", "again", "above"),
    [(1.1e-3, 1.0, False, 0), (0.97e-3, 1.0, False, 0), (0.8e-3, 1.3, True, 0), (0.8e-3, 1.0, True, 1)],
)
def test_an_operator_above_its_roof_has_the_limits_measured_anew(
    seconds: float, then: float, again: bool, above: int
) -> None:
    """Its least time is 1 ms: 5% less is the clock's; what is still above then is said."""
    machine = Told(then)
    stepped = Stepped(2e-3, [row(seconds, 1e8, 1e6)], 5)
    found = told_model("m", CharacterizeConfig(), [64], lambda size: stepped, machine)  # type: ignore[arg-type]
    assert found["measured_again"] == machine.again == again
    assert len(found["batches"][0]["above"]) == above


def test_a_machine_without_a_profile_is_measured_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And one whose profile lacks a family, of that alone; what disturbed it is told."""
    limits = {"limits": tuple(samples()), "caches": tuple(samples())}
    whole = MachineProfile(Host.current(), "then", False, limits, {"caches": "other programs"})
    asked: list[Any] = []

    def calibrated(file: Path, quick: bool, only: Any) -> MachineProfile:
        asked.append((quick, only))
        return whole

    monkeypatch.setattr(roofs, "calibrate", calibrated)
    monkeypatch.setattr(roofs, "profile_path", lambda host: tmp_path / "machine.json")
    for known in (None, replace(whole, samples={"limits": limits["limits"]})):
        monkeypatch.setattr(roofs, "own_profile", lambda host, known=known: known)
        found = Machine()
        assert (found.roofs.stream, found.disturbed) == (ROOFS.stream, "other programs")
    assert asked == [(True, roofs.FAMILIES), (False, roofs.FAMILIES)]
    monkeypatch.setattr(roofs, "own_profile", lambda host: whole)
    again = replace(whole, samples={name: tuple(samples(1.5)) for name in limits}, disturbed={})
    monkeypatch.setattr(roofs, "measured_again", lambda file, only: again)
    found = Machine()
    found.measure_again()
    assert (found.again, found.disturbed) == (True, "")
    assert found.roofs.products["float32"] == 1.5 * PEAK
    assert len(asked) == 2


def test_the_caches_benchmark_has_what_roofs_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quick form, with calls that are not repeated."""
    monkeypatch.setattr("recpipe.profiling.limits.REPEATS", 1)
    monkeypatch.setattr("recpipe.profiling.limits.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("recpipe_perf_model.bench.caches.FOOTPRINTS", FOOTPRINTS[:3])
    monkeypatch.setattr("recpipe_perf_model.bench.caches.TABLES", TABLES[:1])
    found = Roofs.of(measure_caches(True), 1)
    assert [footprint for footprint, _ in found.stream] == [2.0**16, 2.0**18, 2.0**20]
    assert set(found.rows) == {64.0, 256.0}
    rates = [rate for _, rate in found.stream]
    assert rates == sorted(rates, reverse=True)
    assert all(rate > 0 for own in found.rows.values() for _, rate in own)
