"""The loader: every batch once, through the plugins' chains, from any position; faults come out."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import Aside
from recpipe.data.select import select
from recpipe.errors import DataError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.splitting import in_steps
from recpipe.plugin.api import Link
from recpipe.plugin.bags import Bags
from recpipe.plugin.errors import PluginError
from recpipe.plugin.splitter import Split, micro_batch_step
from recpipe.tables.rows import table_bags
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from tests.pipeline.samples import (
    SIZE,
    Listed,
    collection_of,
    eval_loader_of,
    loader_of,
    parameters_after,
)
from tests.pretend_gpu.late import GPU, FakeGpu, gpu
from tests.tables.samples import FEATURES, identical

__all__ = ["gpu"]


def same(left, right) -> bool:
    return (
        torch.equal(left.dense, right.dense)
        and torch.equal(left.labels, right.labels)
        and torch.equal(left.sparse.values(), right.sparse.values())
        and torch.equal(left.sparse.offsets(), right.sparse.offsets())
    )


def test_every_batch_once_in_order_the_short_last_one_too() -> None:
    dataset = Listed(count=10, last=7)
    loader = loader_of(dataset)
    assert len(loader) == 10
    for _ in range(2):
        seen = [staged.batch for staged in loader]
        assert [batch.size for batch in seen] == [SIZE] * 9 + [7]
        assert all(map(same, seen, dataset.lists["train"]))
    ids = sum(batch.sparse.values().numel() for batch in dataset.lists["train"])
    assert loader.lookups == 2 * ids


def test_a_resumed_epoch_starts_at_first_and_the_next_one_at_0() -> None:
    dataset = Listed()
    loader = loader_of(dataset)
    loader.first = 6
    assert all(map(same, (s.batch for s in loader), dataset.lists["train"][6:]))
    assert len(list(loader)) == 10


class Counting(L.LightningModule):
    """Counts the batches that Lightning hands to training."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[float]] = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch, batch_idx) -> None:
        self.seen[-1].append(float(batch.batch.dense[0, 0]))
        self.optimizers().step()


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_lightning_trains_10_of_10_batches(tmp_path, policy) -> None:
    dataset = Listed(count=10)
    embeddings = collection_of(policy, "sgd", tmp_path)
    module = Counting()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader_of(dataset, embeddings))
    first_values = [float(batch.dense[0, 0]) for batch in dataset.lists["train"]]
    assert module.seen == [first_values, first_values]
    assert trainer.global_step == 20


def test_chains_and_splitter_are_applied_in_order() -> None:
    dataset = Listed(count=4)
    threads = set()

    def add_sum(batches):
        for batch in batches:
            threads.add(threading.current_thread().name)
            batch.dense[:, 0] += 1
            yield batch

    def twice(batches):
        for batch in batches:
            batch.dense[:, 0] *= 2
            yield batch
            yield batch

    def negated(batch):
        batch.dense[:, 0] *= -1
        return batch

    def reverse(batch, needs_cold):
        assert not needs_cold.any()
        return Split(np.arange(batch.size)[::-1].copy(), (2, batch.size))

    original = [batch.dense[:, 0].clone() for batch in dataset.lists["train"]]
    loader = loader_of(
        dataset,
        stream=[Link(add_sum, "add"), Link(twice, "twice", after=("acme.add",))],
        batch=[Link(negated)],
        splitter=reverse,
    )
    loader.source.feed = replace(loader.source.feed, leaving_out={"acme"})
    seen = list(loader)
    assert len(seen) == 8, "a stream may hold other batches than the data"
    # The same batch twice: negated twice, so only the first sight of each can be told.
    for staged in seen:
        assert staged.bounds == (2, staged.batch.size)
    assert threads == {"recpipe-loader_0"}
    assert torch.allclose(dataset.lists["train"][0].dense[:, 0], (original[0] + 1) * 2)
    assert torch.allclose(seen[0].batch.dense[:, 0].flip(0), -(original[0] + 1) * 2)


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ((100, 128), (96, 128)),
        ((7, 128), (128,)),
        ((8, 128), (8, 128)),
        ((17, 23, 128), (16, 128)),
        ((17, 24, 127), (16, 24, 127)),
        ((5,), (5,)),
    ],
)
def test_micro_batches_end_at_steps(bounds: tuple[int, ...], kept: tuple[int, ...]) -> None:
    assert in_steps(bounds, micro_batch_step(128)) == kept


