"""A skipper in the pipeline: samples left out of batches, and rows left out of the update of whole models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.select import select
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.step import Cores, StepTimes, accumulate
from recpipe.plugin.api import Link
from recpipe.plugin.batch import Batch
from recpipe.plugin.errors import PluginError
from recpipe.plugin.skipper import RowView, Skipper
from recpipe.plugin.tables import TableOptimizer
from tests.pipeline.samples import (
    SIZE,
    Listed,
    collection_of,
    loader_of,
    loader_over,
    model_over,
    placed,
)
from tests.pipeline.test_cores import FewSamples
from tests.pipeline.test_late import BOUND, OPTIMIZERS, other_ids
from tests.pipeline.test_step import AnySplit
from tests.tables.samples import DIM, FEATURES, dump, identical, tiers
from tests.tables.skippers import filter_of

COUNT = 6


class Odd(Skipper):
    """Keeps every other sample, of every third batch all, and none of the next."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.begun = 0

    def begin(self, view: RowView) -> None:
        self.begun += 1

    def keep(self, batch: Batch, number: int) -> np.ndarray | None:
        self.numbers.append(number)
        if number % 3:
            return np.zeros(batch.size, bool) if number % 3 == 1 else np.arange(batch.size) % 2 == 1
        return None


def test_weights_are_of_the_samples_that_are_kept() -> None:
    dataset = Listed(count=2)
    for batch in dataset.lists["train"]:
        batch.weights = torch.arange(batch.size, dtype=torch.float32)
    kept = [each.batch for each in skipping(Odd(), dataset)]
    for batch, whole, own in zip(kept, dataset.lists["train"], (slice(None), slice(None)), strict=True):
        assert batch.weights is not None
        assert whole.weights is not None
        expected = whole.weights[own] * (batch.size / whole.weights[own].sum())
        torch.testing.assert_close(batch.weights, expected)
    half = Odd()
    half.keep = lambda batch, number: np.arange(batch.size) % 2 == 1  # type: ignore[method-assign]
    for each, whole in zip(skipping(half, dataset), dataset.lists["train"], strict=True):
        assert each.skipped
        own = whole.weights[1::2]
        torch.testing.assert_close(each.batch.weights, own * (len(own) / own.sum()))


def skipping(skipper: Skipper, dataset: Listed, **parts: object) -> TrainLoader:
    view = model_over(collection_of("resident", "sgd", Path())).rows
    return loader_of(dataset, view=view, skipper=skipper, **parts)


