"""Tables whose cold rows are encoded, or whose weights have fewer bits: just that rounding, no more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import DataType

from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.plugin.api import Contribution
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.calls import Owned
from recpipe.plugin.errors import PluginConflict
from recpipe.plugin.quantizer import Coding, Quantizer, RecordLayout, RowCodec
from recpipe.plugin.store import ColdStore, Fill, StoreLayout
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.tables.config import TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import check_quantized, group_owners, quantized
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.stores import make_store
from recpipe.tables.stores.codecs import COLD, Fp16Rows, Int8Rows
from recpipe.tables.stores.local import local_store
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe.tables.tiers.transfer import StoreThread
from tests.plugin.samples import ACME, Good
from tests.tables.samples import (
    CPU,
    DIM,
    MAKERS,
    dump,
    here,
    identical,
    stream,
    table_set,
    tiers,
    train,
    train_ahead,
)

BATCHES = 16
RANDOM_ROUNDING = TableOptimizer("sgd", 0.1, stochastic_rounding=True)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
TIERS = TierConfig("lru", "host", "25%", None, prefetch=True, sharded=False)


def coding(optimizer: str, name: str = "int8") -> Coding:
    return Coding(Owned.of(ACME, COLD[name](RecordLayout(DIM, table_set(optimizer).layout.width))))


def coded_tiers(
    optimizer: str, policy: str, folder: Path, kind: str = "host", prefetch: bool = True, name: str = "int8"
) -> TieredEmbeddingBagCollection:
    return over(table_set(optimizer), coding(optimizer, name), policy, folder, kind, prefetch)


def over(
    tables: TableSet, coding: Coding, policy: str, folder: Path, kind: str = "host", prefetch: bool = True
) -> TieredEmbeddingBagCollection:
    """Tables in tiers over a store of encoded records."""

    def make(layout: StoreLayout, fill: Fill) -> ColdStore:
        return make_store(kind, layout, fill, directory=folder)

    return tiers(tables, policy, folder, local_store(tables.layout, tables.fill, coding, make), prefetch)


def rounded_by_hand(optimizer: str, name: str) -> dict[str, np.ndarray]:
    """Resident tables whose rows are all rounded before the first batch, and those of each batch after it."""
    tables, of = ResidentCollection(table_set(optimizer), CPU), coding(optimizer, name)
    layout, batches = tables.tables.layout, stream(BATCHES, True)

    def rounds(rows: np.ndarray) -> None:
        tables.replace_records(rows, torch.from_numpy(of.rounded(tables.records_of(rows).numpy())))

    def after(index: int) -> None:
        ids = [
            batches[index][table].values().numpy() + base
            for table, base in zip(layout.tables, layout.bases, strict=False)
        ]
        rounds(np.unique(np.concatenate(ids)))

    rounds(np.arange(layout.total_rows))
    train(tables, batches, after=after)
    return dump(tables)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", COLD)
def test_without_a_cache_each_row_is_rounded_after_its_batch(
    name: str, optimizer: str, tmp_path: Path
) -> None:
    expected = rounded_by_hand(optimizer, name)
    ways = [(True, train_ahead, 0), (True, train_ahead, 5), (False, train, 0)]
    for prefetch, loop, every in ways:
        collection = coded_tiers(optimizer, "nocache", tmp_path, prefetch=prefetch, name=name)
        loop(collection, stream(BATCHES, True), every)
        assert identical(dump(collection), expected)
        collection.close()


@pytest.mark.parametrize("kind", ["host", "ssd"])
@pytest.mark.parametrize("policy", sorted(MAKERS))
def test_neither_fetching_ahead_nor_evaluating_changes_what_is_rounded(
    policy: str, kind: str, tmp_path: Path
) -> None:
    ends = []
    for prefetch, loop, every in ((True, train_ahead, 0), (True, train_ahead, 3), (False, train, 0)):
        collection = coded_tiers("rowwise_adagrad", policy, tmp_path, kind, prefetch)
        loop(collection, stream(BATCHES, True), every)
        ends.append(dump(collection))
        collection.close()
    assert identical(ends[0], ends[1])
    assert identical(ends[0], ends[2])


def test_rows_that_pass_from_batch_to_batch_unrounded_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control."""
    monkeypatch.setattr(StoreThread, "as_stored", lambda self, records: records)
    collection = coded_tiers("sgd", "nocache", tmp_path)
    train_ahead(collection, stream(BATCHES, True))
    assert not identical(dump(collection), rounded_by_hand("sgd", "int8"))
    collection.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_of_16_bits_and_state_of_32(optimizer: str, tmp_path: Path) -> None:
    """Resident, and in slots, whose cold rows have the same bits."""
    tables = grouped(Wants("*", "fp16"), optimizer=optimizer)[0].groups[0].tables
    state = tables.layout.width - DIM
    assert tables.record_bytes == tables.cold_record_bytes == 2 * DIM + 4 * state
    assert tables.codec is not None
    assert tables.total_bytes == tables.layout.total_rows * tables.record_bytes
    whole = ResidentCollection(tables, here())
    weights, states = whole._storage["b"]
    assert (weights.dtype, states.dtype) == (torch.float16, torch.float32)
    train(whole, stream(BATCHES, True))
    expected = dump(whole)
    for records in expected.values():
        assert np.array_equal(records[:, :DIM], records[:, :DIM].astype(np.float16))
    exact = ResidentCollection(table_set(optimizer), here())
    train(exact, stream(BATCHES, True))
    other = dump(exact)
    assert not identical(other, expected)
    for name, records in other.items():
        np.testing.assert_allclose(records, expected[name], atol=0.02, rtol=0.02)
    for policy in ("nocache", "lru", "hot"):
        collection = over(tables, Coding(tables.codec), policy, tmp_path)
        train_ahead(collection, stream(BATCHES, True))
        assert identical(dump(collection), expected), policy
        collection.close()


