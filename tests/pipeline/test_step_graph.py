"""A graph of the dense part's passes: the same values as without it, and what it refuses to repeat."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.backend.equip import CUDA_GRAPH, equip, equip_loop
from recpipe.errors import UserError
from recpipe.pipeline import step_graph
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step import StagedBatch, StepTimes, accumulate
from recpipe.pipeline.step_graph import BEFORE, StepGraph
from tests.fake_graph import FakeGraph
from tests.pipeline.samples import SIZE, Listed, parameters_after, placed
from tests.tables.samples import identical

OPTIMIZERS = ("sgd", "rowwise_adagrad")
POLICIES = ("resident", "nocache", "lru", "hot")
SAMPLES = 16


class Graphs:
    """A step for ``parameters_after`` with a graph over its model."""

    def __init__(self, make: Callable[[], Any] = FakeGraph) -> None:
        self.make, self.graph = make, None

    def __call__(self, model: PlacedModel, staged: StagedBatch, times: StepTimes) -> None:
        self.graph = self.graph or StepGraph(model, self.make)
        accumulate(model, staged, times, graph=self.graph)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_changes_nothing(tmp_path, policy, optimizer) -> None:
    step = Graphs()
    with_it = parameters_after(policy, optimizer, tmp_path / "with", Listed(count=10), step)
    without = parameters_after(policy, optimizer, tmp_path / "without", Listed(count=10))
    assert step.graph.trained == 9 - BEFORE  # not the last batch, which is short
    assert identical(with_it, without)


class Idle(FakeGraph):
    """Replays nothing."""

    def replay(self) -> None:
        pass


def test_what_is_not_replayed_is_missing(tmp_path) -> None:
    with_it = parameters_after("lru", "sgd", tmp_path / "with", Listed(), Graphs(Idle))
    assert not identical(with_it, parameters_after("lru", "sgd", tmp_path / "without", Listed()))


def test_a_batch_that_is_not_copied_is_not_trained(tmp_path, monkeypatch) -> None:
    first: list[list[torch.Tensor]] = []

    def tensors(batch: Any) -> list[torch.Tensor]:
        first.append([batch.dense, batch.labels])
        return first[0]

    monkeypatch.setattr(step_graph, "_tensors", tensors)
    with_it = parameters_after("lru", "sgd", tmp_path / "with", Listed(), Graphs())
    assert not identical(with_it, parameters_after("lru", "sgd", tmp_path / "without", Listed()))


# -- models and batches of others --------------------------------------------------------------


@dataclass
class Clicks:
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor
    note: Any = None


class Net(nn.Module):
    """Its mode says what it does beside a linear layer."""

    def __init__(self, mode: str = "", pooling: PoolingType = PoolingType.SUM) -> None:
        super().__init__()
        torch.manual_seed(2)
        config = EmbeddingBagConfig(
            name="t", embedding_dim=4, num_embeddings=50, feature_names=["x"], pooling=pooling
        )
        self.bags = EmbeddingBagCollection(tables=[config])
        self.norm, self.drop, self.top = nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 1)
        self.mode = mode

    def forward(self, batch: Clicks) -> torch.Tensor:
        ids = batch.ids
        if self.mode == "own ids":
            ids = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths())
        joined = torch.cat([batch.dense, self.bags(ids).values()], dim=1)
        if self.mode == "counts":
            joined = joined * ids.length_per_key()[0]
        if self.mode == "looks":
            joined = joined if float(joined.detach().sum()) > -1e9 else -joined
        if self.mode == "picks":
            joined = torch.where(joined > 0, joined, joined[joined > 0].mean())
        return self.top(self.drop(self.norm(joined))).squeeze(1)


def clicks(number: int, size: int = SAMPLES, note: Any = None) -> Clicks:
    made = torch.Generator().manual_seed(number)
    values = torch.randint(50, (size,), generator=made)
    ids = KeyedJaggedTensor(["x"], values, lengths=torch.ones(size, dtype=torch.int))
    return Clicks(torch.randn(size, 3, generator=made), ids, torch.rand(size, generator=made).round(), note)


def train(net: Net, batches: list[Clicks], graphs: bool, between: Callable[[int, Net], Any] | None = None):
    """Every loss, then every value of the model; and the graph."""
    model = placed(net, batches[0])
    graph = StepGraph(model, partial(FakeGraph, list(net.buffers()))) if graphs else None
    optimizer = torch.optim.SGD(list(model.dense), lr=0.1)
    torch.manual_seed(3)
    values = []
    for number, batch in enumerate(batches):
        if between is not None:
            between(number, net)
        optimizer.zero_grad()
        values.append(accumulate(model, StagedBatch(batch), StepTimes(), graph=graph))
        optimizer.step()
    with torch.no_grad():
        values += [model(batches[0]), *net.state_dict().values()]
    return [value.detach().clone() for value in values], graph


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_statistics_and_random_numbers_go_on() -> None:
    batches = [clicks(n) for n in range(8)]
    with_it, graph = train(Net(), batches, True)
    without, _ = train(Net(), batches, False)
    assert graph is not None
    assert graph.trained == 8 - BEFORE
    assert same(with_it, without)


def frozen(number: int, net: Net) -> None:
    net.top.bias.requires_grad_(number < 5)


def evaluated(number: int, net: Net) -> None:
    net.norm.train(number < 5)


@pytest.mark.parametrize("change", [frozen, evaluated])
def test_a_model_that_has_changed_gets_a_new_graph(change) -> None:
    batches = [clicks(n) for n in range(12)]
    with_it, graph = train(Net(), batches, True, change)
    without, _ = train(Net(), batches, False, change)
    assert graph is not None
    assert graph.trained == (5 - BEFORE) + (7 - BEFORE)
    assert same(with_it, without)


def test_it_knows_its_own_gradients() -> None:
    model = placed(Net(), clicks(0))
    graph, held = StepGraph(model, FakeGraph), []
    for number in range(8):
        for parameter in model.dense:
            parameter.grad = None
        short = number == 6
        accumulate(model, StagedBatch(clicks(number, 5 if short else SAMPLES)), StepTimes(), graph=graph)
        held.append(graph.holds_gradients())
    assert held == [*[False] * BEFORE, *[True] * (6 - BEFORE), False, True]


def test_a_short_batch_leaves_the_graph() -> None:
    batches = [clicks(n, 5 if n % 5 == 4 else SAMPLES) for n in range(25)]
    with_it, graph = train(Net(), batches, True)
    without, _ = train(Net(), batches, False)
    assert graph is not None
    assert graph.trained == 20 - BEFORE
    assert same(with_it, without)


@pytest.mark.parametrize(
    ("notes", "trained"),
    [
        pytest.param([None] * 6, 3, id="nothing"),
        pytest.param(["same", 1, None] * 6, 0, id="another each time"),
        pytest.param(list(range(6)), 0, id="a number that counts"),
        pytest.param([{"weight": 2.0}] * 6, 3, id="the same number"),
        pytest.param([object()] * 6, 0, id="of which nothing is known"),
    ],
)
def test_batches_that_differ_beside_their_tensors(notes, trained) -> None:
    _, graph = train(Net(), [clicks(n, note=note) for n, note in enumerate(notes)], True)
    assert graph is not None
    assert graph.trained == trained


@pytest.mark.parametrize("net", [Net("own ids"), Net("counts"), Net(pooling=PoolingType.MEAN)])
def test_a_model_that_reads_ids_is_refused(net) -> None:
    with pytest.raises(UserError, match=r"reads ids, or puts them together.*trainer\.backend=plain"):
        train(net, [clicks(n) for n in range(8)], True)


@pytest.mark.parametrize(("mode", "operator"), [("looks", "_local_scalar_dense"), ("picks", "index")])
def test_a_model_that_waits_for_a_gpu_is_refused_before_it_does(mode, operator) -> None:
    with pytest.raises(
        UserError, match=rf"cannot be recorded, since aten.({operator}) waits.*trainer\.backend=plain"
    ):
        train(Net(mode), [clicks(n) for n in range(8)], True)


def test_a_model_that_cannot_be_recorded_is_one_line(tmp_path) -> None:
    class Fails(FakeGraph):
        def record(self, work: Callable[[], None]) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(UserError, match=re.escape("(operation not permitted when stream")) as told:
        parameters_after("lru", "sgd", tmp_path, Listed(), Graphs(Fails))
    assert "\n" not in str(told.value)


def test_a_batch_in_parts_is_trained_without(tmp_path) -> None:
    from tests.pipeline.test_step import AnySplit

    step, splitter = Graphs(), AnySplit(1, True)
    parameters_after("lru", "sgd", tmp_path, Listed(), step, splitter=splitter)
    assert splitter.parts > SIZE // 2
    assert step.graph.trained == 0


@pytest.mark.parametrize(
    ("device", "trainers", "wrapped", "why"),
    [
        ("cpu", 1, False, "needs a GPU, and this run is on the cpu"),
        ("cuda", 2, False, "trains in one process, and this run has 2"),
        ("cuda", 1, True, "plugin acme 1.0 puts around each step"),
    ],
)
def test_runs_that_cannot_have_a_graph(device: str, trainers: int, wrapped: bool, why: str, tmp_path) -> None:
    origin, several = SimpleNamespace(origin="acme 1.0"), SimpleNamespace(size=trainers)
    batch = clicks(0)
    with pytest.raises(UserError, match=rf"trainer\.backend=cuda_graph .*{why}.*: set trainer\.backend=auto"):
        equip(
            CUDA_GRAPH,
            placed(Net(), batch),
            None,
            batch,
            SAMPLES,
            torch.device(device),
            several,  # type: ignore[arg-type]
            tmp_path,
            [origin] if wrapped else [],  # type: ignore[list-item]
        )


def test_a_loop_of_ones_own_cannot_have_a_graph(tmp_path) -> None:
    with pytest.raises(UserError, match="your own loop calls the model itself"):
        equip_loop(CUDA_GRAPH, placed(Net(), clicks(0)), SAMPLES, torch.device("cpu"), tmp_path)
