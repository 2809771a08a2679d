"""Floors: work counted by hand, limits that can be measured, and the time that both give."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.model.config import ModelConfig
from recpipe.plugin.bags import Bags
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from recpipe.profiling import limits
from recpipe.profiling.limits import Limits, floors_ms, measure
from recpipe.profiling.workload import (
    Lookups,
    Work,
    count_lookups,
    dense_work,
    embedding_work,
    optimizer_work,
)
from recpipe.tables.rows import table_bags

GIGA = 1e9
TABLES = TableSet.one_each(
    (SparseFeature("a", 50), SparseFeature("b", 50)), 4, TableOptimizer("rowwise_adagrad", 0.1), 1
)


def test_flops_of_the_usual_dlrm_settings() -> None:
    """13 dense and 26 sparse features: counted by hand, distinct pairs of the interaction alone."""
    small = dense_work(ModelConfig("dlrm", 16, [512, 256, 64], [512, 256]), 13, 26, 2048)
    layers = 13 * 512 + 512 * 256 + 256 * 64 + 64 * 16 + (16 + 351) * 512 + 512 * 256 + 256
    assert small["MLP forward"].flops == 2 * 2048 * layers
    assert small["MLP backward"].flops == 2 * 2048 * (2 * layers - 13 * 512)
    assert small["interaction forward"].flops == 2 * 2048 * 351 * 16
    assert small["interaction backward"].flops == 2 * small["interaction forward"].flops
    assert sum(w.flops for w in small.values()) == pytest.approx(5.87 * GIGA, rel=0.01)
    large = dense_work(ModelConfig("dlrm", 64, [512, 256], [512, 256]), 13, 26, 8192)
    assert sum(w.flops for w in large.values()) == pytest.approx(25.5 * GIGA, rel=0.01)


def test_bytes_of_a_tiny_dlrm_by_hand() -> None:
    """3 samples of 2 dense and 1 sparse feature; layers 2-5-4 and (4 + 1 pair)-6-1."""
    work = dense_work(ModelConfig("dlrm", 4, [5], [6]), 2, 1, 3)
    weights = 2 * 5 + 5 * 4 + 5 * 6 + 6
    values = 3 * (2 + 5 + 4 + 5 + 6 + 1)
    assert work["MLP forward"].streamed_bytes == 4 * (weights + values)
    assert work["MLP backward"].streamed_bytes == 4 * (2 * weights + values)
    assert work["interaction forward"].streamed_bytes == 4 * 3 * (2 * 4 + 5)
    assert work["interaction backward"].streamed_bytes == 4 * 3 * (2 * 4 + 5 + 2 * 4)
    halved = dense_work(ModelConfig("dlrm", 4, [5], [6], precision="bfloat16"), 2, 1, 3)
    assert halved["MLP forward"].streamed_bytes == 4 * weights + 2 * values


def test_without_dense_features_the_bottom_mlp_runs_once_a_batch() -> None:
    """Of 1-5-4, for a constant; (4 + 1 pair)-6-1 for 3 samples."""
    work = dense_work(ModelConfig("dlrm", 4, [5], [6]), 0, 1, 3)
    bottom, top = 1 * 5 + 5 * 4, 5 * 6 + 6
    assert work["MLP forward"].flops == 2 * (bottom + 3 * top)
    assert work["MLP backward"].flops == 2 * (2 * (bottom + 3 * top) - 5)
    values = 1 + 5 + 4 + 3 * (5 + 6 + 1)
    assert work["MLP forward"].streamed_bytes == 4 * (bottom + top + values)


def test_cross_layers_are_counted() -> None:
    """2 vectors of 4 values, 3 layers of rank 5: each multiplies by [8, 5] and by [5, 8]."""
    work = dense_work(ModelConfig("dlrm_dcn", 4, [5], [6], cross_layers=3, cross_rank=5), 2, 1, 7)
    assert work["interaction forward"].flops == 7 * 3 * 2 * (2 * 8 * 5)
    assert work["interaction backward"].flops == 2 * work["interaction forward"].flops
    assert work["MLP forward"].flops == 2 * 7 * (2 * 5 + 5 * 4 + 8 * 6 + 6)


def test_lookups_and_distinct_rows_of_real_batches() -> None:
    """Equal ids of two features are two rows, since each has its own table."""

    def batch(ids: list[int], lengths: list[int]) -> Bags:
        lookups = KeyedJaggedTensor(["a", "b"], torch.tensor(ids), lengths=torch.tensor(lengths))
        return table_bags(TABLES, lookups)

    first, second = batch([1, 1, 2, 7, 7, 1], [2, 1, 1, 2]), batch([3, 3], [1, 0, 0, 1])
    assert count_lookups([first]) == Lookups(2, 6, 4)
    assert count_lookups([first, second]) == Lookups(2, 4, 3)
    assert count_lookups([first]) + count_lookups([first, second]) == Lookups(2, 10, 7)


def test_embedding_bytes_by_hand() -> None:
    """10 samples, 2 tables of dim 4 with row-wise Adagrad (5 floats a row), 12 distinct rows."""
    work = embedding_work([(TABLES, Lookups(10, 40, 12))])
    pooled = 10 * 2 * 4 * 4
    assert work == {
        "embedding forward": Work(0, pooled, 12 * 4 * 4),
        "embedding backward and update": Work(0, pooled, 2 * 12 * 5 * 4),
    }


def test_groups_of_tables_add_up() -> None:
    """The tables of above, and rows of dim 8 under SGD that are handed out one for each of 7 ids."""
    sequences = TableSet(TABLES.tables[:1], 8, TableOptimizer("sgd", 0.1), 1, pooled=False)
    work = embedding_work([(TABLES, Lookups(10, 40, 12)), (sequences, Lookups(10, 7, 5))])
    handed_out = 10 * 2 * 4 * 4 + 7 * 8 * 4
    assert work["embedding forward"] == Work(0, handed_out, 12 * 4 * 4 + 5 * 8 * 4)
    assert work["embedding backward and update"].gathered_bytes == 2 * (12 * 5 * 4 + 5 * 8 * 4)


@pytest.mark.parametrize(("name", "streams"), [("SGD", 3 * 40), ("Adagrad", 3 * 40 + 2 * (40 + 4))])
def test_dense_optimizer_reads_and_writes_its_state(name: str, streams: int) -> None:
    """10 float32 parameters; Adagrad keeps a sum for each and the number of steps."""
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    assert optimizer_work(optimizer).streamed_bytes == streams


ROUND = Limits(2, {"float32": 1e9, "bfloat16": 4e9}, 80e6, 100e6, 64, 10e6, 5e6)


def test_a_phase_takes_the_longer_of_arithmetic_and_memory() -> None:
    work = {"a": Work(flops=2e6, streamed_bytes=50_000, gathered_bytes=10_000), "b": Work()}
    assert floors_ms(work, ROUND, "float32") == pytest.approx({"a": 2.0, "b": 0.0}), "arithmetic"
    assert floors_ms(work, ROUND, "bfloat16") == pytest.approx({"a": 0.5 + 1.0, "b": 0.0}), "memory"


def test_the_machine_is_measured_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small buffers; threads are as before, and rates are those of a computer."""
    monkeypatch.setattr(limits, "BUFFER_BYTES", 2**24)
    monkeypatch.setattr(limits, "SIZES", (256, 512))
    monkeypatch.setattr(limits, "LEAST_SECONDS", 0.0)
    threads = torch.get_num_threads()
    found = measure(64, torch.device("cpu"))
    assert torch.get_num_threads() == threads == found.threads
    assert found.row_bytes == 64
    rates = [*found.gemm_flops_per_s.values(), found.copy_bytes_per_s, found.read_bytes_per_s]
    assert all(1e8 < rate < 1e15 for rate in [*rates, found.gather_bytes_per_s])
    assert found.gather_bytes_per_s >= found.gather_bytes_per_s_one_thread > 1e7


def test_larger_products_are_left_out_once_one_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(limits, "best_seconds", lambda run, device: tried.append(run) or 1.0)
    assert limits.best_product(torch.float32, torch.device("cpu")) == (2.0 * 512**3, 1.0)
    assert len(tried) == 1
