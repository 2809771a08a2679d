"""Tables that loops look up and update: FBGEMM's numbers, in FBGEMM's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import DataType

from recpipe.backend import build, calibrate
from recpipe.backend.chain import Chooser
from recpipe.backend.table_kernels import choose_kernels, table_parts
from recpipe.common.device import using_threads
from recpipe.plugin.averaging import Averaging
from recpipe.plugin.tables import OPTIMIZERS, SparseFeature, TableOptimizer, TableSet
from recpipe.private_api import TorchDispatchMode
from recpipe.tables import loop_tables
from recpipe.tables.fused_update import KINDS
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ResidentCollection
from tests.tables import samples
from tests.tables.reference import BATCHES, SEQUENCES, SUMS, TOLERANCE, WEIGHTED, Kind, batches, expected
from tests.tables.reference import train as train_on
from tests.tables.samples import CPU, FEATURES, difference, dump, identical, stream, table_set, tiers, train

DECAYS = [{"weight_decay": 0.1}, {"weight_decay": 0.5, "weight_decay_mode": "decouple"}]


def by_loops(tables: TableSet) -> TableSet:
    tables.kernel.faster = lambda: True
    return tables


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of features of each update that a loop made."""
    made: list[int] = []
    right = loop_tables.update_rows

    def noted(*arguments) -> None:
        made.append(len(arguments[4]))
        right(*arguments)

    monkeypatch.setattr(loop_tables, "update_rows", noted)
    return made


def trained(tables: TableSet, multi: bool, padded: bool = True) -> tuple[ResidentCollection, list]:
    made = ResidentCollection(tables, CPU, padded=padded)
    return made, train(made, stream(12, multi), eval_every=3)


@pytest.mark.parametrize("dim", [8, 16, 40])
@pytest.mark.parametrize("optimizer", KINDS)
def test_rows_are_those_of_fbgemm(monkeypatch: pytest.MonkeyPatch, optimizer: str, dim: int, updates) -> None:
    monkeypatch.setattr(samples, "DIM", dim)
    tables = TableSet.one_each(FEATURES, dim, TableOptimizer(optimizer, 0.1), 3)
    for multi in (False, True):
        theirs, seen = trained(replace(tables), multi)
        assert not updates
        mine, also_seen = trained(by_loops(replace(tables)), multi)
        assert updates == [len(FEATURES) + 1] * 12, "with the table that is the padding"
        updates.clear()
        assert difference(dump(mine), dump(theirs)) <= (0 if (optimizer, dim) == ("sgd", 16) else 1e-6)
        torch.testing.assert_close(also_seen, seen, rtol=1e-5, atol=1e-6)


def test_lookups_have_the_bits_of_fbgemm() -> None:
    collection = ResidentCollection(by_loops(table_set()), CPU)
    for sparse in stream(2, True):
        mine = collection.lookup(sparse).detach()
        collection.tables.kernel.faster = None
        assert torch.equal(mine, collection.lookup(sparse))
        collection.tables.kernel.faster = lambda: True


@pytest.mark.parametrize("kind", [SUMS, SEQUENCES, WEIGHTED], ids=lambda kind: kind.name)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_features_that_share_a_table_make_one_step(kind: Kind, optimizer: str, updates) -> None:
    made = ResidentCollection(by_loops(kind.tables(optimizer)), CPU)
    train_on(made, kind, batches())
    assert len(updates) == BATCHES
    assert difference(dump(made), expected(kind, optimizer)) <= TOLERANCE[optimizer]


@pytest.mark.parametrize("knobs", [{}, {"beta1": 0.8}, *DECAYS], ids=str)
@pytest.mark.parametrize("name", ["adam", "partial_rowwise_adam"])
@pytest.mark.parametrize("kind", [SUMS, WEIGHTED], ids=lambda kind: kind.name)
def test_adam_is_that_of_the_plain_update(kind: Kind, name: str, knobs: dict, updates) -> None:
    own, dumps = TableOptimizer(name, 0.01, **knobs), []
    for faster in (None, lambda: True):
        tables = replace(kind.tables("sgd"), optimizer=own)
        tables.kernel.faster = faster
        made = ResidentCollection(tables, CPU)
        train_on(made, kind, batches())
        dumps.append(dump(made))
    assert len(updates) == BATCHES
    assert difference(*dumps) <= 1e-6
    assert all((each[:, -1] > 1).any() for each in dumps[0].values()), "some rows are updated several times"


