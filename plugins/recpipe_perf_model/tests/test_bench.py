"""Micro-benchmarks: each times one operator, of the kind and sizes that it is meant to have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from recpipe_perf_model.bench import loops, operators, overheads, timing
from recpipe_perf_model.bench.timing import Make, OperatorClock
from recpipe_perf_model.kernels.models import LOOPS
from recpipe_perf_model.kernels.operators import FREE, Operator, watched

from recpipe.backend.matmul import has_onednn
from recpipe.common.device import using_threads

FLOAT = torch.float32


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Iterator[OperatorClock]:
    monkeypatch.setattr(timing, "SPREADS", (0.0, 2.0**12))
    monkeypatch.setattr(timing, "ROUNDS", (1, 1))
    monkeypatch.setattr(timing, "PASSES", (2, 2))
    with using_threads(2), closing(OperatorClock(1)) as made:
        yield made


def kinds(makes: list[Make]) -> list[str]:
    """The kind of each call's operator; a call of several is told by all of them."""
    found = []
    for make in makes:
        ran = watched(make())
        work = [each.kind for each in ran if each.kind not in FREE] or [ran[0].kind]
        found.append(" and ".join(work))
    return found


def test_a_layer_and_an_interaction_have_the_products_of_a_step() -> None:
    own = ["addmm", "mm nn", "mm tn", *(["linear"] if has_onednn() else [])]
    assert kinds(operators.layer(16, 5, 7, FLOAT)) == own
    assert kinds(operators.interaction(4, 3, 8, FLOAT)) == ["bmm nt", "bmm nn", "bmm tn"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_pass_is_one_operator(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(operators, "SAMPLES", (16, 17))
    random = np.random.default_rng(0)
    for makes in (operators.matrices, operators.joins):
        for kind in kinds(makes(random, dtype)):
            assert " and " not in kind, kind
    vectors = kinds(operators.vectors(random))
    assert vectors == ["loss", "math", "elementwise", "sum", "view", "empty"]


def test_each_loop_is_seen_as_one() -> None:
    random = np.random.default_rng(0)
    made = [*loops.pairs(random), *loops.crosses(random)]
    found = [loops.loop_of(make) for make in made]
    assert tuple(each.kind for each in found) == LOOPS
    assert all(float(each.at["elements"]) > 0 for each in found)


def test_draws_are_the_same_each_time_and_bounded() -> None:
    layers = operators.draws(40, 1)
    assert layers == operators.draws(40, 1) != operators.draws(40, 2)
    assert all(2 * b * i * o <= operators.MOST_FLOPS for b, i, o in layers)
    assert min(b for b, _, _ in layers) < 64 < 2048 < max(b for b, _, _ in layers)


def test_samples_say_threads_and_how_far_memory_is(timer: OperatorClock) -> None:
    found = list(timer.samples([lambda: torch.ones(32, 64).sum, lambda: torch.ones(8).view(2, 4).t]))
    assert [(sample.kind, sample.at["threads"]) for sample in found] == [
        ("sum", 2.0), ("sum", 1.0), ("view", 2.0), ("view", 1.0),
    ]  # fmt: skip
    footprint = 4 * (32 * 64 + 1)
    assert {sample.at["reuse"] for sample in found[:2]} <= {footprint, footprint + 2**12}
    assert all(sample.seconds > 0 for sample in found)


def test_passes_go_on_until_the_two_fastest_agree(
    timer: OperatorClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first operator's second pass is disturbed; the second's passes never agree."""
    monkeypatch.setattr(timing, "PASSES", (2, 6))
    times = {"view": [1.0, 2.0, 1.04], "sum": [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]}
    left, order = {kind: iter(each) for kind, each in times.items()}, []

    def seconds(operator: Operator, make: Make, spread: float) -> float:
        order.append(operator.kind)
        return next(left[operator.kind])

    monkeypatch.setattr(timer, "_seconds", seconds)
    monkeypatch.setattr(timer, "modes", (1,))
    longer = (1 * 2 * 6 * 5) ** 0.25  # the first two passes of both
    found = list(timer.timed((Operator(kind, {}, kind), partial(torch.ones, 1)) for kind in times))
    assert [sample.seconds for sample in found] == pytest.approx([longer, longer])
    assert order == [*["view", "sum"] * 3, "sum", "sum", "sum"]


def test_a_call_of_several_operators_is_left_out(timer: OperatorClock) -> None:
    x = torch.ones(4)
    assert not list(timer.samples([lambda: lambda: (x + x) * x]))


def test_one_thread_has_one_mode() -> None:
    with using_threads(1), closing(OperatorClock()) as timer:
        assert timer.modes == (1,)


def test_the_other_cores_end_also_after_a_fault(timer: OperatorClock) -> None:
    timer.modes = (1,)
    calls = 0

    def fails() -> None:
        nonlocal calls
        calls += 1
        if calls > 2:  # it runs twice alone, to see how long it takes
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        list(timer.timed([(Operator("sum", {}, "sum"), lambda: fails)]))
    assert [s.kind for s in timer.samples([lambda: torch.ones(4).sum])] == ["sum"]


def test_overheads_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "ROUNDS", 1)
    monkeypatch.setattr(overheads, "STEPS", 80)
    monkeypatch.setattr(overheads, "PARAMETERS", ((1, 8),))
    monkeypatch.setattr(timing, "SPREADS", (0.0,))
    monkeypatch.setattr(timing, "ROUNDS", (1, 1))
    monkeypatch.setattr(timing, "PASSES", (2, 2))
    with using_threads(2):
        found = list(overheads.measure_overheads(quick=True))
    optimizers = [f"optimizer {name}" for name in ("SGD", "Adagrad", "Adam") for _ in range(2)]
    alone = ["recorded", "node", "function", "call", "step", "step", "hand over", "wake", "loop"]
    assert [sample.kind for sample in found] == [*alone, *optimizers]
    assert all(sample.seconds > 0 for sample in found)