def test_rows_of_16_bits_are_read_and_written_whole() -> None:
    whole = ResidentCollection(replace(table_set("adagrad"), storage=DataType.FP16), here())
    rows = np.array([3, 600, 650])
    before = whole.records_of(rows)
    assert before.dtype == torch.float32
    whole.replace_records(rows, before + 1)
    after = whole.records_of(rows)
    assert torch.equal(after[:, :DIM], (before[:, :DIM] + 1).half().float())
    assert torch.equal(after[:, DIM:], before[:, DIM:] + 1)


class Wants(Quantizer):
    def __init__(self, tables: str, storage: str | None = None, cold: type[RowCodec] | None = None) -> None:
        self.tables, self._storage, self._cold = tables, storage, cold

    def storage(self, table):
        return self._storage

    def cold(self, layout):
        return self._cold and self._cold(layout)


def grouped(*quantizers: Quantizer, optimizer: str = "rowwise_adagrad") -> tuple[ModelTables, Assembly]:
    tables = ModelTables.single(table_set(optimizer))
    parts = [
        (replace(ACME, plugin=f"p{i}"), Good(), Contribution(quantizer=q)) for i, q in enumerate(quantizers)
    ]
    assembly = assemble(parts, tables.infos())
    return quantized(tables, assembly.quantizing), assembly


def test_tables_that_are_stored_otherwise_are_groups_of_their_own() -> None:
    tables, _ = grouped(Wants("[ab]", cold=Int8Rows), Wants("c", "fp16"))
    told = [
        (g.tables.layout.tables, g.tables.storage, g.tables.record_bytes, g.tables.cold_record_bytes)
        for g in tables.groups
    ]
    assert told == [(("a", "b"), DataType.FP32, 36, 20), (("c",), DataType.FP16, 20, 20)]
    assert sum(g.tables.cold_bytes for g in tables.groups) == 700 * 20
    same, _ = grouped()
    assert same == ModelTables.single(table_set())


@pytest.mark.parametrize(
    ("wants", "config", "trainers", "said"),
    [
        (
            Wants("*", "fp16"),
            TIERS,
            2,
            "each of 2 trainers keeps replicas of rows in float32; shard the tables",
        ),
        (
            Wants("*", None, Fp16Rows),
            replace(TIERS, policy="resident"),
            1,
            "all rows of its tables are resident",
        ),
    ],
)
def test_what_could_not_be_carried_out_is_refused(wants, config, trainers, said) -> None:
    tables, assembly = grouped(wants)
    ranks = Ranks(0, trainers, tuple(range(trainers)), tuple(range(trainers)))
    owners = group_owners(config, assembly, tables)
    with pytest.raises(PluginConflict, match=f"plugin p0 .*{said}"):
        check_quantized(assembly.quantizing, tables, owners, False, CPU, ranks)
    fine, other = grouped(Wants("*", "fp32", Fp16Rows))
    check_quantized(other.quantizing, fine, group_owners(TIERS, other, fine), False, CPU, ranks)


@pytest.mark.parametrize(
    ("storage", "device", "said"),
    [
        ("fp16", "cpu", "FBGEMM's CPU kernels round to the nearest value"),
        ("fp32", "cuda", "its weights are stored in fp32 and not rounded"),
        ("fp16", "cuda", None),
    ],
)
def test_stochastic_rounding_is_a_choice_for_16_bits_on_a_gpu(storage, device, said) -> None:
    tables, assembly = grouped(Wants("*", storage))
    owners = group_owners(TIERS, assembly, tables)
    check = partial(check_quantized, assembly.quantizing, device=torch.device(device), ranks=Ranks())
    if device == "cuda":
        check(tables, owners, False)  # not asked for
    asked = ModelTables(
        tuple(replace(g, tables=replace(g.tables, optimizer=RANDOM_ROUNDING)) for g in tables.groups)
    )
    if said is None:
        check(asked, owners, False)
    else:
        with pytest.raises(UserError, match=f"optimizer of table 'a': stochastic_rounding=true, but {said}"):
            check(asked, owners, False)
