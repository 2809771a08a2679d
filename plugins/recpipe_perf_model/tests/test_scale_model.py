"""Scale on paper: closed forms of bytes and times, plans that fit, what faster machines cannot make
slower."""

from __future__ import annotations

from dataclasses import fields, replace
from math import isfinite
from time import perf_counter

import numpy as np
import pytest
from recpipe_perf_model.scale.machine import ASSUMED, MACHINES, Constants, Curve, machine
from recpipe_perf_model.scale.model import (
    MODELS,
    PaperModel,
    Table,
    covered,
    dense_of,
    distinct,
    paper_model,
    skew_of,
    weight,
)
from recpipe_perf_model.scale.placing import (
    ROWS,
    WHOLE,
    Plan,
    Room,
    Training,
    all_reduce,
    all_to_all,
    make_plan,
    part_load,
    tiered,
)
from recpipe_perf_model.scale.predict import Prediction, predict, product_seconds, room_of, task_seconds

from recpipe.errors import UserError

DENSE = dense_of([8, 8], 4, [16, 8], "dot", (1, 1), [16, 1])
SMALL = PaperModel("small", "two tables", (Table("a", 1000, 8), Table("b", 500, 8)), DENSE, "sgd", 64, 4)


def training(model: PaperModel = SMALL, gpus: int = 1, batch: int = 64, **changes: float) -> Training:
    return Training(model, machine("a100_hgx").changed(changes), gpus, batch)


def predicted(model: PaperModel, gpus: int, batch: int, tiers: str = "hbm", **changes: float) -> Prediction:
    return predict(training(model, gpus, batch, **changes), tiers)


def one_table(**changes: object) -> PaperModel:
    table = replace(Table("big", 10**9, 64, 4.0, 0.9), **changes)  # type: ignore[arg-type]
    return replace(SMALL, tables=(table,), dense=dense_of([table.dim], 4, [64, 64], "dot", (1, 1), [64, 1]))


# Messages.


def test_one_gpu_sends_nothing() -> None:
    found = predicted(SMALL, 1, 64)
    assert (found.plan.near, found.plan.far, found.plan.reduced, found.plan.ids) == (0, 0, 0, 0)
    sent = ("ids", "vectors", "row gradients", "all-reduce")
    assert all(found.seconds[name] == 0 for name in sent)
    waited = {name for name, seconds in found.bounds.items() if seconds}
    assert not waited & {"id messages", "row messages", "all-reduce"}
    assert any(predicted(SMALL, 8, 64).seconds[name] > 0 for name in sent)  # control


def test_bytes_of_whole_tables() -> None:
    """4 samples, 8 values of 4 bytes: half of a table's vectors go to the other of two GPUs, with half of the
    ids having come from there."""
    load = part_load(training(gpus=2, batch=4), Table("a", 1000, 8, 3.0), WHOLE, 1)
    assert (load.near, load.far) == (4 * 8 * 4 / 2, 0)
    assert load.ids == 4 * 3 * 8 / 2
    assert load.lookups == 12
    assert load.memory == 1000 * 8 * 4
    each = part_load(training(gpus=2, batch=4), Table("a", 1000, 8, 3.0, pooled=False), WHOLE, 1)
    assert each.near == 3 * load.near  # rows that are not added up


def test_bytes_of_row_parts_of_one_host_of_two() -> None:
    """8 row parts of a host add up before anything leaves it: 1/8 of the vectors a GPU, half of it abroad."""
    t = training(gpus=16, batch=32)
    sent = 32 * 8 * 4
    load = part_load(t, Table("a", 1000, 8), ROWS, 8)
    assert load.near == pytest.approx(sent * 7 / 8 + sent / 8 * 7 / 16)
    assert load.far == pytest.approx(sent / 8 * 8 / 16)
    assert part_load(t, Table("a", 1000, 8), WHOLE, 1).far == pytest.approx(sent * 8 / 16)


def test_curve_has_three_segments() -> None:
    curve = Curve(((100.0, 1e-5), (10_000.0, 4e-5)), 1e9)
    assert curve.seconds(0) == 0
    assert curve.seconds(1) == curve.seconds(100) == 1e-5
    assert curve.seconds(1000) == pytest.approx(2e-5)  # between the points in log space
    assert curve.seconds(1_010_000) == pytest.approx(4e-5 + 1e-3)


def test_all_to_all_is_the_slower_of_both_ways() -> None:
    t = training(gpus=16)
    near, far = t.machine.curves["alltoall"], t.machine.curves["network"]
    assert all_to_all(t, 1e6, 1e9) == far.seconds(1e9)
    assert all_to_all(t, 1e9, 1.0) == max(near.seconds(1e9), far.seconds(1.0))
    assert all_reduce(t, 1e8) > all_reduce(training(gpus=8), 1e8) > all_reduce(training(), 1e8) == 0