def test_samples_are_left_out_and_counted() -> None:
    dataset, skipper = Listed(COUNT, last=SIZE), Odd()
    staged = list(skipping(skipper, dataset))
    assert skipper.numbers == list(range(COUNT))
    assert skipper.begun == 1
    assert [one.size for one in staged] == [SIZE, SIZE, SIZE // 2] * 2, (
        "of which nothing is left, it is whole"
    )
    assert [one.skipped for one in staged] == [0, 0, SIZE // 2] * 2
    assert [one.consumed for one in staged] == [SIZE] * COUNT
    kept = dataset.lists["train"][2]
    assert torch.equal(staged[2].batch.dense, kept.dense[1::2])


def test_batches_are_counted_over_epochs_and_those_that_were_not_trained_are_not() -> None:
    skipper = Odd()
    loader = skipping(skipper, Listed(COUNT))
    list(loader)
    taken = iter(loader)
    for _ in range(2):
        next(taken)
    taken.close()  # type: ignore[attr-defined]
    loader.first = 2
    list(loader)
    assert skipper.begun == 1
    assert skipper.numbers[:COUNT] == list(range(COUNT))
    read_ahead = skipper.numbers[COUNT : -(COUNT - 2)]
    assert read_ahead in ([6, 7], [6, 7, 8]), "the third may have been read"
    assert skipper.numbers[-(COUNT - 2) :] == list(range(COUNT + 2, 2 * COUNT))


def test_a_resumed_loader_goes_on_counting() -> None:
    skipper = Odd()
    loader = skipping(skipper, Listed(COUNT))
    loader.first, loader.handed_out = 4, 10
    list(loader)
    assert skipper.numbers == [10, 11]


def test_the_batch_chain_comes_first_and_the_splitter_sees_what_is_left() -> None:
    sizes: list[int] = []

    def halve(batch: Batch) -> Batch:
        return select(batch, np.arange(batch.size // 2))

    class Watch(Skipper):
        def keep(self, batch: Batch, number: int) -> np.ndarray:
            sizes.append(batch.size)
            return np.arange(batch.size) < 12

    loader = skipping(Watch(), Listed(COUNT, last=SIZE), batch=[Link(halve)], splitter=AnySplit(1, True))
    staged = list(loader)
    assert sizes == [SIZE // 2] * COUNT
    assert {one.size for one in staged} == {12}
    assert {(one.consumed, one.skipped) for one in staged} == {(SIZE, SIZE // 2 - 12)}


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (np.ones(3, bool), r"bool \[3\]"),
        (np.ones(SIZE), r"float64 \[32\]"),
        (torch.ones(SIZE, dtype=torch.bool), r"torch.bool \[32\]"),
        ([True] * SIZE, "list"),
    ],
    ids=["shape", "dtype", "torch", "list"],
)
def test_a_wrong_answer_names_the_plugin(answer: object, shown: str) -> None:
    class Wrong(Skipper):
        def keep(self, batch: Batch, number: int) -> np.ndarray:
            return answer  # type: ignore[return-value]

    wanted = rf"part acme.Wrong: keep\(\) returned {shown}; it must be a numpy array of bool \[32\]"
    with pytest.raises(PluginError, match=wanted):
        list(skipping(Wrong(), Listed(COUNT)))


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_a_run_of_the_kept_samples_alone_has_the_same_bits(policy: str, tmp_path: Path) -> None:
    """Left-out samples contribute nothing; they do where the skipper is not there."""
    dataset, only = Listed(COUNT, last=SIZE), Listed(COUNT, last=SIZE)
    only.lists["train"] = [
        select(batch, np.arange(1, batch.size, 2)) if n % 3 == 2 else batch
        for n, batch in enumerate(only.lists["train"])
    ]

    def trained(data: Listed, skipper: Skipper | None) -> dict[str, np.ndarray]:
        embeddings = collection_of(policy, "rowwise_adagrad", tmp_path)
        model = model_over(embeddings)
        parts = {} if skipper is None else {"skipper": skipper}
        loader = loader_of(data, embeddings, view=model.rows, **parts)
        dense = torch.optim.SGD(model.dense_parameters().values(), lr=0.1)
        for staged in loader:
            dense.zero_grad()
            accumulate(model, staged, StepTimes())
            dense.step()
        left = dump(embeddings)
        embeddings.close()
        return left

    left = trained(dataset, Odd())
    assert identical(left, trained(only, None))
    assert not identical(left, trained(dataset, None))


# -- rows --------------------------------------------------------------------------------------

LEAST = 6e-3


class SkipSmall(Skipper):
    def update(self, rows: np.ndarray, gradients: torch.Tensor) -> torch.Tensor:
        return stay(rows, gradients)


def stay(rows: np.ndarray, gradients: torch.Tensor) -> torch.Tensor:
    norms = gradients.norm(dim=1)
    assert not ((norms - LEAST).abs() < 1e-7).any(), "rounding must not decide"
    return (norms >= LEAST) & torch.from_numpy(rows % 7 != 3)


class Means(nn.Module):
    """Bags of which each is summed or averaged, table by table; ``late``: looked up by other ids as well."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        poolings = [PoolingType.MEAN, PoolingType.SUM, PoolingType.MEAN]
        configs = [
            EmbeddingBagConfig(
                name=f.name, embedding_dim=DIM, num_embeddings=f.rows, feature_names=[f.name], pooling=pooling
            )
            for f, pooling in zip(FEATURES, poolings, strict=True)
        ]
        self.late, self.rows = late, EmbeddingBagCollection(configs)
        self.over = nn.Linear((1 + late) * len(FEATURES) * DIM, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        looks: list[KeyedJaggedTensor] = [batch.sparse, *([other_ids(batch.sparse)] if self.late else [])]
        logits = self.over(torch.cat([self.rows(ids).values() for ids in looks], dim=1)).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


def by_hand(late: bool, optimizer: str, leaves_out: bool = True) -> dict[str, torch.Tensor]:
    """torch's own optimizer, with gradients of zero for rows that do not stay."""
    model = Means(late)
    optimizers = [
        OPTIMIZERS[optimizer](model.rows.parameters()),
        torch.optim.SGD(model.over.parameters(), 0.1),
    ]
    left_out = 0
    for batch in Listed().lists["train"]:
        for each in optimizers:
            each.zero_grad()
        model(batch)[0].backward()
        base = 0
        for feature in FEATURES:
            gradient = model.rows.embedding_bags[feature.name].weight.grad
            ids = torch.nonzero(gradient.any(dim=1)).view(-1)
            kept = stay(ids.numpy() + base, gradient[ids])
            if leaves_out:
                gradient[ids[~kept]] = 0.0
            left_out += int((~kept).sum())
            base += feature.rows
        for each in optimizers:
            each.step()
    assert left_out > 100
    return model.state_dict()


def by_recpipe(
    late: bool, policy: str, optimizer: str, folder: Path, cores: Cores | None = None, **parts: object
) -> dict[str, torch.Tensor]:
    dataset = Listed()
    over = None if policy == "resident" else (lambda tables: tiers(tables, policy, folder))
    made = placed(
        Means(late), dataset.lists["train"][0], over, lambda name, w: TableOptimizer(optimizer, 0.1)
    )
    made.embeddings.collections[0].filter_updates(filter_of(SkipSmall(), 0))
    dense = torch.optim.SGD(made.dense_parameters().values(), lr=0.1)
    for staged in loader_over(dataset, made.inputs, made.embeddings.groups, **parts):
        dense.zero_grad()
        accumulate(made, staged, StepTimes(), cores)
        dense.step()
    state: dict[str, torch.Tensor] = made.module.state_dict()
    made.embeddings.close()
    return state


def apart(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in right)


@pytest.mark.parametrize("late", [False, True], ids=["own ids", "and others"])
@pytest.mark.parametrize("policy", ["resident", "lru", "nocache"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_means_and_rows_of_the_models_own_ids(
    optimizer: str, policy: str, late: bool, tmp_path: Path
) -> None:
    """A mean divides the gradient; a row that is looked up by other ids, too, is judged by all of it."""
    found = by_recpipe(late, policy, optimizer, tmp_path)
    assert apart(found, by_hand(late, optimizer)) < BOUND[optimizer]
    assert apart(found, by_hand(late, optimizer, leaves_out=False)) > 1e-3


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_micro_batches_are_one_update(policy: str, tmp_path: Path) -> None:
    found = by_recpipe(False, policy, "rowwise_adagrad", tmp_path, splitter=AnySplit(1, True))
    assert apart(found, by_hand(False, "rowwise_adagrad")) < 1e-5


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_cores_that_share_a_batch_make_one_update(policy: str, tmp_path: Path) -> None:
    """Their rows' gradients are put where the rows were."""
    shared = FewSamples(2)
    found = by_recpipe(False, policy, "rowwise_adagrad", tmp_path, shared)
    shared.close()
    assert shared.shared_out
    assert apart(found, by_hand(False, "rowwise_adagrad")) < 1e-5
