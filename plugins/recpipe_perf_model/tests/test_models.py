"""Kernel models on the samples of machines that do not exist: laws come back, and far away nothing grows
wild."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from recpipe_perf_model.kernels.models import NOISE, Errors, GaussianProcess, KernelModels
from recpipe_perf_model.kernels.operators import optimizer_sizes
from recpipe_perf_model.step.amounts import Amounts
from recpipe_perf_model.tests.synthetic import BYTES, CALL, FLOPS, OVERHEADS, passed, product, profile

from recpipe.errors import UserError
from recpipe.profiling.limits import Sample

MODELS = KernelModels.of(profile())


@pytest.mark.parametrize("threads", [1.0, 2.0])
def test_products_of_other_sizes_take_what_the_law_says(threads: float) -> None:
    for m, n, k in ((100, 200, 300), (1024, 512, 256), (2048, 1000, 1000), (64, 1, 512)):
        expected = product("addmm", m, n, k, threads)
        assert MODELS.seconds("addmm", expected.at) == pytest.approx(expected.seconds, rel=0.12)


def test_passes_take_what_the_law_says() -> None:
    for elements in (1000.0, 50_000.0, 3e6):
        expected = passed("cat", elements, 1.0)
        assert MODELS.seconds("cat", expected.at) == pytest.approx(expected.seconds, rel=0.12)


def test_larger_products_take_longer_also_beyond_all_samples() -> None:
    times = [MODELS.seconds("mm nn", product("mm nn", m, 512, 512, 1.0).at) for m in 2 ** np.arange(5, 20)]
    assert all(after > before for before, after in pairwise(times))
    largest = 2.0 * 2**19 * 512 * 512 / FLOPS
    assert times[-1] == pytest.approx(CALL + largest, rel=0.3)


def test_of_other_types_and_kinds_the_nearest_is_taken() -> None:
    at = passed("cat", 1e5, 1.0).at
    assert MODELS.seconds("cat", {**at, "dtype": "float16"}) == MODELS.seconds("cat", at)
    assert MODELS.seconds("an unknown kind", at) == MODELS.seconds("elementwise", at)
    assert not MODELS.knows("an unknown kind", at)
    layer = product("addmm", 300, 300, 300, 1.0)
    others = KernelModels(s for s in profile().samples["gemm"] if s.kind != "mm nt")
    assert others.seconds("mm nt", layer.at) == others.seconds("addmm", layer.at)
    with pytest.raises(UserError, match="no samples of 'cat' with 64 threads"):
        MODELS.seconds("cat", {**at, "threads": 64.0})


def test_a_profile_without_a_family_says_which() -> None:
    full = profile()
    without = {name: samples for name, samples in full.samples.items() if name != "pointwise"}
    with pytest.raises(UserError, match="no samples of pointwise: run recpipe perf calibrate"):
        KernelModels.of(replace(full, samples=without))


def test_held_out_errors_are_small_on_a_law_and_large_on_noise() -> None:
    found = MODELS.held_out()
    assert found["addmm"].count == 48
    assert all(errors.gmae < 0.06 for errors in found.values()), found
    random = np.random.default_rng(2)
    wild = [
        Sample("mm nn", product("mm nn", *sizes, 1.0).at, float(random.uniform(1e-5, 1e-2)))
        for sizes in 2 ** random.uniform(4, 11, (40, 3))
    ]
    assert KernelModels(wild).held_out()["mm nn"].gmae > 0.3


def test_twins_of_one_shape_are_held_out_together() -> None:
    """Times that depend on the shape alone, at random: its twin would tell them, other shapes do not."""
    random = np.random.default_rng(3)
    twins = [
        replace(sample, at={**sample.at, "reuse": reuse}, seconds=seconds)
        for sample in (passed("cat", float(size), 1.0) for size in 2 ** random.uniform(10, 20, 40) // 1)
        for seconds in [sample.seconds * float(random.uniform(0.2, 5))]
        for reuse in (2.0**24, 2.0**24 + 4096)
    ]
    assert KernelModels(twins).held_out()["cat"].gmae > 0.3


def test_a_disturbed_sample_does_not_alter_its_neighbours() -> None:
    random = np.random.default_rng(4)
    samples = [passed("cat", float(size), 1.0) for size in 2 ** random.uniform(10, 20, 60) // 1]
    at = samples[7].at
    disturbed = [replace(s, seconds=s.seconds * (30 if n == 7 else 1)) for n, s in enumerate(samples)]
    usual, found = (KernelModels(each).seconds("cat", at) for each in (samples, disturbed))
    assert found == pytest.approx(usual, rel=0.1)
    others = [replace(s, seconds=s.seconds / (30 if n == 7 else 1)) for n, s in enumerate(samples)]
    assert KernelModels(others).seconds("cat", at) < 0.9 * usual


def test_errors_by_hand() -> None:
    errors = Errors.of([1.1, 0.6, 2.0], [1.0, 1.0, 1.0])
    assert errors.count == 3
    assert errors.mape == pytest.approx(1.5 / 3)
    assert errors.gmae == pytest.approx((0.1004 * 0.4004 * 1.0004) ** (1 / 3))
    assert errors.p90 == pytest.approx(0.4 + 0.8 * 0.6)


def test_overheads_and_optimizers() -> None:
    amounts = Amounts(profile())
    for kind, seconds in OVERHEADS.items():
        assert amounts.overhead(kind) == pytest.approx(seconds)
    assert amounts.kernels.seconds("step", {"elements": 11.0}) == pytest.approx(2.1e-4, rel=0.05)
    at = optimizer_sizes("Adam", 10, 100_000)
    adam = amounts.optimizer("Adam", at, 1)
    assert amounts.optimizer("LBFGS", at, 1) == adam
    assert adam == pytest.approx(CALL + float(at["bytes"]) / BYTES, rel=0.5)


def places(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 8, (count, 2))


def wave(at: np.ndarray) -> np.ndarray:
    return 0.3 * np.sin(at[:, 0])


def far_off(process: GaussianProcess) -> float:
    """The root mean square of its errors at places that it does not know."""
    errors = [process.at(place) - float(wave(place[None])[0]) for place in places(40, 1)]
    return float(np.sqrt(np.mean(np.square(errors))))


def test_a_smooth_function_comes_back_and_far_away_nothing_is_known() -> None:
    known = places(80)
    process = GaussianProcess(known, wave(known))
    assert far_off(process) < 0.4 * NOISE
    assert process.at(np.array([1000.0, 1000.0])) == pytest.approx(0.0, abs=1e-6)


def test_noise_is_smoothed() -> None:
    known = places(300)
    noise = NOISE * np.random.default_rng(2).standard_normal(len(known))
    assert far_off(GaussianProcess(known, wave(known) + noise)) < 0.6 * NOISE


def test_a_sample_far_above_what_the_others_say_is_left_out() -> None:
    known = places(80)
    disturbed = wave(known)
    disturbed[7] += 10 * NOISE
    process, without = (
        GaussianProcess(known, disturbed),
        GaussianProcess(np.delete(known, 7, 0), np.delete(disturbed, 7)),
    )
    assert process.at(known[7]) == pytest.approx(without.at(known[7]), abs=1e-12)
    low = wave(known)
    low[7] -= 10 * NOISE  # nothing makes a machine faster than it is
    assert GaussianProcess(known, low).at(known[7]) < without.at(known[7]) - NOISE
