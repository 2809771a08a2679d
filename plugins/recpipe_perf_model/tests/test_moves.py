"""Benchmarks of tiers and stores give what their models need, and the models find a machine's laws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from recpipe_perf_model.bench.lookups import PASSES, least, measure_lookups, measure_rows
from recpipe_perf_model.bench.tiers import measure_stores, measure_tiers, sizes
from recpipe_perf_model.kernels.linear import FEATURES, Linear, MoveTimes
from recpipe_perf_model.machine import Host, MachineProfile
from recpipe_perf_model.tests.test_tiered import facts, group
from recpipe_perf_model.tiers.tiered import Store

from recpipe.errors import UserError
from recpipe.plugin.store import StoreLayout
from recpipe.profiling.limits import Sample

NOT_HERE = {kind for kind in FEATURES if kind.startswith(("all_", "reduce_", "sharded ", "side "))}
"""Kinds that need several ranks."""


def profile(samples: list[Sample]) -> MachineProfile:
    return MachineProfile(Host.current(), "now", True, {"one": tuple(samples)})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """The quick form of all families here; stores are made in the current directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        families = (measure_lookups, measure_tiers, measure_stores, measure_rows)
        found = [sample for measure in families for sample in measure(True)]
        assert not list(Path.cwd().iterdir()), "nothing is left"
    return found


def test_every_kind_is_measured_with_the_sizes_that_its_model_needs(measured: list[Sample]) -> None:
    assert {sample.kind for sample in measured} == set(FEATURES) - NOT_HERE
    for sample in measured:
        assert sample.seconds > 0
        assert np.isfinite(FEATURES[sample.kind](sample.at)).all()
    times = MoveTimes.of(profile(measured))
    for sample in measured:
        assert times.seconds(sample.kind, sample.at) >= 0
    with pytest.raises(UserError, match="has no 'all_to_all': run recpipe perf calibrate"):
        times.seconds("all_to_all", {"bytes": 1.0, "ranks": 2.0})


def test_sizes_of_the_benchmark_are_those_that_are_predicted() -> None:
    """Of rows drawn from a whole table the benchmark counts what the prediction expects."""
    table = group(rows=100_000)
    layout = StoreLayout(("rows",), table.table_rows, 17)
    rows = np.random.default_rng(0).choice(100_000, 2_000, replace=False)
    store = Store(facts(share=0.0), table, MoveTimes({}))
    at, (blocks, requests) = sizes(layout, rows), store.touched(2_000, bridged=True)
    assert blocks == pytest.approx(at["blocks"], rel=0.1)
    assert requests == pytest.approx(at["requests"], rel=0.1)


def test_the_law_of_a_made_up_disk_is_found() -> None:
    """80 us for each call, 5 us for a request, 1 us for a block: also where nothing was measured."""

    def law(requests: float, blocks: float) -> float:
        return 80e-6 + 5e-6 * requests + 1e-6 * blocks

    random = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        requests, rows = (float(x) for x in random.integers(1, 3000, 2))
        blocks = requests * float(random.uniform(1, 4))
        at = {"rows": rows, "width": 17.0, "requests": requests, "blocks": blocks}
        samples.append(Sample("ssd read", at, law(requests, blocks)))
    model = Linear.fit(samples, FEATURES["ssd read"])
    at = {"rows": 10_000.0, "width": 17.0, "requests": 9_000.0, "blocks": 12_000.0}
    assert model.seconds(at) == pytest.approx(law(9_000, 12_000), rel=0.02)
    assert model.spread < 0.01
    noisy = [Sample(s.kind, s.at, s.seconds * random.uniform(0.5, 2)) for s in samples]
    assert Linear.fit(noisy, FEATURES["ssd read"]).spread > 0.2, "the spread tells noise"


def test_the_least_of_several_passes_counts() -> None:
    passes: list[int] = []

    def once(quick: bool) -> Iterator[Sample]:
        passes.append(len(passes))
        yield Sample("a", {}, 3.0 - passes[-1])
        yield Sample("b", {}, 1.0 + passes[-1])

    assert [sample.seconds for sample in least(once, False)] == [3.0 - (PASSES - 1), 1.0]
    passes.clear()
    assert [sample.seconds for sample in least(once, True)] == [3.0, 1.0], "the quick form has one pass"