@pytest.mark.parametrize("more", [{"clip_row_norm": 1.0}, {"average": Averaging("ema", 0.9)}], ids=str)
def test_what_no_loop_does_is_left_to_the_plain_update(more: dict, updates) -> None:
    tables = replace(table_set(), optimizer=TableOptimizer("adam", 0.01, **more))
    train(ResidentCollection(by_loops(tables), CPU), stream(1, True))
    assert not updates
    assert not table_parts(ModelTables.single(tables))


def test_weighted_lookups_are_those_of_fbgemm() -> None:
    collection, sparse = ResidentCollection(by_loops(WEIGHTED.tables("sgd")), CPU), batches(1)[0]
    mine = collection.lookup(sparse).detach()
    collection.tables.kernel.faster = None
    torch.testing.assert_close(mine, collection.lookup(sparse), rtol=1e-6, atol=1e-6)
    turned = type(sparse)(sparse.keys(), sparse.values(), -sparse.weights(), lengths=sparse.lengths())
    assert not torch.allclose(mine, collection.lookup(turned)), "weights count"


def test_what_watches_operators_sees_the_lookup(updates) -> None:
    collection, sparse = ResidentCollection(by_loops(table_set()), CPU), stream(1, True)[0]
    with Seen() as seen:
        collection.lookup(sparse).sum().backward()
    assert not updates
    assert any("embedding" in name for name in seen.names)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [SUMS, SEQUENCES, WEIGHTED], ids=lambda kind: kind.name)
def test_threads_share_the_work_to_the_same_bits(monkeypatch, kind: Kind, updates) -> None:
    """No row is updated by two: a table's lookups stay together."""
    monkeypatch.setattr(loop_tables, "LEAST", 64)
    dumps, calls = [], []
    for threads in (1, 2, 3):
        tables = by_loops(kind.tables("adam" if kind is WEIGHTED else "rowwise_adagrad"))
        made = ResidentCollection(tables, CPU)
        with using_threads(threads):
            train_on(made, kind, batches())
        dumps.append(dump(made))
        calls.append(len(updates))
        updates.clear()
    assert all(identical(dumps[0], other) for other in dumps[1:])
    assert calls[0] == BATCHES
    assert (calls[1] > BATCHES) is kind.pooled, "rows that are not pooled are in one table"


