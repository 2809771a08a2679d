"""Two cores that share a batch's samples: the same gradients, reproducible, and nobody left waiting."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from recpipe.embedding.resident import ResidentCollection
from recpipe.model.ranker import ModelConfig, Ranker
from recpipe.pipeline import two_cores
from recpipe.pipeline.step import StagedBatch, StepTimes, accumulate
from recpipe.pipeline.two_cores import LEAST_SAMPLES, TwoCores, own_share
from tests.embedding.samples import CPU, DIM, dump, identical, table_set
from tests.pipeline.samples import (
    DENSE,
    SIZE,
    Listed,
    collection_of,
    furthest,
    parameters_after,
    random_batch,
    ranker_over,
)

SHARE = 13
POLICIES = ["resident", "nocache", "lru"]


@pytest.fixture
def cores():
    cores = TwoCores()
    yield cores
    cores.close()


def trained(cores: TwoCores, policy: str, optimizer: str, folder) -> dict[str, np.ndarray]:
    """Every parameter after an epoch in which two cores share each batch that has enough samples."""

    def step(ranker, staged, times):
        if staged.batch.size <= SHARE:
            return accumulate(ranker, staged, times)
        return cores.accumulate(ranker, list(ranker.dense_parameters().values()), staged, SHARE)

    return parameters_after(policy, optimizer, folder, Listed(), step)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("policy", POLICIES)
def test_two_cores_equal_one(cores, tmp_path, policy, optimizer) -> None:
    (tmp_path / "one").mkdir()
    one = parameters_after(policy, optimizer, tmp_path / "one", Listed())
    two = trained(cores, policy, optimizer, tmp_path)
    assert furthest(one, two) < 1e-5


def test_without_the_others_gradients_it_is_not_equal(cores, tmp_path, monkeypatch) -> None:
    """The check above must see a part that is left out, of the dense gradients or of the tables'."""
    one = parameters_after("resident", "sgd", tmp_path, Listed())

    def only_mine(dense, mine, others) -> None:
        for parameter, gradient in zip(dense, mine.gradients, strict=True):
            parameter.grad = gradient

    with monkeypatch.context() as patch:
        patch.setattr(two_cores, "_add_up", only_mine)
        assert furthest(one, trained(cores, "resident", "sgd", tmp_path)) > 1e-3
    update = two_cores.update_tables

    def first_rows_only(staged, pooled, gradient) -> None:
        gradient[SHARE:] = 0
        update(staged, pooled, gradient)

    monkeypatch.setattr(two_cores, "update_tables", first_rows_only)
    assert furthest(one, trained(cores, "resident", "sgd", tmp_path)) > 1e-3


def test_it_is_reproducible_to_the_bit(cores, tmp_path) -> None:
    first, second = (trained(cores, "resident", "rowwise_adagrad", tmp_path) for _ in range(2))
    assert identical(first, second)