def test_whatever_a_splitter_says_there_are_few_sizes() -> None:
    """Kernels are made and kept for every size."""
    wished = cycle(range(1, SIZE))

    def ever_new(batch, needs_cold) -> Split:
        return Split(np.arange(batch.size), (next(wished), batch.size))

    sizes: set[int] = set()
    for staged in loader_of(Listed(count=60, last=SIZE), splitter=ever_new):
        sizes.update(np.diff([0, *staged.bounds]).tolist())
    assert len(sizes) <= 16 < SIZE


def test_permuted_moves_whole_samples() -> None:
    batch = Listed(count=1, last=9).lists["train"][0]
    order = np.random.default_rng(0).permutation(9)
    moved = select(batch, order)
    assert torch.equal(moved.dense, batch.dense[order])
    assert torch.equal(moved.labels, batch.labels[order])
    for feature in FEATURES:
        bags, expected = moved.sparse[feature.name].to_dense(), batch.sparse[feature.name].to_dense()
        assert all(torch.equal(bag, expected[s]) for bag, s in zip(bags, order, strict=True))


def fail(*_):
    raise ZeroDivisionError("in the worker")


def failing_stream(batches):
    yield next(batches)
    fail()


@pytest.mark.parametrize(
    "parts",
    [{"stream": [Link(failing_stream)]}, {"batch": [Link(fail)]}, {"splitter": fail}],
    ids=["stream", "batch", "splitter"],
)
@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_faults_in_the_worker_come_out(tmp_path, policy, parts) -> None:
    embeddings = collection_of(policy, "sgd", tmp_path)
    with pytest.raises(PluginError, match="acme .*raised ZeroDivisionError: in the worker"):
        list(loader_of(Listed(), embeddings, **parts))


def test_faults_of_the_data_come_out_after_the_good_batches() -> None:
    dataset = Listed()
    given = [*dataset.lists["train"][:3], None]
    dataset.batches = lambda *_: (batch or fail() for batch in given)
    batches = iter(loader_of(dataset))
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(ZeroDivisionError):
        next(batches)


def test_an_epoch_left_early_ends_its_thread() -> None:
    batches = iter(loader_of(Listed()))
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("recpipe-loader")]


def test_an_epoch_left_early_ends_the_links_of_its_stream_the_last_one_first() -> None:
    ended = []

    def link(name: str):
        def wrap(batches):
            kept.append(batches)
            try:
                for batch in batches:  # noqa: UP028  a loop does not end what it goes over
                    yield batch
            finally:
                ended.append(name)

        return Link(wrap, name)

    kept: list[object] = []  # so that it is not garbage that ends them
    batches = iter(loader_of(Listed(), stream=[link("first"), link("last")]))
    next(batches)
    batches.close()
    assert ended == ["last", "first"]


def test_eval_loader_yields_the_held_out_part() -> None:
    dataset = Listed()
    loader = eval_loader_of(dataset)
    assert len(loader) == 2
    for _ in range(2):
        assert all(map(same, loader, dataset.lists["eval"]))


def test_a_transform_changes_what_is_trained(tmp_path) -> None:
    def zeroed(batch):
        batch.dense.zero_()
        return batch

    plain = parameters_after("lru", "sgd", tmp_path, Listed())
    changed = parameters_after("lru", "sgd", tmp_path, Listed(), batch=[Link(zeroed)])
    assert not np.allclose(
        plain["dense_arch.model._mlp.0._linear.weight"], changed["dense_arch.model._mlp.0._linear.weight"]
    )


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_an_id_that_is_not_in_its_table_is_an_error(tmp_path, wrong) -> None:
    """Also of a plugin's transform; FBGEMM would look up row 0, or what is not its memory."""
    dataset = Listed()
    for split in ("train", "eval"):
        dataset.lists[split][1].sparse.values()[-1] = wrong
    name = FEATURES[-1].name
    expected = f"id {wrong} of feature {name} is not in its table of {FEATURES[-1].rows} rows"
    for loader in (loader_of(dataset), eval_loader_of(dataset)):
        batches = iter(loader)
        next(batches)
        with pytest.raises(DataError, match=expected):
            next(batches)


