"""A graph of the dense part's passes: the same values as without it, and what it refuses to repeat."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP, Perceptron
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.backend.build import CUDA_GRAPH, Settings, build_backend, convert_for_loop, is_repeatable
from recpipe.errors import UserError
from recpipe.pipeline import step_graph
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.cuda_graph import Spoilt
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step import StepTimes, accumulate
from recpipe.pipeline.step_graph import BEFORE, StepGraph
from recpipe.plugin.calls import Origin, Owned
from tests.pipeline.samples import SIZE, Listed, parameters_after, placed
from tests.pretend_gpu.graph import FakeGraph
from tests.tables.samples import identical

OPTIMIZERS = ("sgd", "rowwise_adagrad")
POLICIES = ("resident", "nocache", "lru", "hot")
SAMPLES = 16


class Graphs:
    """A step for ``parameters_after`` with a graph over its model."""

    def __init__(self, make: Callable[[], Any] = FakeGraph) -> None:
        self.make, self.graph = make, None

    def __call__(self, model: PlacedModel, staged: InFlight, times: StepTimes) -> None:
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

    def leaves(batch: Any) -> list[torch.Tensor]:
        first.append([batch.dense, batch.labels])
        return first[0]

    monkeypatch.setattr(step_graph, "leaves", leaves)
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


def train(
    net: Net,
    batches: list[Clicks],
    graphs: bool,
    between: Callable[[int, Net], Any] | None = None,
    own_python: bool = True,
):
    """Every loss, then every value of the model; and the graph."""
    model = placed(net, batches[0])
    graph = StepGraph(model, FakeGraph, tuple if own_python else Settings(model)) if graphs else None
    optimizer = torch.optim.SGD(list(model.dense), lr=0.1)
    torch.manual_seed(3)
    values = []
    for number, batch in enumerate(batches):
        if between is not None:
            between(number, net)
        optimizer.zero_grad()
        values.append(accumulate(model, InFlight(batch), StepTimes(), graph=graph))
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


def other_rate(number: int, net: Net) -> None:
    net.drop.p = 0.3 if number < 5 else 0.6


@pytest.mark.parametrize(("change", "own_python"), [(frozen, True), (evaluated, True), (other_rate, False)])
def test_a_model_that_has_changed_gets_a_new_graph(change, own_python) -> None:
    batches = [clicks(n) for n in range(12)]
    with_it, graph = train(Net(), batches, True, change, own_python=own_python)
    without, _ = train(Net(), batches, False, change)
    assert graph is not None
    assert graph.trained == (5 - BEFORE) + (7 - BEFORE)
    assert same(with_it, without)


def of_module(net: Net, call: Callable[[], Any]) -> Any:
    return net.top.register_forward_hook(lambda module, inputs, output: call())


def of_gradient(net: Net, call: Callable[[], Any]) -> Any:
    return net.top.weight.register_post_accumulate_grad_hook(lambda weight: call())


@pytest.mark.parametrize("register", [of_module, of_gradient])
def test_hooks_are_called_in_each_step_of_a_model_without_python_of_others(register) -> None:
    called: dict[bool, list[int]] = {True: [], False: []}
    for own_python, calls in called.items():
        hooks: list[Any] = []

        def between(number: int, net: Net, hooks: list[Any] = hooks, calls: list[int] = calls) -> None:
            if number == 6:
                hooks.append(register(net, lambda: calls.append(number)))
            if number == 9:
                hooks[0].remove()

        _, graph = train(Net(), [clicks(n) for n in range(12)], True, between, own_python=own_python)
        assert graph is not None
        assert graph.trained == (12 if own_python else 9) - BEFORE
    assert called[False] == [6] * 3
    assert not called[True], "the control: the graph of before is repeated"


def test_a_recording_that_cuda_gives_up_ends_the_run(tmp_path) -> None:
    """Without a second try, which leaves the tables outside of the graph."""
    tries: list[int] = []

    class Spoils(FakeGraph):
        """As ``CudaGraph`` does where CUDA gives up."""

        def record(self, work: Callable[[], None]) -> None:
            tries.append(1)
            raise Spoilt("operation failed due to a previous error during capture")

    with pytest.raises(UserError, match=r"previous error.*set trainer\.backend=auto$"):
        parameters_after("lru", "sgd", tmp_path, Listed(multi=False), Graphs(Spoils))
    assert len(tries) == 1


def test_it_knows_its_own_gradients() -> None:
    model = placed(Net(), clicks(0))
    graph, held = StepGraph(model, FakeGraph), []
    for number in range(8):
        for parameter in model.dense:
            parameter.grad = None
        short = number == 6
        accumulate(model, InFlight(clicks(number, 5 if short else SAMPLES)), StepTimes(), graph=graph)
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
    with pytest.raises(UserError, match=r"reads ids, or puts them together.*trainer\.backend=auto"):
        train(net, [clicks(n) for n in range(8)], True)


@pytest.mark.parametrize(("mode", "operator"), [("looks", "_local_scalar_dense"), ("picks", "index")])
def test_a_model_that_waits_for_a_gpu_is_refused_before_it_does(mode, operator) -> None:
    with pytest.raises(
        UserError, match=rf"cannot be recorded .*, since aten.({operator}) waits.*trainer\.backend=auto"
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


ALONE, SEVERAL = SimpleNamespace(size=1), SimpleNamespace(size=2)


def equipped(kind: str, net: nn.Module, folder: Path, device: str = "cuda", trainers=ALONE, wrappers=()):
    batch = clicks(0)
    return build_backend(
        kind, placed(net, batch), None, batch, SAMPLES, torch.device(device), trainers, folder, wrappers
    )


@pytest.mark.parametrize(
    ("device", "trainers", "wrapped", "why"),
    [
        ("cpu", ALONE, False, "needs a GPU, and this run is on the cpu"),
        ("cuda", SEVERAL, False, "trains in one process, and this run has 2"),
        ("cuda", ALONE, True, r"what plugin acme \(.*\), part acme.count, puts around each step"),
    ],
)
def test_runs_that_cannot_have_a_graph(device, trainers, wrapped, why, tmp_path) -> None:
    wrappers = [Owned("acme.count", Origin("acme"), None)] if wrapped else []
    with pytest.raises(UserError, match=rf"trainer\.backend=cuda_graph .*{why}.*: set trainer\.backend=auto"):
        equipped(CUDA_GRAPH, Net(), tmp_path, device, trainers, wrappers)


class Own(nn.ReLU):
    """A class of the user's."""


