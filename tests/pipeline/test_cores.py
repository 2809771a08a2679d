"""Cores that share a batch's samples: the same gradients, reproducible, and nobody left waiting."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch

from recpipe.backend import pairs
from recpipe.backend.build import Backend
from recpipe.backend.chain import Chooser
from recpipe.pipeline import step as step_module
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step import ROWS, Cores, StepTimes, accumulate
from recpipe.tables.group_rows import GroupRows
from tests.pipeline.samples import (
    SIZE,
    Listed,
    collection_of,
    furthest,
    model_config,
    model_over,
    parameters_after,
    random_batch,
)
from tests.pipeline.test_step import AnySplit
from tests.tables.samples import dump, identical

POLICIES = ["resident", "nocache", "lru"]


class FewSamples(Cores):
    """Shares out whatever has two samples or more, in uneven parts."""

    def __init__(self, count: int) -> None:
        super().__init__(count, lambda _: 1.0)
        self.shared_out = 0

    def shares(self, samples: int) -> list[int]:
        ends = {samples * (2 * core + 1) // (2 * self.count) for core in range(1, self.count)}
        found = [*sorted(ends - {0, samples}), samples]
        self.shared_out += len(found) > 1
        return found


@pytest.fixture(params=[2, 3])
def cores(request) -> Iterator[FewSamples]:
    made = FewSamples(request.param)
    yield made
    made.close()


def trained(cores: FewSamples, policy: str, optimizer: str, folder: Path, **parts: object):
    """Every parameter after an epoch in which cores share each batch or micro-batch."""
    folder.mkdir(exist_ok=True)
    return parameters_after(policy, optimizer, folder, Listed(), partial(accumulate, cores=cores), **parts)


@pytest.mark.parametrize("parts", ["whole", "micro-batches"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("policy", POLICIES)
def test_cores_equal_one(cores, tmp_path, policy, optimizer, parts) -> None:
    one = parameters_after(policy, optimizer, tmp_path, Listed())
    split = {"splitter": AnySplit(1, True)} if parts == "micro-batches" else {}
    several = trained(cores, policy, optimizer, tmp_path / "several", **split)
    assert cores.shared_out > 20 if split else cores.shared_out == 10
    assert furthest(one, several) < 1e-5


def test_loops_write_gradients_where_rows_were(cores, tmp_path, monkeypatch) -> None:
    """The interaction's and the tables' loops, with rows that have room for the dense vector."""
    one = parameters_after("resident", "rowwise_adagrad", tmp_path, Listed())
    spent, converted, gradients = list[bool](), list[Backend](), pairs.gradients
    monkeypatch.setattr(pairs, "gradients", lambda *given: spent.append(given[-1]) or gradients(*given))
    ways = ("dot", "tables")
    monkeypatch.setattr(Chooser, "way", lambda _, part, n: "loops" if part.startswith(ways) else "plain")

    def step(model: PlacedModel, *given) -> torch.Tensor:
        if not converted:
            converted.append(Backend("auto", model, {}))
        return accumulate(model, *given, cores)

    several = parameters_after("resident", "rowwise_adagrad", tmp_path, Listed(), step)
    assert len(spent) == 10 * cores.count
    assert all(spent)
    assert furthest(one, several) < 1e-5


@pytest.mark.parametrize("splitter", [None, AnySplit(1, True)])
def test_without_the_others_gradients_it_is_not_equal(cores, tmp_path, monkeypatch, splitter) -> None:
    """The check above must see a part that is left out, of the dense gradients or of the tables'."""
    one = parameters_after("resident", "sgd", tmp_path, Listed())
    train, gradient = step_module._CorePart.train, GroupRows._gradient

    def only_mine(self) -> None:
        train(self)
        if threading.current_thread() is not threading.main_thread():
            self.gradients = [None] * len(self.gradients)

    with monkeypatch.context() as patch:
        patch.setattr(step_module._CorePart, "train", only_mine)
        others = trained(cores, "resident", "sgd", tmp_path, splitter=splitter)
        assert furthest(one, others) > 1e-4

    def without_the_last(self) -> torch.Tensor:
        low, high, _ = max(self._given, key=lambda part: part[:2])
        found = gradient(self)
        found[low:high] = 0
        return found

    monkeypatch.setattr(GroupRows, "_gradient", without_the_last)
    assert furthest(one, trained(cores, "resident", "sgd", tmp_path, splitter=splitter)) > 1e-4


