"""What a step costs beside its operators' work: autograd, Python, the pipeline, Lightning's loop, and the
dense optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import keep_to_one_core, one_thread
from recpipe.common.process import quieted
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.step import StepTimes, accumulate
from recpipe.plugin.batch import Batch
from recpipe.profiling.limits import Sample
from recpipe.tables.proxy import handing_out
from recpipe_perf_model.bench.steps import TimedSteps, fit, placed
from recpipe_perf_model.bench.timing import OperatorClock, Run
from recpipe_perf_model.kernels.operators import Operator, optimizer_sizes
from recpipe_perf_model.step.capture import calls_by_name

CHAIN = 64
"""Operators, modules or functions in a row."""
ROUNDS = 15
STEPS = 400
"""Steps of an empty loop."""
FEATURES = (1, 26)
"""Features of the pipeline's step."""
SHARED = 256
"""Rows and columns of matrices that all threads multiply."""
ALONE = 2e-3
"""Seconds for which one thread works alone, as when tables are updated."""
OPTIMIZERS = ("SGD", "Adagrad", "Adam")
PARAMETERS = ((2, 64), (8, 4096), (14, 50_000), (14, 200_000), (30, 20_000), (6, 1_000_000))
"""Numbers of parameters and the values of each."""


def measure_overheads(quick: bool) -> Iterator[Sample]:
    """All overheads, in one thread and with nothing else running, and optimizers as operators are timed.

    ``call``: a call of a Python function, as modules make them. ``hand over``: giving another core's thread
    some work, and waiting for it.
    """
    with one_thread():
        yield from _autograd()
        modules = nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(CHAIN)))
        run = partial(modules, torch.ones(8))
        (seconds,) = _times([run])
        yield Sample("call", {}, seconds / max(1, calls_by_name(run).total()))
        yield from (_pipeline(count) for count in FEATURES)
        with ThreadPoolExecutor(1, "recpipe-bench", keep_to_one_core) as other:
            (seconds,) = _times([lambda: other.submit(int).result()], 4 * ROUNDS)
        yield Sample("hand over", {}, seconds)
    yield _waking()
    # A step of Lightning's loop with callbacks, and an optimizer with one small parameter.
    steps = STEPS // 4 if quick else STEPS
    with quieted():
        times = fit(_Empty(), [0] * steps, TimedSteps(0, inf))
    yield Sample("loop", {}, median(times[steps // 10 :]))
    with closing(OperatorClock()) as clock:
        yield from clock.timed(
            (
                Operator(f"optimizer {name}", optimizer_sizes(name, count, count * values), name),
                partial(_optimizer, name, count, values),
            )
            for name in OPTIMIZERS
            for count, values in (PARAMETERS[::2] if quick else PARAMETERS)
        )


def _times(runs: Sequence[Run], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each run, interleaved."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 2):
        for run, times in zip(runs, found, strict=True):
            start = perf_counter()
            run()
            times.append(perf_counter() - start)
    return [median(times[2:]) for times in found]


def _autograd() -> Iterator[Sample]:
    """``recorded``: what recording an operator takes; ``node``: a node of the backward pass; ``function``: a
    function of a user's own, forward and backward. Each without the operators inside."""
    x = torch.ones(8)
    leaf = torch.ones(8, requires_grad=True)

    def chain(start: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAIN):
            start = start * 0.5
        return start

    def own(start: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAIN):
            start = _Same.apply(start)  # type: ignore[no-untyped-call]
        return start

    def back(made: Callable[[torch.Tensor], torch.Tensor]) -> Run:
        out = made(leaf)
        return partial(torch.autograd.grad, out, leaf, torch.ones_like(out), retain_graph=True)

    bare, recorded, nodes, forward, backward = (
        seconds / CHAIN
        for seconds in _times(
            [partial(chain, x), partial(chain, leaf), back(chain), partial(own, leaf), back(own)]
        )
    )
    yield Sample("recorded", {}, max(recorded - bare, 1e-9))
    yield Sample("node", {}, max(nodes - bare, 1e-9))
    yield Sample("function", {}, max(forward + backward, 1e-9))


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Tiny(nn.Module):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=4, num_embeddings=64, feature_names=[name])
            for name in names
        ]
        self.rows = EmbeddingBagCollection(configs)
        self.layer = nn.Linear(4 * len(names), 1)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.rows(sparse).values())
        return out


def _pipeline(count: int) -> Sample:
    """``step``: a step of the pipeline with so many features, without its model and the tables' kernels."""
    size, names = 16, [f"f{number}" for number in range(count)]
    bags = size * count
    ids = KeyedJaggedTensor(names, torch.arange(bags) % size, lengths=torch.ones(bags, dtype=torch.long))
    batch = Batch(torch.zeros(size, 0), ids, torch.zeros(size))
    model = placed(_Tiny(names), batch)
    staged = InFlight(batch, ids=model.inputs.each(batch))

    def step() -> None:
        for parameter in model.dense:
            parameter.grad = None
        accumulate(model, staged, StepTimes())

    def dense() -> None:
        for parameter in model.dense:
            parameter.grad = None
        with handing_out(model.look_up(batch)):
            loss, _ = model.called(batch)
        torch.autograd.backward(loss)

    whole, inside = _times([step, dense], 4 * ROUNDS)
    return Sample("step", {"elements": float(count)}, max(whole - inside, 1e-6))


def _waking() -> Sample:
    """``wake``: what the first operator that all threads share takes longer than the next, since they sleep
    while one thread works alone."""
    left, right = torch.ones(SHARED, SHARED), torch.ones(SHARED, SHARED)
    first, later = list[float](), list[float]()
    for _ in range(2 * ROUNDS):
        alone = perf_counter() + ALONE
        while perf_counter() < alone:
            pass
        for times in (first, later):
            start = perf_counter()
            torch.mm(left, right)
            times.append(perf_counter() - start)
    return Sample("wake", {}, max(median(first) - median(later), 1e-9))


class _Empty(L.LightningModule):
    """Trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parameter = nn.Parameter(torch.zeros(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.parameter], lr=0.0)

    def training_step(self, batch: object, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.step()


def _optimizer(name: str, count: int, values: int) -> Run:
    parameters = [nn.Parameter(torch.ones(values)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(values)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, fused=True)
    made.step()
    return made.step
