"""Steps of a placed model whose parts are timed: a forward pass without gradients, or a step of training.

They do what ``PlacedModel.predict`` and ``recpipe.pipeline.step.accumulate`` do, with all rows in memory, in
one thread of Python with all threads of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from recpipe_perf_model.step.capture import GroupLookups, group_lookups

from recpipe.common.device import in_this_thread
from recpipe.data.parts import in_order
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.parts import same_random_numbers
from recpipe.pipeline.placed import LookedUp, PlacedModel
from recpipe.profiling.traced import tell_parts
from recpipe.tables.proxy import CollectionProxy, handing_out
from recpipe_deeprecsys.characterize.operators import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    UPDATE,
    Timed,
    Watched,
    lookup_call,
    typical,
)
from recpipe_deeprecsys.characterize.roofs import Work

FLOAT, ID = 4, 8
"""Bytes of a value and of an id."""
WARM = 2
"""Steps before any is timed."""
LEAST, MOST = 5, 100
"""The fewest and the most steps that are timed, as they run and again so many that are watched."""


class Step(Protocol):
    """A step with one of several batches."""

    def run(self, number: int, watched: Watched | None) -> None:
        """Run batch ``number``; ``watched`` times its parts, None: it runs as it is."""


@dataclass(frozen=True)
class Stepped:
    """What steps took."""

    seconds: float
    """Of a step that nobody watches, the lower quartile."""
    rows: Sequence[Timed]
    steps: int

    @property
    def between(self) -> float:
        """Of a step's seconds those between operators: Python, autograd, and calls."""
        return max(0.0, self.seconds - sum(row.seconds for row in self.rows))


def stepped(step: Step, batches: int, seconds: float, around: Callable[..., Any] | None = None) -> Stepped:
    """Time ``step`` for so many ``seconds``, as it runs and watched in turn, over its ``batches`` in turn.

    ``around(watched)`` begins to tell the parts of a model, and returns what ends it.
    """
    for number in range(WARM):
        step.run(number % batches, None)
    watched, times, begun = Watched(), list[float](), perf_counter()
    while len(times) < LEAST or (perf_counter() - begun < seconds and len(times) < MOST):
        number = len(times) % batches
        started = perf_counter()
        step.run(number, None)
        times.append(perf_counter() - started)
        end = None if around is None else around(watched)
        with watched.step():
            step.run(number, watched)
        if end is not None:
            end()
    return Stepped(typical(times), watched.timed(), len(times))


def lookup_work(group: GroupLookups, weighted: bool) -> Work:
    """A group's lookup: rows at random, their ids and offsets, and what the model gets. An operation for each
    weight that is added up, two if ids have weights."""
    weights = group.lookups * group.dim
    bags = sum(table.bags for table in group.tables)
    given = FLOAT * group.handed_out + ID * (group.lookups + bags + 1)
    distinct = FLOAT * group.dim * sum(table.distinct for table in group.tables)
    return Work(
        flops=float(group.pooled * weights * (1 + weighted)),
        streamed=float(given),
        gathered=float(FLOAT * weights),
        footprint=float(distinct + given),
        row_bytes=float(FLOAT * group.dim),
        weights=float(weights),
    )


def update_work(group: GroupLookups, record_bytes: int) -> Work:
    """A group's update: gradients are read, and each distinct row's record is read and written. An operation
    for each gradient that is added up, and two for each weight that is changed."""
    distinct = sum(table.distinct for table in group.tables)
    given = FLOAT * group.handed_out + ID * group.lookups
    return Work(
        flops=float(group.lookups * group.dim + 2 * distinct * group.dim),
        streamed=float(given),
        gathered=float(2 * distinct * record_bytes),
        footprint=float(distinct * record_bytes + given),
        row_bytes=float(record_bytes),
        weights=float(distinct * group.dim),
    )