# Rows.


def test_distinct_rows_of_uniform_ids() -> None:
    for rows, lookups in ((1000, 500), (1000, 5000), (10**6, 10**5)):
        exact = rows * (1 - (1 - 1 / rows) ** lookups)
        assert distinct(rows, 0.0, lookups) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("skew", [0.5, 0.9, 1.0, 1.2])
def test_distinct_rows_and_weights_of_zipf(skew: float) -> None:
    rows, lookups = 50_000, 20_000
    each = np.arange(1, rows + 1) ** -skew
    assert weight(rows, skew) == pytest.approx(each.sum(), rel=1e-6)
    assert distinct(rows, skew, lookups) == pytest.approx(
        (1 - (1 - each / each.sum()) ** lookups).sum(), rel=5e-3
    )
    assert covered(rows, skew, 0.1) == pytest.approx(each[: rows // 10].sum() / each.sum(), rel=1e-3)
    assert skew_of(rows, lookups, distinct(rows, skew, lookups)) == pytest.approx(skew, abs=0.01)


def test_uniform_ids_have_no_skew() -> None:
    assert skew_of(1000, 500, 500) == 0


def test_a_trillion_rows() -> None:
    begun = perf_counter()
    model = one_table(rows=10**12, dim=128)
    assert model.bytes == 10**12 * 512
    found = predicted(model, 128, 65536, "ssd", ssd_gb=100_000)
    assert isfinite(found.walked.step_seconds)
    assert found.walked.step_seconds > 0
    assert found.rows.ssd * 128 == pytest.approx(
        model.bytes - (found.rows.hbm + found.rows.dram) * 128, rel=0.05
    )
    assert max(found.plan.memory) < 1.01 * min(found.plan.memory)  # slow memory is shared by all
    assert 0 < distinct(1e12, 0.9, 65536 * 4) <= 65536 * 4
    assert perf_counter() - begun < 60  # it hangs, or it takes a second


def test_rows_that_do_not_fit_are_fetched() -> None:
    model = one_table(rows=10**9)
    whole = predicted(model, 8, 4096)
    assert whole.rows.seconds == whole.rows.missed == 0
    less = predicted(model, 8, 4096, "dram", hbm_gb=20)
    least = predicted(model, 8, 4096, "dram", hbm_gb=10)
    assert 0 < less.rows.seconds < least.rows.seconds
    assert 0 < less.rows.missed < least.rows.missed <= 1
    assert least.rows.hbm + least.rows.dram == pytest.approx(whole.rows.hbm)


def test_tiers_prefer_tables_with_many_lookups() -> None:
    t = training(batch=64)
    hot, cold = Table("hot", 1000, 8, 50.0), Table("cold", 1000, 8, 0.1)
    parts = [(table, part_load(t, table, WHOLE, 1)) for table in (cold, hot)]
    found = tiered(t, parts, Room(parts[1][1].memory, 1e9, 0))
    assert found.missed < 0.1  # those of the cold table alone


# Products.


def test_products_take_their_share_of_the_peak() -> None:
    t = training(batch=4096)
    share = t.machine.products.share(4096 * 4096, 4096)
    assert 0.8 < share < 0.9  # as measured
    assert product_seconds(t, 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / (312e12 * share))
    assert product_seconds(t, 16, 16, 16) == pytest.approx(3e-6)  # a kernel's least


def test_table_of_products_at_its_points_and_beyond() -> None:
    products = machine("h100_hgx").products
    for n in range(len(products.outputs)):
        assert products.share(products.outputs[n], products.depths[3]) == pytest.approx(products.shares[n][3])
    assert products.share(2.0**40, 2.0**20) == products.shares[-1][-1]


# Plans and steps.


@pytest.mark.parametrize("gpus", [1, 4, 8, 16])
def test_plans_place_every_row_once(gpus: int) -> None:
    model = paper_model("dlrm_dcnv2") if gpus > 1 else SMALL
    t = Training(model, machine("h100_hgx"), gpus, 8192)
    plan = make_plan(t, room_of(t, "hbm"))
    assert sorted(placed.table.name for placed in plan.tables) == sorted(table.name for table in model.tables)
    for placed in plan.tables:
        assert len(set(placed.gpus)) == len(placed.gpus)
        copies = gpus if placed.kind == "data_parallel" else 1
        if placed.kind != "data_parallel":
            rows = placed.load.memory * len(placed.gpus) / model.record_bytes(placed.table)
            assert rows == pytest.approx(placed.table.rows * copies)
    assert max(plan.memory) <= room_of(t, "hbm").hbm
    assert sum(plan.memory) == pytest.approx(sum(p.load.memory * len(p.gpus) for p in plan.tables))


def test_cutting_tables_pays() -> None:
    """DCNv2 has a table with half of all lookups; whole, it would keep its GPU busy alone."""
    t = Training(paper_model("dlrm_dcnv2"), machine("h100_hgx"), 8, 55296)
    plan = make_plan(t, room_of(t, "hbm"))
    whole = max((part_load(t, table, WHOLE, 1) for table in t.model.tables), key=lambda load: load.read)
    alone = Plan((), whole.read, whole.updated, whole.ids, whole.near, whole.far, 0.0, ())
    assert plan.row_seconds(t) < 0.9 * alone.row_seconds(t)
    assert next(len(p.gpus) for p in plan.tables if p.table.name == "t20") > 1


def test_faster_is_never_slower() -> None:
    """Twice any rate or amount of memory, or half of any least time, whatever the number of GPUs."""
    for gpus, batch in ((1, 4096), (8, 16384), (32, 16384)):
        t = training(one_table(rows=10**8), gpus, batch)
        base = predict(t, "dram").walked.step_seconds
        for constant in fields(Constants):
            if constant.name in ("gpus_per_host", "reserved_share"):
                continue
            factor = 0.5 if constant.name.endswith("_us") else 2.0
            value = getattr(t.machine.constants, constant.name) * factor
            better = replace(t, machine=t.machine.changed({constant.name: value}))
            assert predict(better, "dram").walked.step_seconds <= base * (1 + 1e-9), constant.name


def test_step_of_one_gpu_is_the_sum_of_its_tasks() -> None:
    t = replace(training(batch=4096), eager=False)
    found = predict(t)
    seconds = task_seconds(t, found.plan, found.rows)
    on_gpu = ("lookup", "bottom", "top", "top backward", "bottom backward", "update", "dense update")
    assert found.walked.step_seconds == pytest.approx(sum(seconds[name] for name in on_gpu), rel=1e-6)
    assert seconds["launch"] == 0 < predict(replace(t, eager=True)).seconds["launch"]


def test_tables_that_do_not_fit_are_refused_with_what_would() -> None:
    model = one_table(rows=4 * 10**9)
    with pytest.raises(
        UserError, match=r"table 'big' \(4,000,000,000 rows x 64.* does not fit on 8 GPUs"
    ) as fault:
        predicted(model, 8, 4096)
    enough = int(str(fault.value).split("would fit on ")[1].split(" GPUs")[0].replace(",", ""))
    hosts = -(-enough // 8)
    assert predicted(model, 8 * hosts, 4096).hbm_bytes <= 80e9
    with pytest.raises(UserError, match="does not fit"):
        predicted(model, 8 * (hosts - 1), 4096)
    fits = int(str(fault.value).split("at most ")[1].split(" rows")[0].replace(",", ""))
    predicted(one_table(rows=int(fits * 0.99)), 8, 4096)


def test_batches_and_gpus_that_do_not_go_together() -> None:
    with pytest.raises(UserError, match="scale.gpus=12: a host of a100_hgx has 8"):
        predicted(SMALL, 12, 64)
    with pytest.raises(UserError, match="a batch of 4 samples cannot be shared by 8 GPUs"):
        predicted(SMALL, 8, 4)
    with pytest.raises(UserError, match="take a smaller batch or more GPUs"):
        predicted(SMALL, 1, 10**10)


# Files.


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_machines_have_sources(path: object) -> None:
    name = path.stem  # type: ignore[attr-defined]
    if name != "products":
        found = machine(name)
        assert {*found.sources} >= {constant.name for constant in fields(Constants)}
        assert sum(source == ASSUMED for source in found.sources.values()) < 15
        assert found.changed({"hbm_gb": 1.0}).sources["hbm_gb"].startswith("changed")


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_models_are_what_is_published(path: object) -> None:
    name = path.stem  # type: ignore[attr-defined]
    found = paper_model(name)
    parameters = {"neo_a": 793e9, "neo_i": 332e9, "neo_f": 12e12}
    if name in parameters:
        assert found.parameters == pytest.approx(parameters[name], rel=0.01)
    if name == "dlrm_dcnv2":
        assert sum(table.rows for table in found.tables) == 204_184_588
        assert sum(table.pooling for table in found.tables) == 214
        assert found.dense.parameters == pytest.approx(16.0e6, rel=0.01)
        assert found.target is not None
        assert found.target.needed(65536) == pytest.approx(0.7911 * 4_195_197_692)
        assert found.target.needed(1024) is None


def test_time_to_quality_has_the_evaluations() -> None:
    host = machine("h100_hgx")
    found = predict(Training(paper_model("dlrm_dcnv2"), host, 8, 65536))
    seconds, target = found.seconds_to_quality(), found.training.model.target
    assert seconds is not None
    assert target is not None
    assert seconds > (target.needed(65536) or 0) / found.samples_per_second
    assert predict(Training(SMALL, host, 8, 64)).seconds_to_quality() is None