def with_forward(net: nn.Sequential) -> None:
    net[1].forward = lambda x: x


def compiled(net: nn.Sequential) -> None:
    net[1].compile()


def with_function(net: nn.Sequential) -> None:
    net.append(Perceptron(4, 4, activation=lambda x: x))


def with_own_class(net: nn.Sequential) -> None:
    net.append(Own())


@pytest.mark.parametrize("change", [with_forward, compiled, with_function, with_own_class])
def test_it_is_known_whether_a_graph_leaves_out_python_of_others(change) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), MLP(4, [4, 4]), Perceptron(4, 4))
    assert is_repeatable(net)
    change(net)
    assert not is_repeatable(net)


@pytest.mark.parametrize("kind", ["auto", "plain", "cpu", CUDA_GRAPH])
def test_whose_runs_have_a_graph(kind, tmp_path, caplog, monkeypatch) -> None:
    caplog.set_level("INFO", "recpipe")
    for module, settings in (("of.others", False), ("torchrec.models", True)):
        monkeypatch.setattr(Net, "__module__", module)
        graph = equipped(kind, Net(), tmp_path).graph
        assert (graph is not None) == (kind == CUDA_GRAPH)
        assert graph is None or isinstance(graph._settings, Settings) == settings
    assert ("cuda_graph may be faster" in caplog.text) == (kind == "auto"), "said to who has not chosen"


def test_a_loop_of_ones_own_cannot_have_a_graph(tmp_path) -> None:
    with pytest.raises(UserError, match="your own loop calls the model itself"):
        convert_for_loop(CUDA_GRAPH, placed(Net(), clicks(0)), SAMPLES, torch.device("cpu"), tmp_path)