def test_a_batch_for_a_gpu_is_copied_beside_the_training_and_waited_for(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Listed(count=4)
    loader = loader_of(dataset, device=GPU)
    assert all(map(same, (staged.batch for staged in loader), dataset.lists["train"]))
    assert {thread for thread, _ in gpu.set} == {"recpipe-loader_0"}
    monkeypatch.setattr(InFlight, "arrive", lambda batch: None)
    assert not any(map(same, (staged.batch for staged in loader), dataset.lists["train"])), "the control"


def test_ids_are_copied_once_something_has_read_them_and_then_with_their_batch(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    """Rows are looked up by slots, so that training reads no ids."""
    dataset = Listed(count=6)
    with closing(collection_of("lru", "sgd", tmp_path)) as embeddings:
        loader = loader_of(dataset, embeddings, device=GPU)
        for number, staged in enumerate(loader):
            ids = staged.batch.sparse
            assert ids.device() == GPU
            if number != 1:  # which is staged while the first one is read
                assert set(ids._read) == ({"values", "offsets"} if number else set())
            assert ids.length_per_key() == dataset.lists["train"][number].sparse.length_per_key()
            assert same(staged.batch, dataset.lists["train"][number])


def test_all_memory_of_a_batch_is_kept_until_training_has_used_it(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also offsets, from which training computes lengths only once they have arrived."""
    ids = KeyedJaggedTensor(["a"], torch.arange(3), offsets=torch.tensor([0, 1, 3]))
    staged = InFlight([torch.ones(2)], ids=(ids,), size=2, copied=Aside(GPU).mark())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    staged.arrive()
    kept = {memory for memory, stream in gpu.lent if stream is gpu.default}
    assert kept == {t.untyped_storage().data_ptr() for t in (*staged.batch, ids.values(), ids.offsets())}
    assert ids.lengths_or_none() is None


@pytest.mark.parametrize("sees", [False, True])
def test_batches_are_read_further_ahead_where_a_gpu_finds_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    """In a thread of their own, unless a plugin's part may have seen what has been trained."""
    parts = {"batch": [Link(lambda batch: batch)]} if sees else {}
    plain = parameters_after("lru", "sgd", tmp_path / "plain", Listed(), **parts)
    threads: list[str] = []

    def find(tiers: TieredEmbeddingBagCollection, sparse: KeyedJaggedTensor) -> Bags:
        threads.append(threading.current_thread().name)
        return table_bags(tiers.tables, sparse)

    monkeypatch.setattr(TieredEmbeddingBagCollection, "finds_ahead", True)
    monkeypatch.setattr(TieredEmbeddingBagCollection, "find", find)
    found = parameters_after("lru", "sgd", tmp_path / "found", Listed(), **parts)
    assert identical(found, plain)
    assert len(threads) == 10
    assert set(threads) == {"recpipe-loader_0" if sees else "recpipe-reader_0"}


def test_a_fault_in_a_batch_that_was_read_ahead_comes_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(tiers: TieredEmbeddingBagCollection, sparse: KeyedJaggedTensor) -> Bags:
        if sparse.stride() != SIZE:  # the last batch
            raise DataError("unknown")
        return table_bags(tiers.tables, sparse)

    monkeypatch.setattr(TieredEmbeddingBagCollection, "finds_ahead", True)
    monkeypatch.setattr(TieredEmbeddingBagCollection, "find", find)
    dataset = Listed(count=5)
    embeddings = collection_of("lru", "sgd", tmp_path)
    seen: list[int] = []
    with closing(embeddings), pytest.raises(DataError, match="unknown"):
        seen.extend(staged.size for staged in loader_of(dataset, embeddings))
    assert seen == [SIZE] * 4


@pytest.mark.parametrize("there", [True, False])
def test_a_batch_that_its_source_made_on_the_gpu_is_waited_for(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """One in host memory is not: its copy would wait for the training."""
    dataset = Listed(count=1)
    loader = loader_of(dataset, device=GPU)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: there))
    gpu.default.add(lambda: None)
    assert loader._read(iter(dataset.lists["train"])) is not None
    assert bool(gpu.default.late) is not there