@pytest.mark.parametrize("model", ["dlrm", "dlrm_dcn"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_loss_logits_and_gradients_are_those_of_one_core(cores, model, precision) -> None:
    torch.manual_seed(3)
    config = ModelConfig(model, DIM, [16], [16], cross_layers=2, cross_rank=4, precision=precision)
    ranker = Ranker(config, ResidentCollection(table_set("sgd", lr=1e-20), CPU), DENSE, CPU)
    dense = list(ranker.dense_parameters().values())
    staged = StagedBatch(random_batch(np.random.default_rng(0), SIZE, True))
    found = []
    for step in (
        lambda: accumulate(ranker, staged, StepTimes()),
        lambda: cores.accumulate(ranker, dense, staged, SHARE),
    ):
        for parameter in dense:
            parameter.grad = None
        loss, logits = step()
        assert not loss.requires_grad
        assert not logits.requires_grad
        found.append((loss, logits, *(parameter.grad for parameter in dense)))
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2}[precision]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("row", [3, SIZE - 1])
@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_a_loss_that_is_no_number_changes_no_table(cores, tmp_path, policy, row) -> None:
    """Whichever core's sample it is."""
    embeddings = collection_of(policy, "adagrad", tmp_path)
    ranker = ranker_over(embeddings)
    dense = list(ranker.dense_parameters().values())
    before = dump(embeddings)
    for value in (float("nan"), 1.0):
        batch = random_batch(np.random.default_rng(0), SIZE, True)
        batch.dense[row, 1] = value
        plan = None
        if policy != "resident":
            plan = embeddings.plan(batch.sparse)
            embeddings.advance(plan)
        loss, _ = cores.accumulate(ranker, dense, StagedBatch(batch, plan), SHARE)
        assert bool(torch.isnan(loss)) == (value != 1.0)
        assert identical(dump(embeddings), before) == (value != 1.0)


@pytest.mark.parametrize("where", ["other bottom", "own bottom", "look up", "other backward", "adding up"])
def test_a_fault_on_one_core_is_raised_and_leaves_no_one_waiting(cores, tmp_path, monkeypatch, where) -> None:
    ranker = ranker_over(collection_of("resident", "sgd", tmp_path))
    staged = StagedBatch(random_batch(np.random.default_rng(0), SIZE, True))
    dense = list(ranker.dense_parameters().values())
    main, bottom, threads = threading.current_thread(), ranker.bottom, torch.get_num_threads()

    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError(where)

    def failing_bottom(features):
        if (threading.current_thread() is main) != (where == "own bottom"):
            return bottom(features)
        if where != "other backward":
            failing()
        out = bottom(features)
        out.register_hook(failing)
        return out

    with monkeypatch.context() as patch:
        if where == "look up":
            patch.setattr(two_cores, "look_up", failing)
        elif where == "adding up":
            patch.setattr(two_cores, "_add_up", failing)
        else:
            patch.setattr(ranker, "bottom", failing_bottom)
        with pytest.raises(RuntimeError, match=where):
            cores.accumulate(ranker, dense, staged, SHARE)
    assert torch.get_num_threads() == threads
    loss, _ = cores.accumulate(ranker, dense, staged, SHARE)
    assert torch.isfinite(loss)


def test_a_step_leaves_nothing_in_memory(cores, tmp_path, monkeypatch) -> None:
    """A cycle through autograd's graph would keep a batch's activations until the end."""
    kept: list[weakref.ref] = []
    made = two_cores._Part.__init__

    def remembered(self, *arguments: object) -> None:
        made(self, *arguments)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(two_cores._Part, "__init__", remembered)
    ranker = ranker_over(collection_of("resident", "sgd", tmp_path))
    dense = list(ranker.dense_parameters().values())
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            staged = StagedBatch(random_batch(np.random.default_rng(seed), SIZE, True))
            cores.accumulate(ranker, dense, staged, SHARE)
    finally:
        gc.enable()
    assert len(kept) == 6
    # The other thread may still hold what it did last.
    assert not [part for part in kept[:4] if part() is not None]


# -- who shares ------------------------------------------------------------------------------


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def large(size: int = LEAST_SAMPLES, **rest: object) -> StagedBatch:
    return StagedBatch(random_batch(np.random.default_rng(0), size, False), **rest)


def wide_ranker(precision: str = "float32", groups: int = 1) -> Ranker:
    config = ModelConfig("dlrm", DIM, [64, 64], [64, 64], precision=precision)
    return Ranker(config, ResidentCollection(table_set("sgd"), CPU, groups), DENSE, CPU)


@pytest.mark.usefixtures("two_threads")
def test_the_core_with_the_tables_takes_a_little_less() -> None:
    shares = [own_share(wide_ranker(precision), large()) for precision in ("float32", "bfloat16")]
    assert LEAST_SAMPLES * two_cores.LEAST_SHARE - two_cores.ROWS < shares[1] <= shares[0] < LEAST_SAMPLES / 2
    assert all(share % two_cores.ROWS == 0 for share in shares)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("why", "staged"),
    [
        ("too few samples", large(LEAST_SAMPLES - 1)),
        ("micro-batches", large(bounds=(100, LEAST_SAMPLES))),
        ("a share of a batch", large(alone=False)),
        ("ids on their way", large(upcoming=large())),
    ],
)
def test_some_batches_are_not_shared(why, staged) -> None:
    assert own_share(wide_ranker(), large()) > 0
    assert own_share(wide_ranker(), staged) == 0, why


@pytest.mark.usefixtures("two_threads")
def test_lookups_that_have_threads_of_their_own_keep_both_cores() -> None:
    ranker = wide_ranker(groups=2)
    assert own_share(ranker, large()) == 0
    ranker.embeddings.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_only_two_threads_share(threads) -> None:
    def share() -> int:
        torch.set_num_threads(threads)
        return own_share(wide_ranker(), large())

    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(share).result() == 0
    torch.set_num_threads(before)
