"""Tables sharded over real processes, their rows tiered on each rank, against whole tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.distributed.planner.types import ParameterConstraints

from recpipe.checkpoint.table_files import check_tables, load_regions
from recpipe.common.files import lock_run_dir
from recpipe.common.saved import Damaged
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.plugin.api import Contribution
from recpipe.plugin.assembly import assemble
from recpipe.plugin.calls import Origin
from recpipe.plugin.context import TableInfo
from recpipe.plugin.planner import Planner
from recpipe.plugin.policy import Cache, CachePolicy, Placement, RowSpace
from recpipe.tables.resident import ResidentCollection
from tests.processes import start_ranks
from tests.tables.grouped import built, config
from tests.tables.grouped import contents as grouped_contents
from tests.tables.samples import CPU
from tests.tables.sharded import DIM, FEATURES, Places, apart, batches, contents, table_set, train
from tests.tables.sharded_groups import (
    SIZE,
    WeightedModel,
    look_up,
    model_tables,
    send,
    update,
    weighted_ids,
)
from tests.tables.tiered_groups import MIDDLE, GroupCase, train_all
from tests.tables.tiered_groups import STEPS as STEPS_OF_GROUPS
from tests.tables.tiered_groups import tiered as tiered_groups
from tests.tables.tiered_shards import STEPS, TIERS, Case, process, tiered

SSD = replace(TIERS, store="ssd", policy="lfu")
MIXED = {"a": "table_wise", "b": "row_wise", "keys": "data_parallel", "*": "table_row_wise"}
CASES = (
    Case("rowwise_adagrad", MIXED),
    Case("sgd", {"*": "row_wise"}, SSD),
    Case("adagrad", {"*": "column_wise"}),
    Case("sgd", {"*": "table_wise"}, replace(TIERS, policy="nocache")),
    Case("sgd", {"*": "row_wise"}, loses=True),
)
ROWWISE = ("user.goods", "few", "item.bags.goods", "weighted")
"""Tables of several groups with one state for a row, which must not be cut by columns."""
SEVERAL = {"*": "row_wise", "few": "data_parallel", "shops": "table_wise", "weighted": "table_wise"}
SKIPPING = GroupCase(SEVERAL, skips="both")
NOCACHE = replace(TIERS, policy="nocache")
GROUPS = (
    GroupCase({"*": "row_wise"}, one_each=True),
    GroupCase({"*": "column_wise", **dict.fromkeys(ROWWISE, "table_wise")}, replace(SSD, prefetch=False)),
    SKIPPING,
    GroupCase(SEVERAL, skips="alone"),
    GroupCase({"*": "table_wise"}, NOCACHE, int8="both"),
    GroupCase({"*": "table_wise"}, NOCACHE, int8="alone"),
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    start_ranks(process, (2, str(folder), CASES + GROUPS), 2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", GROUPS, ids=lambda case: case.name)
def test_groups_in_tiers_are_those_in_memory(told, case) -> None:
    """Bags, weighted bags and sequences, of several dimensions and optimizers. In the middle, while rows of
    the next batch are fetched, an evaluation sees the same and moves nothing; what follows, again from a
    checkpoint, has the same bits. No batch is planned twice."""
    found = json.loads((told / "told.json").read_text())[case.name]
    assert found["kinds"] == {name: case.types.get(name, case.types["*"]) for name in found["kinds"]}
    assert not found["moved"]
    assert min(found["read"], found["written"]) > 100
    assert found["placements"] == len(found["kinds"]), "a group's, also where its only table is replicated"
    assert (found["plans"], found["ahead"]) == (STEPS_OF_GROUPS, case.tiers.prefetch)
    distances = [*found["difference"].values(), found["seen"]]
    if case.control:
        assert min(distances) > 1e-4
        return
    assert found["resumed"] == 0.0
    assert found["placed"]
    if case.one_each or case.int8:
        assert max(distances) == 0.0, "no sum is parted between two tiers"
    else:
        assert max(distances) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "resident"])
def test_one_process_goes_on_from_shards_in_tiers(told, tmp_path, policy) -> None:
    """Their placement is of no use to tables that are whole; the rows are."""
    case, saved = GROUPS[0], told / f"saved-{len(CASES)}"
    tables = model_tables(WeightedModel())
    files = check_tables(saved, tables.shapes())
    assert files is not None
    with lock_run_dir(tmp_path) as run_dir:
        whole = built(tables, config(policy=policy), run_dir)
        if policy == "lru":
            state = torch.load(saved / "placement.pt", weights_only=False)
            whole.check_placement_state(state)
            assert not whole.load_placement_state(state)
        load_regions(files, whole, tables.shapes())
        train_all(whole, case, Ranks(), MIDDLE, STEPS_OF_GROUPS)
        found = grouped_contents(whole)
        whole.close()
    with np.load(saved / "contents.npz") as expected:
        for name, values in found.items():
            assert apart(values, expected[name]) <= 1e-6, name


def test_fetching_ahead_changes_no_bit(tmp_path) -> None:
    """Of bags whose sums are parted between the tiers."""
    case, ends = GroupCase({"*": "row_wise"}), []
    for prefetch in (True, False):
        made = replace(case, tiers=replace(TIERS, prefetch=prefetch))
        with (
            lock_run_dir(tmp_path / str(prefetch)) as run_dir,
            tiered_groups(made, Ranks(), run_dir) as grouped,
        ):
            train_all(grouped, made, Ranks(), 0, STEPS_OF_GROUPS)
            ends.append(grouped_contents(grouped))
            assert grouped.tier_figures().io.rows_written > 100  # type: ignore[union-attr]
    for name, values in ends[0].items():
        np.testing.assert_array_equal(values, ends[1][name], err_msg=name)


def test_a_batch_that_was_fetched_ahead_need_not_be_looked_up(tmp_path) -> None:
    """Where an epoch is left early, or two batches are sent at a time."""
    case, ends = GROUPS[0], []
    for policy in ("lru", "resident"):
        made = replace(case, tiers=replace(TIERS, policy=policy))
        with lock_run_dir(tmp_path / policy) as run_dir, tiered_groups(made, Ranks(), run_dir) as grouped:
            ahead = []
            for step in (1, 2, 3, 1):
                sparse = weighted_ids(SIZE, step, one_each=True)
                ahead = ahead or send(grouped, sparse)
                found = look_up(grouped, sparse, ahead)
                ahead = send(grouped, weighted_ids(SIZE, 3, one_each=True))
                for batch in (send(grouped, weighted_ids(SIZE, 7)), ahead, send(grouped, sparse)):
                    for ids in batch:
                        ids.fetch_rows()
                ahead = ahead if step == 2 else []
                update(grouped, sparse, found, 0, SIZE, heard=True)
            ends.append(grouped_contents(grouped))
    for name, values in ends[0].items():
        np.testing.assert_array_equal(values, ends[1][name], err_msg=name)


def test_placement_of_whole_tables_is_of_no_use_to_shards(tmp_path) -> None:
    """What is neither is damaged."""
    with lock_run_dir(tmp_path / "one") as one, lock_run_dir(tmp_path / "two") as two:
        whole = built(model_tables(WeightedModel()), config(), one)
        train_all(whole, GROUPS[0], Ranks(), 0, 2)
        state = whole.placement_state()
        whole.close()
        with tiered_groups(GROUPS[0], Ranks(), two) as shards:
            shards.check_placement_state(state)
            assert not shards.load_placement_state(state)
            for broken in ({}, {"ranks": 7}, {**state["1"], "policy": 7, "ranks": {"0": 3}}):
                with pytest.raises(Damaged):
                    shards.check_placement_state({**state, "1": broken})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_train_what_one_process_trains(told, case) -> None:
    """Uneven batches of bags, the last of one sample; a run resumed in the middle has the same bits."""
    found = json.loads((told / "told.json").read_text())[case.name]
    assert found["kinds"] == {f.name: case.types.get(f.name, case.types.get("*")) for f in FEATURES}
    farthest = max(found["difference"].values())
    if case.loses:
        assert farthest > 1e-2
        return
    assert farthest <= 1e-6
    assert min(found["read"], found["written"]) > 0
    assert found["placed"]
    assert found["resumed"] == 0.0
    rows = sum(f.rows for f in FEATURES if case.types.get(f.name) != "data_parallel")
    record = table_set(case.optimizer).record_bytes
    assert 0.4 * rows * record < found["cold_bytes"]
    assert found["resident_bytes"] <= 0.1 * rows * record


class Fifo(CachePolicy):
    """The rows that came first leave first."""

    next = 0

    def admit(self, hits, misses, looked_up) -> Placement:
        free = np.setdiff1d(np.arange(self.next, self.next + len(misses)) % self.space.slots, hits)
        self.next += len(free)
        return Placement(free.astype(np.int32), misses[: len(free)])

    def state_dict(self) -> dict:
        return {"next": self.next}

    def load_state_dict(self, state) -> None:
        self.next = state["next"]


class FifoTables(Cache):
    by_shards = True

    def policy(self, space: RowSpace) -> Fifo:
        return Fifo(space)


class Columns(Planner):
    """Tables cut into parts of several widths."""

    def constrain(self, table: TableInfo) -> ParameterConstraints:
        width = 64 if table.name == "b" else 128
        return ParameterConstraints(sharding_types=["column_wise"], min_partition=width)


def test_a_plugins_policy_keeps_parts_of_several_widths(tmp_path) -> None:
    info = {f.name: TableInfo(f.name, f.rows, DIM) for f in FEATURES}
    brought = Contribution(planner=Columns(), cache=[FifoTables()])
    parts = assemble([(Origin("acme"), Places({}), brought)], info)
    case = Case("adagrad", {}, replace(TIERS, policy="resident"))
    whole = contents_of_whole(case)
    with lock_run_dir(tmp_path) as run_dir, tiered(case, Ranks(), run_dir, parts) as tables:
        assert {s.columns for t in tables.shards.values() for s in t.shards} == {64, 128}
        assert {type(tiers.planner.policy) for tiers in tables.tiers} == {Fifo}
        for sparse in batches(STEPS):
            train(tables, sparse, 0, sparse.stride())
        before = tables.tier_figures()
        with torch.no_grad():
            tables(batches(1)[0])
        assert tables.tier_figures() == before, "an evaluation moves no row"
        for name, values in contents(tables).items():
            assert max(map(apart, values, whole[name])) <= 1e-6, name


def contents_of_whole(case: Case) -> dict:
    whole = ResidentCollection(table_set(case.optimizer), CPU)
    for sparse in batches(STEPS):
        train(whole, sparse, 0, sparse.stride())
    return contents(whole)


CUT = "column_wise cuts rows apart, and in tiers its rows have"
ONE_STATE = Case("rowwise_adagrad", {"*": "column_wise"}, replace(TIERS, split_rows=True))
WHOLE_RECORDS = GroupCase({"*": "row_wise", "shops": "column_wise"}, int8="both")
NO_ROW = Case("sgd", {"*": "row_wise"}, replace(TIERS, resident_bytes=1))


@pytest.mark.parametrize(
    ("opened", "case", "words"),
    [
        (
            tiered,
            ONE_STATE,
            f"'a': {CUT} one optimizer state",
        ),
        (
            tiered_groups,
            WHOLE_RECORDS,
            f"'shops': {CUT} a codec of whole records: shard",
        ),
        (tiered, NO_ROW, "leaves not even one row, of 1024 bytes"),
    ],
    ids=["cut rows of one state", "cut rows of a codec", "a budget of no row"],
)
def test_what_tiers_of_shards_cannot_do_is_refused(tmp_path, opened, case, words) -> None:
    with (
        lock_run_dir(tmp_path) as run_dir,
        pytest.raises(UserError, match=words),
        opened(case, Ranks(), run_dir),
    ):
        pass
