"""A graph of the dense optimizer's steps: the same values as without it, and which steps it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from recpipe.pipeline.cuda_graph import record_steps
from tests.pretend_gpu.graph import FakeGraph

STEPS = 12
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: Adagrad(p, lr=0.1, weight_decay=0.01),
    "groups": lambda p: Adagrad([{"params": p[:1], "lr": 0.3}, {"params": p[1:]}], lr=0.1),
}


class Counted(FakeGraph):
    made: list[Counted]

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        super().replay()
        self.replays += 1


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Counted.made = []


def trained(
    make: Callable[[Any], Optimizer],
    graph: Callable[[], Any] | None = Counted,
    before: Callable[[int, Optimizer], Any] = lambda number, optimizer: None,
    in_place: bool = True,
) -> list[torch.Tensor]:
    """Parameters and the optimizer's state after steps with gradients that stay in their memory; without
    ``in_place`` that is said to be chance."""
    torch.manual_seed(4)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in (3, 5)]
    gradients = [torch.zeros_like(p) for p in parameters]
    optimizer = make(parameters)
    if graph is not None:
        record_steps(optimizer, graph, lambda: in_place)
    for number in range(STEPS):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.copy_(torch.randn(gradient.shape))
        before(number, optimizer)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    of_optimizer = [value for each in state.values() for value in each.values()]
    return [value.clone() for value in (*parameters, *of_optimizer) if isinstance(value, torch.Tensor)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_changes_nothing(kind: str) -> None:
    with_it = trained(KINDS[kind])
    assert same(with_it, trained(KINDS[kind], None))
    # By Python: the first step, and the next one if the state is made in the first.
    (graph,) = Counted.made
    assert graph.replays == STEPS - (2 if kind == "momentum" else 1)


def test_what_is_not_replayed_is_missing() -> None:
    class Idle(FakeGraph):
        def replay(self) -> None:
            pass

    assert not same(trained(KINDS["adagrad"], Idle), trained(KINDS["adagrad"], None))


def warmer(number: int, optimizer: Optimizer) -> None:
    if number == 6:
        optimizer.param_groups[0]["lr"] = 0.5


def elsewhere(number: int, optimizer: Optimizer) -> None:
    (first, *_) = optimizer.param_groups[0]["params"]
    if number in (4, 8):  # as behind a batch of another form
        first.grad = first.grad.clone()


def loaded(number: int, optimizer: Optimizer) -> None:
    if number == 6:
        optimizer.load_state_dict(optimizer.state_dict())


def frozen(number: int, optimizer: Optimizer) -> None:
    if number >= 6:
        optimizer.param_groups[0]["params"][0].grad = None


@pytest.mark.parametrize("change", [warmer, elsewhere, loaded, frozen])
def test_what_changes_is_not_repeated(change: Callable[[int, Optimizer], Any]) -> None:
    assert same(trained(KINDS["momentum"], before=change), trained(KINDS["momentum"], None, change))
    assert sum(graph.replays for graph in Counted.made) > 5


def test_gradients_in_the_same_memory_by_chance_cost_no_recording() -> None:
    assert same(trained(KINDS["sgd"], in_place=False), trained(KINDS["sgd"], None))
    assert not Counted.made


def test_a_short_batch_costs_no_new_recording() -> None:
    trained(KINDS["adagrad"], before=elsewhere)
    assert len(Counted.made) == 1


def test_a_scheduler_of_torch_goes_on() -> None:
    schedulers = list[StepLR]()

    def scheduled(parameters: Any) -> Optimizer:
        return SGD(parameters, lr=0.1)

    def before(number: int, optimizer: Optimizer) -> None:
        if number == 0:
            schedulers.append(StepLR(optimizer, 5, 0.5))
        elif number > 1:
            schedulers[-1].step()

    assert same(trained(scheduled, before=before), trained(scheduled, None, before))
    assert sum(graph.replays for graph in Counted.made) > 5


@pytest.mark.parametrize(
    "make",
    [lambda p: Adam(p, lr=0.1), lambda p: Adagrad(p, lr_decay=0.1), lambda p: SGD(p, lr=torch.tensor(0.1))],
    ids=["by the step's number", "decays", "a tensor's value"],
)
def test_steps_that_are_not_alike_are_left_alone(make: Callable[[Any], Optimizer]) -> None:
    assert same(trained(make), trained(make, None))
    assert not Counted.made


def test_hooks_are_called_in_each_step() -> None:
    calls = list[int]()

    def hooked(parameters: Any) -> Optimizer:
        optimizer = SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return optimizer

    trained(hooked)
    assert len(calls) == STEPS


def test_a_closure_is_called_once_a_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([parameter], lr=0.1)
    record_steps(optimizer, Counted, lambda: True)
    parameter.grad = torch.zeros(2)
    seen = list[bool]()

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        assert parameter.grad is not None
        parameter.grad.fill_(len(seen))
        return 7.0

    with torch.no_grad():
        assert [optimizer.step(closure) for _ in range(4)] == [7.0] * 4  # type: ignore[arg-type]
    assert seen == [True] * 4
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 1 - 0.1 * (1 + 2 + 3 + 4)))


@pytest.mark.parametrize("fault", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("full")])
def test_a_step_that_cannot_be_recorded_is_made_by_python(fault, caplog) -> None:
    tries: list[int] = []

    class Fails(FakeGraph):
        def record(self, work: Callable[[], None]) -> None:
            tries.append(1)
            super().record(work)
            raise fault

    assert same(trained(KINDS["adagrad"], Fails), trained(KINDS["adagrad"], None))
    assert len(tries) == 1
    assert [str(fault) in line for line in caplog.messages] == [True]