@pytest.mark.parametrize("split", [False, True])
def test_it_is_reproducible_to_the_bit(cores, tmp_path, split) -> None:
    first, second = (
        trained(
            cores, "lru", "rowwise_adagrad", tmp_path / name, splitter=AnySplit(1, True) if split else None
        )
        for name in ("first", "second")
    )
    assert identical(first, second)


@pytest.mark.parametrize("bounds", [(), (8, SIZE)])
@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_loss_and_gradients_are_those_of_one_core(cores, tmp_path, name, precision, bounds) -> None:
    embeddings = collection_of("nocache", "sgd", tmp_path)
    model = model_over(embeddings, model_config(name, precision), seed=3)
    dense = list(model.dense_parameters().values())
    batch = random_batch(np.random.default_rng(0), SIZE, True)
    before = dump(embeddings)
    found = []
    for shared in (None, cores):
        for parameter in dense:
            parameter.grad = None
        loss = accumulate(model, InFlight(batch, bounds=bounds), StepTimes(), shared)
        assert not loss.requires_grad
        found.append((loss, *(parameter.grad for parameter in dense)))
        for region in embeddings.regions():
            rows = before[region.table][region.start : region.stop]
            embeddings.write(region, (rows[:, : embeddings.tables.dim], rows[:, embeddings.tables.dim :]))
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2}[precision]
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(several, one, rtol=tolerance, atol=tolerance)
    embeddings.close()


class Tied(torch.nn.Module):
    """Gradients that share memory: of two parameters that are added, and of one that is summed."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.left, self.right = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.full((4,), 0.25))

    def forward(self, dense_features, sparse_features):
        weights = self.left + self.right
        return self.inner(dense_features * weights, sparse_features) * self.scale.sum()


def test_gradients_that_share_memory_are_added_once(cores, tmp_path) -> None:
    model = model_over(collection_of("resident", "sgd", tmp_path))
    model.called.module = model.module = tied = Tied(model.module)
    found = []
    for shared in (None, cores):
        tied.zero_grad()
        batch = random_batch(np.random.default_rng(0), SIZE, True)
        accumulate(model, InFlight(batch), StepTimes(), shared)
        found.append([p.grad.clone() for p in (tied.left, tied.right, tied.scale)])
        model.embeddings.collections[0].fill_first_values()
    for one, several in zip(*found, strict=True):
        assert one.abs().max() > 1e-4
        torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("row", [3, SIZE - 1])
@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_a_loss_that_is_no_number_changes_no_table(cores, tmp_path, policy, row) -> None:
    """Whichever core's sample it is."""
    embeddings = collection_of(policy, "adagrad", tmp_path)
    model = model_over(embeddings)
    before = dump(embeddings)
    for value in (float("nan"), 1.0):
        batch = random_batch(np.random.default_rng(0), SIZE, True)
        batch.dense[row, 1] = value
        loss = accumulate(model, InFlight(batch), StepTimes(), cores)
        assert bool(torch.isnan(loss)) == (value != 1.0)
        assert identical(dump(embeddings), before) == (value != 1.0)
    embeddings.close()


FAULTS = ["other forward", "own forward", "look up", "other backward", "own backward", "adding up"]


