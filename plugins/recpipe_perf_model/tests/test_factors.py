"""Factors of a step's parts, from probes of machines that do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from recpipe_perf_model.bench import steps as bench
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.step.amounts import Amounts, Factors
from recpipe_perf_model.step.capture import Part, captured
from recpipe_perf_model.step.step import (
    FAMILY,
    Step,
    fitted_factors,
    parse_step,
    predict_resident,
    step_amounts,
    step_text,
    told,
)
from recpipe_perf_model.tests.synthetic import profile
from recpipe_perf_model.tests.test_capture import BATCH, SAMPLES, dlrm

from recpipe.common.device import using_threads
from recpipe.errors import UserError
from recpipe.profiling.limits import Sample

BASE = Amounts(profile())


def probe(step: Step, truth: Factors, noise: float = 1.0) -> Sample:
    seconds = predict_resident(step, BASE.corrected(truth)).step.seconds
    return Sample("probe", {"step": step_text(step)}, seconds * noise)


def larger(step: Step, times: int) -> Step:
    """The step of a model whose operators have so many times as many samples."""

    def grown(at: Mapping[str, float | str]) -> dict[str, float | str]:
        sizes = ("m", "bytes", "footprint", "elements")
        return {name: float(value) * times if name in sizes else value for name, value in at.items()}

    def part(old: Part) -> Part:
        operators = tuple(
            tuple(replace(each, at=grown(each.at)) for each in stage) for stage in old.operators
        )
        return replace(old, operators=operators)

    found = step.captured
    whole, shares = part(found.whole), tuple(map(part, found.shares))
    return replace(step, captured=replace(found, whole=whole, shares=shares))


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """Steps from those that are mostly Python to those that are mostly products, shared and not."""
    with using_threads(2):
        one = Step(captured(dlrm(), BATCH, [16, SAMPLES]), shared=False)
    return [
        replace(larger(one, times), shared=shared)
        for times in (1, 40, 400, 4000, 40_000)
        for shared in (False, True)
    ]


def fitted(samples: list[Sample]) -> Factors:
    full = profile()
    return fitted_factors(replace(full, samples={**full.samples, FAMILY: tuple(samples)}), BASE)


def test_a_step_is_the_same_after_it_was_text(steps: list[Step]) -> None:
    assert parse_step(step_text(steps[1])) == steps[1]


def test_probes_that_take_what_is_predicted_need_no_factors(steps: list[Step]) -> None:
    found = fitted([probe(step, Factors()) for step in steps])
    assert [found.python, found.kernels, found.shared, found.tables] == pytest.approx([1.0] * 4, abs=1e-3)


def test_the_factors_of_a_machine_come_back(steps: list[Step]) -> None:
    truth = Factors(python=1.8, kernels=1.15, shared=1.3, tables=1.0)
    samples = [probe(step, truth) for step in steps]
    found = fitted(samples)
    assert found.python == pytest.approx(1.8, rel=0.1)
    assert found.kernels == pytest.approx(1.15, rel=0.1)
    assert found.shared > 1.05
    unseen = larger(steps[6], 3)
    expected = predict_resident(unseen, BASE.corrected(truth)).step.seconds
    assert predict_resident(unseen, BASE.corrected(found)).step.seconds == pytest.approx(expected, rel=0.05)
    # Without factors it is not.
    assert predict_resident(unseen, BASE).step.seconds < 0.93 * expected


def test_python_is_slower_in_a_step_that_leaves_the_caches() -> None:
    """Between 256 KiB and 64 MiB the factor grows with the bytes: at 4 MiB it is its square root."""
    machine = BASE.corrected(Factors(python=2.25))
    found = [machine.among(touched).factors.python for touched in (0.0, 2.0**17, 2.0**22, 2.0**30)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 2.25])
    assert machine.among(2.0**30).overhead("loop") == pytest.approx(2.25 * BASE.overhead("loop"))


def test_one_strange_probe_hardly_moves_the_factors_and_widens_the_range(steps: list[Step]) -> None:
    samples = [probe(step, Factors()) for step in steps]
    strange = [replace(samples[0], seconds=1.5 * samples[0].seconds), *samples[1:]]
    calm, moved = fitted(samples), fitted(strange)
    assert moved.kernels == pytest.approx(1.0, abs=0.05)
    assert moved.error > calm.error + 0.02
    ranges = [predict_resident(steps[4], BASE.corrected(each)).step for each in (calm, moved)]
    widths = [each.high / each.low for each in ranges]
    assert widths[1] > widths[0]


def test_few_probes_leave_factors_near_one(steps: list[Step]) -> None:
    found = fitted([probe(steps[6], Factors(), 1.3)])
    assert 1.0 < found.kernels < 1.3
    assert found.shared == pytest.approx(1.0)


def test_a_profile_without_probes_says_what_to_run(steps: list[Step]) -> None:
    full = profile()
    with pytest.raises(
        UserError, match="no samples of steps: run recpipe perf calibrate, which measures only"
    ):
        step_amounts(full)
    for at in ({}, {"step": "{}"}, {"step": "no json"}):
        broken: MachineProfile = replace(full, samples={**full.samples, FAMILY: (Sample("probe", at, 1.0),)})
        with pytest.raises(UserError, match="samples of steps are damaged"):
            step_amounts(broken)


def test_what_is_left_is_told(steps: list[Step]) -> None:
    found = fitted([probe(step, Factors(python=1.5)) for step in steps])
    assert "python 1." in told(found)
    assert 0.08 < found.error < 0.15
    assert f"an error of {found.error:.0%} is left" in told(found)


def test_a_probe_is_trained_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = bench.Probe(64, 3, 50, 4, (8,), (8,))
    shared = replace(tiny, shared=True)
    monkeypatch.setattr(bench, "PROBES", (tiny, shared, replace(tiny, converted=False, crosses=1)))
    monkeypatch.setattr(bench, "STEPS", 4)
    with using_threads(2):
        found = list(bench.measure_steps(quick=True))
    assert [sample.kind for sample in found] == ["probe"] * 3
    assert all(sample.seconds > 0 for sample in found)
    one, two, three = (parse_step(str(sample.at["step"])) for sample in found)
    assert (one.captured.samples, one.shared, one.beside) == (64, False, True)
    assert [part.samples for part in two.captured.shares] == [32, 32]
    assert not any(two.captured.whole.operators)
    assert not one.captured.shares
    assert any(operator.kind == "mm nn" for operator in three.captured.whole.operators[2])
    assert not three.beside
    assert torch.get_num_threads() >= 1