def test_a_lookup_that_is_not_added_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparisons."""
    right = loop_tables.update_rows

    def without_a_table(*arguments) -> None:
        right(*arguments[:-2], 1, arguments[-1])

    monkeypatch.setattr(loop_tables, "update_rows", without_a_table)
    made = ResidentCollection(by_loops(SUMS.tables("sgd")), CPU, padded=False)
    train_on(made, SUMS, batches())
    assert difference(dump(made), expected(SUMS, "sgd")) > 1e-3


@pytest.mark.parametrize("policy", ["lru", "hot", "nocache"])
def test_rows_in_tiers_are_trained_to_the_same_bits(tmp_path: Path, policy: str, updates) -> None:
    whole, tables = trained(by_loops(table_set()), True)[0], by_loops(table_set())
    updates.clear()
    moving = tiers(tables, policy, tmp_path)
    samples.train_ahead(moving, stream(12, True))
    assert identical(dump(moving), dump(whole))
    assert updates
    moving.close()


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dim", [16, 24])
def test_rows_of_16_bits_are_rounded_once_a_step(monkeypatch, dim: int, name: str, updates) -> None:
    monkeypatch.setattr(samples, "DIM", dim)
    tables = TableSet.one_each(FEATURES, dim, TableOptimizer(name, 0.1), 3)
    halves = replace(tables, storage=DataType.FP16)
    plain, loops = ResidentCollection(halves, CPU), ResidentCollection(by_loops(replace(halves)), CPU)
    sparse = stream(1, True)[0]
    found = loops.lookup(sparse).detach()
    torch.testing.assert_close(found, plain.lookup(sparse).detach(), rtol=1e-6, atol=1e-6)
    rounded = ResidentCollection(by_loops(tables), CPU)
    for batch in stream(8, True):
        for region in rounded.regions():
            weights, state = rounded.read(region)
            rounded.write(region, (weights.astype(np.float16).astype(np.float32), state))
        for each in (loops, rounded):
            train(each, [batch])
    assert len(updates) == 16
    for feature in FEATURES:
        mine, theirs = (dump(each)[feature.name] for each in (loops, rounded))
        assert np.array_equal(mine[:, :dim], theirs[:, :dim].astype(np.float16).astype(np.float32))
        assert np.array_equal(mine[:, dim:], theirs[:, dim:])


def test_a_rate_that_is_set_anew_counts_from_then_on(updates) -> None:
    made = ResidentCollection(by_loops(table_set("sgd")), CPU)
    before = dump(made)
    made.tbes[0].set_learning_rate(0.0)
    train(made, stream(2, True))
    assert updates
    assert identical(dump(made), before)


def test_a_table_of_which_nothing_is_looked_up() -> None:
    sparse = stream(1, True)[0]
    lengths = sparse.lengths().view(len(FEATURES), -1).clone()
    lengths[1] = 0
    kept = torch.repeat_interleave(lengths.flatten() > 0, sparse.lengths())
    made = ResidentCollection(by_loops(table_set()), CPU)
    before = dump(made)
    cut = type(sparse)(sparse.keys(), sparse.values()[kept], lengths=lengths.flatten())
    made.lookup(cut).sum().backward()
    after = dump(made)
    same = [np.array_equal(before[f.name], after[f.name]) for f in FEATURES]
    assert same == [False, True, False]


def test_many_lookups_of_few_rows() -> None:
    """Chains of hundreds of them, in the order of samples."""
    few = (SparseFeature("few", 3), SparseFeature("one", 1))
    tables, rng, dumps = (
        TableSet.one_each(few, 16, TableOptimizer("adagrad", 0.1), 3),
        np.random.default_rng(0),
        [],
    )
    ids = torch.from_numpy(np.concatenate((rng.integers(0, 3, 500), np.zeros(500, np.int64))))
    gradient = torch.randn(500, 32)
    for own in (tables, by_loops(replace(tables))):
        made = ResidentCollection(own, CPU, padded=False)
        (tbe,) = made.tbes
        tbe(ids, torch.arange(1001)).backward(gradient)
        dumps.append(dump(made))
    assert max(np.abs(dumps[0][name] - dumps[1][name]).max() for name in dumps[0]) < 1e-3
    relative = [np.abs(dumps[0][name] / dumps[1][name] - 1).max() for name in dumps[0]]
    assert max(relative) < 1e-5


@pytest.mark.parametrize(("kind", "loops"), [("auto", True), ("plain", False)])
def test_a_loop_of_ones_own_has_them_too(monkeypatch, tmp_path: Path, kind: str, loops: bool) -> None:
    def measured(module, size, threads, folder, parts):
        return {part: {str(count): {str(size): "loops"} for count in threads} for part in parts}

    monkeypatch.setattr(build, "calibrated", measured)
    tables = ModelTables.single(table_set())
    model = SimpleNamespace(module=torch.nn.Linear(2, 1), embeddings=SimpleNamespace(tables=tables))
    build.convert_for_loop(kind, model, 64, CPU, tmp_path)
    assert tables.groups[0].tables.kernel.by_loops is loops


@pytest.mark.parametrize("weighted", [False, True])
def test_tables_are_measured_as_they_are(monkeypatch, updates, weighted: bool) -> None:
    own = replace(table_set(), optimizer=TableOptimizer("adam", 0.1), weighted=weighted)
    ((_, part),) = table_parts(ModelTables.single(own))
    given: list[bool] = []
    right = loop_tables.Loops.look_up

    def noted(self, indices, offsets, factors):
        given.append(factors is not None)
        return right(self, indices, offsets, factors)

    monkeypatch.setattr(loop_tables.Loops, "look_up", noted)

    def timed(steps, *_, **__):
        for step in steps:
            step()
        return 2.0, 1.0

    monkeypatch.setattr(calibrate, "median_seconds", timed)
    assert calibrate.measure(part, 16, {}) == "loops"
    assert given == [weighted]
    assert updates == [len(FEATURES)]


def test_how_tables_are_grouped_changes_nothing_about_what_computes_them() -> None:
    whole = ModelTables.single(table_set())
    apart = whole.split(lambda name: name)
    assert len(apart.groups) > len(whole.groups) == 1
    ((_, part),) = table_parts(whole)
    assert {of for _, of in table_parts(apart)} == {part}, "a plugin that splits them would round otherwise"
    measured = {part: {str(torch.get_num_threads()): {"64": "plain", "512": "loops"}}}
    for tables in (whole, apart):
        choose_kernels(tables, Chooser(measured, True))
        assert all(group.tables.kernel.by_loops for group in tables.groups)
        choose_kernels(tables, None)
        assert not any(group.tables.kernel.by_loops for group in tables.groups)