@pytest.mark.parametrize("bounds", [(), (8, SIZE)])
@pytest.mark.parametrize("where", FAULTS)
def test_a_fault_on_one_core_is_raised_and_leaves_no_one_waiting(
    cores, tmp_path, monkeypatch, where, bounds
) -> None:
    embeddings = collection_of("resident", "sgd", tmp_path)
    model = model_over(embeddings)
    staged = InFlight(random_batch(np.random.default_rng(0), SIZE, True), bounds=bounds)
    main, threads = threading.current_thread(), torch.get_num_threads()

    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError(where)

    def hook(module, inputs, output):
        mine = threading.current_thread() is main
        if where.startswith("own") == mine and where.endswith("ward"):
            if where.endswith("forward"):
                failing()
            output.register_hook(failing)

    with monkeypatch.context() as patch, model.module.dense_arch.register_forward_hook(hook):
        if where == "look up":
            patch.setattr(embeddings, "compute", failing)
        elif where == "adding up":
            patch.setattr(step_module._Step, "_reduce_dense", failing)
        with pytest.raises(RuntimeError, match=where):
            accumulate(model, staged, StepTimes(), cores)
    assert torch.get_num_threads() == threads
    for parameter in model.dense_parameters().values():
        parameter.grad = None
    assert torch.isfinite(accumulate(model, staged, StepTimes(), cores))


def test_a_failed_lookup_waits_for_cores_that_have_not_asked_for_rows(cores, tmp_path, monkeypatch) -> None:
    """They would otherwise take those of the same batch's next try."""
    embeddings = collection_of("resident", "sgd", tmp_path)
    model = model_over(embeddings)
    failed, ended = threading.Event(), list[str]()
    train = step_module._CorePart.train

    def late(self) -> None:
        failed.wait()
        sleep(0.05)
        try:
            train(self)
        finally:
            ended.append(threading.current_thread().name)

    def failing(*_: object) -> torch.Tensor:
        failed.set()
        raise RuntimeError("look up")

    monkeypatch.setattr(step_module._CorePart, "train", late)
    monkeypatch.setattr(embeddings, "compute", failing)
    with pytest.raises(RuntimeError, match="look up"):
        accumulate(model, InFlight(random_batch(np.random.default_rng(0), SIZE, True)), StepTimes(), cores)
    assert len(ended) == cores.count - 1
    embeddings.close()


def test_a_step_leaves_nothing_in_memory(cores, tmp_path, monkeypatch) -> None:
    """A cycle through autograd's graph would keep a batch's activations until the end."""
    kept: list[weakref.ref] = []
    made = step_module._CorePart.__init__

    def remembered(self, *arguments: object) -> None:
        made(self, *arguments)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(step_module._CorePart, "__init__", remembered)
    model = model_over(collection_of("resident", "sgd", tmp_path))
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            batch = random_batch(np.random.default_rng(seed), SIZE, True)
            accumulate(model, InFlight(batch), StepTimes(), cores)
    finally:
        gc.enable()
    assert len(kept) == 3 * cores.count
    # Another thread may still hold what it did last.
    assert not [part for part in kept[: -cores.count] if part() is not None]


# -- how many samples each takes ---------------------------------------------------------------


def shares(count: int, samples: int, first: float | None) -> list[int]:
    made = Cores(count, lambda _: first)
    try:
        return made.shares(samples)
    finally:
        made.close()


@pytest.mark.parametrize("first", [1.0, 0.8])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_first_core_takes_its_share_and_the_others_the_rest(count, first) -> None:
    samples = 1000 * count + 7
    ends = shares(count, samples, first)
    sizes = [high - low for low, high in pairwise([0, *ends])]
    assert ends[-1] == samples
    assert len(sizes) == count
    assert all(size % ROWS == 0 for size in sizes[:-1])
    assert 0 <= first * samples / count - sizes[0] < ROWS
    assert max(sizes[1:]) - min(sizes[1:]) < ROWS * count


@pytest.mark.parametrize("samples", [0, 1, 15, 20, 33])
def test_few_samples_leave_no_core_with_nothing(samples) -> None:
    ends = shares(3, samples, 0.8)
    assert ends[-1] == samples
    assert all(low < high for low, high in pairwise([0, *ends])) or ends == [0]


def test_samples_are_not_shared_where_that_does_not_pay() -> None:
    assert shares(2, 4096, None) == [4096]
