"""The machine's profile: what is saved comes back, what is damaged is refused, and collecting goes on where
it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recpipe_perf_model import calibrate as collecting
from recpipe_perf_model.calibrate import calibrate, contradicts, measured_again, recheck
from recpipe_perf_model.command import PERF
from recpipe_perf_model.machine import Host, MachineProfile, own_profile, profile_path
from recpipe_perf_model.profiled import StepModel
from recpipe_perf_model.show import shown

from recpipe.common.machine import Load
from recpipe.errors import UserError
from recpipe.profiling.limits import KINDS, Limits, Sample

HOST = Host("A CPU", "AVX2", 2, 2, "cpu", "2.13.0", "1.8.0", "1.8.0")
SAMPLES = (
    Sample("mm", {"m": 64.0, "dtype": "float32"}, 1e-5),
    Sample("mm", {"m": 128.0, "dtype": "float32"}, 2e-5),
)
PROFILE = MachineProfile(HOST, "2026-01-01T00:00:00+00:00", False, {"gemm": SAMPLES, "empty": ()})


def limits(row_rates: dict[int, float]) -> list[Sample]:
    products = [Sample(f"gemm {str(kind)[6:]}", {"amount": 8e9}, 2.0) for kind in KINDS]
    streams = [Sample("copy", {"amount": 10e9}, 1.0), Sample("read", {"amount": 30e9}, 2.0)]
    rows = [
        Sample(kind, {"row_bytes": float(size), "amount": rate / share}, 1.0)
        for kind, share in (("gather", 1), ("gather, one thread", 2))
        for size, rate in row_rates.items()
    ]
    return [*products, *streams, *rows]


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "machine.json"
    PROFILE.save(file)
    assert MachineProfile.load(file) == PROFILE
    assert json.loads(file.read_text())["schema"] == 2
    assert [path.name for path in file.parent.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-30], "no machine profile"),
        (lambda text: text.replace('"schema": 2', '"schema": 7'), "schema 7, not 2"),
        (lambda text: text.replace("1e-05", "-1e-05"), "-1e-05 seconds for mm"),
        (lambda text: text.replace("1e-05", '"soon"'), "samples.gemm"),
        (lambda text: text.replace('"cores": 2', '"cores": null'), "host.cores is None"),
        (lambda text: text.replace('"quick"', '"fast"'), "'fast', which is unknown"),
        (lambda text: "[]", "not a mapping"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(tmp_path: Path, change, says: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "machine.json"
    PROFILE.save(file)
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError) as refused:
        MachineProfile.load(file)
    told = str(refused.value)
    assert says in told
    assert str(file) in told
    assert "recpipe perf calibrate" in told
    assert "\n" not in told


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the machine profile .*gone\.json"):
        MachineProfile.load(tmp_path / "gone.json")


def test_another_host_is_told_in_words() -> None:
    assert HOST.differs(HOST) == []
    other = replace(HOST, threads=8, torch_version="2.11.0")
    assert HOST.differs(other) == ["threads: 8 there, 2 here", "torch version: 2.11.0 there, 2.13.0 here"]
    assert profile_path(HOST) != profile_path(other)


class Rig:
    """Two families; the second one can fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collecting.Host, "current", lambda: HOST)
        self.asked: list[tuple[str, bool]] = []
        self.fails = False
        self.families = {"first": self.first, "second": self.second}

    def first(self, quick: bool) -> Iterator[Sample]:
        self.asked.append(("first", quick))
        yield from SAMPLES

    def second(self, quick: bool) -> Iterator[Sample]:
        self.asked.append(("second", quick))
        yield SAMPLES[0]
        if self.fails:
            raise KeyboardInterrupt


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_collecting_goes_on_where_it_was_interrupted(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    rig.fails = True
    with pytest.raises(KeyboardInterrupt):
        calibrate(file, False, families=rig.families)
    assert list(MachineProfile.load(file).samples) == ["first"]
    rig.fails = False
    found = calibrate(file, False, families=rig.families)
    assert rig.asked == [("first", False), ("second", False), ("second", False)]
    assert found == MachineProfile.load(file)
    assert found.samples == {"first": SAMPLES, "second": SAMPLES[:1]}
    calibrate(file, False, families=rig.families)
    assert len(rig.asked) == 3


def test_the_full_form_replaces_the_quick_one_and_not_the_other_way(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    brief = calibrate(file, True, ["first"], rig.families)
    assert brief.quick
    replace(brief, samples={**brief.samples, "a plugin's": SAMPLES}).save(file)
    whole = calibrate(file, False, ["first"], rig.families)
    assert not whole.quick
    assert whole.samples["a plugin's"] == SAMPLES
    assert not calibrate(file, True, ["first"], rig.families).quick
    assert rig.asked == [("first", True), ("first", False)]


def test_another_machines_profile_and_an_unknown_family_are_refused(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    replace(PROFILE, host=replace(HOST, processor="Another CPU")).save(file)
    with pytest.raises(UserError, match="processor: Another CPU there, A CPU here"):
        calibrate(file, False, families=rig.families)
    with pytest.raises(UserError, match="did you mean first"):
        calibrate(tmp_path / "new.json", False, ["frist"], rig.families)
    assert rig.asked == []


class Machinery:
    """A family ``limits`` with this speed, on a machine of whose processors others take ``share``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collecting.Host, "current", lambda: HOST)
        monkeypatch.delenv("RECPIPE_BUSY", raising=False)
        self.speed, self.share, self.now, self.calls = 1.0, 0.0, Load(0, 0, 0), 0
        monkeypatch.setattr(Load, "now", lambda: self.now)
        self.families = dict.fromkeys(("limits", "gemm"), self.measure)

    def measure(self, quick: bool) -> Iterator[Sample]:
        self.calls += 1
        self.now = Load(self.now.busy + self.share, self.now.total + 1, 0)
        yield Sample("copy", {"amount": 1e9}, 1 / self.speed)
        yield Sample("read", {"amount": 1e9}, 2 / self.speed)


def test_what_was_measured_on_a_busy_machine_is_used_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, machine = tmp_path / "machine.json", Machinery(monkeypatch)
    machine.share = 0.4
    found = calibrate(file, True, families=machine.families)
    assert set(found.samples) == {"limits", "gemm"}
    assert found.disturbed["limits"] == "other programs took 40% of this machine's processors"
    assert machine.calls == 3 + 1, "a busy machine is not waited for again and again"
    assert MachineProfile.load(file).samples == {}
    assert "disturbed: other programs took 40%" in shown(found)
    machine.share, machine.calls = 0.0, 0
    found = calibrate(file, True, families=machine.families)
    assert (set(MachineProfile.load(file).samples), found.disturbed) == ({"limits", "gemm"}, {})
    assert machine.calls == 2 + 1, "gemm's passes agree by themselves"


def test_a_profile_that_a_step_contradicts_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, machine = tmp_path / "machine.json", Machinery(monkeypatch)
    assert recheck(file, machine.families) is None
    machine.speed = 0.1
    calibrate(file, False, families=machine.families)
    kept = MachineProfile.load(file)
    replace(kept, samples={**kept.samples, "a plugin's": SAMPLES}).save(file)
    found = recheck(file, machine.families)
    assert found is not None
    assert found.fresh
    assert "the prediction is off" in found.words
    machine.speed, machine.share = 1.0, 0.5
    found = recheck(file, machine.families)
    assert found is not None
    assert not found.fresh
    assert "cannot be measured again now: other programs took 50%" in found.words
    assert MachineProfile.load(file).samples["limits"] == kept.samples["limits"]
    machine.share = 0.0
    found = recheck(file, machine.families)
    assert found is not None
    assert "was stale" in found.words
    fresh = MachineProfile.load(file)
    assert [sample.seconds for sample in fresh.samples["limits"]] == [1, 2]
    assert fresh.samples["gemm"] == fresh.samples["limits"]
    assert fresh.samples["a plugin's"] == SAMPLES


def test_some_families_are_measured_again_and_kept_if_nothing_disturbs_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, machine = tmp_path / "machine.json", Machinery(monkeypatch)
    calibrate(file, False, families=machine.families)
    before = MachineProfile.load(file)
    machine.speed, machine.share = 2.0, 0.5
    found = measured_again(file, ("limits",), machine.families)
    assert [sample.seconds for sample in found.samples["limits"]] == [0.5, 1]
    assert set(found.disturbed) == {"limits"}
    assert MachineProfile.load(file) == before
    machine.share = 0.0
    assert not measured_again(file, ("limits",), machine.families).disturbed
    after = MachineProfile.load(file)
    assert [sample.seconds for sample in after.samples["limits"]] == [0.5, 1]
    assert after.samples["gemm"] == before.samples["gemm"]


@pytest.mark.parametrize(
    ("predicted", "measured", "disturbed", "expected"),
    [(1.0, 1.4, False, False), (1.0, 1.6, False, True), (1.0, 9.0, True, False), (1.6, 1.0, True, True)],
)
def test_a_contradiction(predicted: float, measured: float, disturbed: bool, expected: bool) -> None:
    assert contradicts(predicted, measured, disturbed) is expected


def test_random_numbers_and_threads_stay_as_they_were(rig: Rig, tmp_path: Path) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()

    def draws(quick: bool) -> Iterator[Sample]:
        torch.rand(3)
        yield SAMPLES[0]

    calibrate(tmp_path / "machine.json", False, families={"draws": draws})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_limits_of_rows_between_two_sizes() -> None:
    """By logarithms: of 64 and 256 bytes at 1 and 4 GB/s, 128 bytes have 2 GB/s; beyond them the nearest."""
    samples = limits({64: 1e9, 256: 4e9})
    found = Limits.of(samples, 128, 2)
    assert found is not None
    assert found.gather_bytes_per_s == pytest.approx(2e9)
    assert found.gather_bytes_per_s_one_thread == pytest.approx(1e9)
    assert found.gemm_flops_per_s == {"float32": 4e9, "bfloat16": 4e9}
    assert found.stream_bytes_per_s == 15e9
    ends = [Limits.of(samples, size, 2) for size in (4, 4096)]
    assert [end.gather_bytes_per_s for end in ends if end] == pytest.approx([1e9, 4e9])
    for lacking in range(len(samples[:4])):
        assert Limits.of(samples[:lacking] + samples[lacking + 1 :], 64, 2) is None


def test_the_limits_in_this_machines_profile_are_those_of_the_floor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu, model = torch.device("cpu"), StepModel()
    assert own_profile(Host.current()) is None
    assert model.limits(64, cpu) is None
    samples = tuple(limits({64: 1e9}))
    replace(PROFILE, host=Host.current(), samples={"limits": samples}).save(profile_path(Host.current()))
    assert model.limits(64, cpu) == Limits.of(samples, 64, torch.get_num_threads())
    replace(PROFILE, host=Host.current()).save(profile_path(Host.current()))
    assert model.limits(64, cpu) is None


def test_what_a_profile_says_in_one_screen() -> None:
    text = shown(
        replace(PROFILE, quick=True, samples={**PROFILE.samples, "limits": tuple(limits({64: 1e9}))})
    )
    assert text.splitlines() == [
        "A CPU, 2 cores, 2 threads, AVX2, cpu",
        "torch 2.13.0, torchrec 1.8.0, fbgemm 1.8.0",
        "measured 2026-01-01T00:00:00+00:00, in the quick form",
        "",
        "matrix products, GFLOP/s       float32 4, bfloat16 4",
        "copy and read, GB/s            10.0, 15.0",
        "random rows of 64 bytes, GB/s  1.00, in one thread 0.50",
        "",
        "gemm               2 samples",
        "empty              0 samples",
        "limits             6 samples",
    ]


@pytest.mark.parametrize("words", [[], ["calibrate", "--fast"], ["shw"], ["show", "more"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="say recpipe perf calibrate"):
        PERF.run("perf", words)


def test_a_machine_that_was_not_measured_has_nothing_to_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="run recpipe perf calibrate"):
        PERF.run("perf", ["show"])