class ModelStep:
    """Steps of ``model`` over ``batches``, whose ids are rows of its tables and in them."""

    def __init__(self, model: PlacedModel, batches: Sequence[Any]) -> None:
        self.model, self.batches = model, batches
        groups = model.embeddings.tables.groups
        self.lookups = [[group_lookups(model, batch, n) for n in range(len(groups))] for batch in batches]

    def told(self, watched: Watched) -> Callable[[], None]:
        """Tell ``watched`` the model's parts from now on; returns what ends it."""
        return tell_parts(self.model.module, watched.inside)

    def looking_up(self, watched: Watched | None, number: int, group: int) -> AbstractContextManager[None]:
        """Times the block as the lookup of a group."""
        if watched is None:
            return nullcontext()
        own, tables = self.lookups[number][group], self.model.embeddings.tables.groups[group].tables
        call = lookup_call(group, len(own.tables), own.dim, FORWARD)
        return watched.whole(call, lookup_work(own, tables.weighted))


class Inference(ModelStep):
    """A forward pass without gradients."""

    def run(self, number: int, watched: Watched | None) -> None:
        """Look up the rows of batch ``number``, and predict."""
        model, batch = self.model, self.batches[number]
        numbers = {id(group): n for n, group in enumerate(model.embeddings.tables.groups)}
        with torch.no_grad():
            looked_up: dict[CollectionProxy, LookedUp] = {}
            for proxy in model.bound:
                ids, found = model.ids_of(proxy, batch), list[torch.Tensor]()
                assert ids is not None, "the proxy is bound"
                for group, collection in zip(proxy.groups, proxy.collections, strict=True):
                    own = in_order(ids, group.tables.features)
                    with self.looking_up(watched, number, numbers[id(group)]):
                        found.append(collection.lookup(own))
                looked_up[proxy] = LookedUp(proxy, ids, found)
            with handing_out(looked_up), watched or nullcontext():
                model(batch)


class TrainingStep(ModelStep):
    """A step of training: rows and dense parameters change in memory alone."""

    def __init__(self, model: PlacedModel, batches: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, batches)
        self.optimizer = optimizer

    def run(self, number: int, watched: Watched | None) -> None:
        """Train batch ``number``."""
        model, flight = self.model, InFlight(self.batches[number])
        model.take(flight)
        groups = [(n, rows) for n, rows in enumerate(flight.groups or ()) if rows is not None]
        for group, rows in groups:
            with self.looking_up(watched, number, group):
                rows.look_up(True, True)
        flight.cold_is_here = True
        flight.looked_up.set_result(None)
        late = model.late_calls
        handed, samples = model.part(flight, 0, flight.size)
        with torch.enable_grad(), in_this_thread(), watched or nullcontext():
            loss = model.train_part(handed, samples, 1.0)
            _go_to(watched, BACKWARD)
            torch.autograd.backward(loss)
        for group, rows in groups:
            with self._updating(watched, number, group):
                rows.backward(True, 1.0)
        if model.late_calls != late:
            model.update_late(flight)
        _go_to(watched, OPTIMIZER)
        with watched or nullcontext():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        flight.release()

    def _updating(self, watched: Watched | None, number: int, group: int) -> AbstractContextManager[None]:
        own, tables = self.lookups[number][group], self.model.embeddings.tables.groups[group].tables
        if watched is None or not own.trained:
            return nullcontext()
        call = lookup_call(group, len(own.tables), own.dim, UPDATE)
        return watched.whole(call, update_work(own, tables.record_bytes))


def _go_to(watched: Watched | None, phase: str) -> None:
    if watched is not None:
        watched.phase = phase


def of_model(
    model: PlacedModel,
    batches: Sequence[Any],
    seconds: float,
    optimizer: torch.optim.Optimizer | None = None,
) -> Stepped:
    """Steps of ``model`` over ``batches`` of one size: of training with an ``optimizer``, else forward passes
    without gradients. Torch's random numbers go on as if nothing had run."""
    model.train(optimizer is not None)
    step = Inference(model, batches) if optimizer is None else TrainingStep(model, batches, optimizer)
    with same_random_numbers():
        return stepped(step, len(batches), seconds, step.told)
