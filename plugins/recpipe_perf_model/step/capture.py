"""Captures a model as it will run: its operators with their sizes, and what it looks up.

One step is run with rows that are handed out without tiers, as in ``recpipe.profiling.traced``, of the
model as the back end has converted it. Nothing is trained, and the model does not change.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import using_threads
from recpipe.data.parts import batch_size
from recpipe.data.select import between
from recpipe.errors import UserError, shown
from recpipe.pipeline.parts import HandedRows, same_random_numbers
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.bags import IndexBags
from recpipe.tables.proxy import CollectionProxy, handing_out
from recpipe_perf_model.kernels.operators import Operator, Watch


class CannotTrace(UserError):
    """A model's step cannot be run to be watched, so that its time cannot be predicted."""

    @classmethod
    def of(cls, model: object, fault: Exception) -> CannotTrace:
        """That ``model`` has raised ``fault``, in one line."""
        return cls(
            f"{type(model).__name__} cannot be traced ({type(fault).__name__}: {shown(fault, 200)}); "
            "its dense part is not predicted"
        )


STAGES = ("before rows", "forward", "backward to rows", "backward")
"""The forward pass before the first rows are asked for and after it, and the backward pass until all
gradients of rows are there and after it."""
OPTIMIZER = 3
"""Bytes that the dense optimizer touches beside each parameter's own: gradient and state."""


@dataclass(frozen=True)
class Part:
    """The dense part of one core's share of a batch."""

    samples: int
    threads: int
    """The number of threads of its operators."""
    operators: tuple[tuple[Operator, ...], ...]
    """By stage."""
    calls: tuple[int, int]
    """Calls of Python functions in the forward and in the backward pass."""
    recorded: int
    """Operators of the forward pass that autograd records."""
    nodes: int
    """Nodes of the backward pass."""
    functions: int
    """Nodes among them that run Python."""

    @property
    def touched(self) -> float:
        """Bytes that its operators touch, one after the other."""
        return sum(float(each.at.get("footprint", 0.0)) for stage in self.operators for each in stage)

    @property
    def unknown(self) -> list[str]:
        """Names of operators that are predicted as passes over as many bytes."""
        found = {each.name for stage in self.operators for each in stage if not each.known}
        return sorted(found)


@dataclass(frozen=True)
class TableLookups:
    """What a batch looks up in one table."""

    rows: int
    bags: int
    lookups: int
    distinct: int


@dataclass(frozen=True)
class GroupLookups:
    """What a batch looks up in one group of tables, which one TBE has."""

    dim: int
    optimizer: str
    pooled: bool
    tables: tuple[TableLookups, ...]
    trained: bool = True
    """False: its tables are frozen, and not updated."""
    by_loops: bool = False
    """Whether recpipe's own loops look them up and update them, and not FBGEMM."""

    @property
    def lookups(self) -> int:
        """Ids in all tables."""
        return sum(table.lookups for table in self.tables)

    @property
    def handed_out(self) -> int:
        """Values of the rows that the model gets."""
        rows = sum(table.bags for table in self.tables) if self.pooled else self.lookups
        return rows * self.dim


@dataclass(frozen=True)
class Captured:
    """A model's step for one batch."""

    samples: int
    whole: Part
    """With all threads."""
    shares: tuple[Part, ...]
    """Each core's part, if cores can share the batch; empty otherwise."""
    groups: tuple[GroupLookups, ...]
    late: int
    """Ids that the model makes itself and looks up at once."""
    parameters: tuple[int, int]
    """Dense parameters: how many, and their values."""


def captured(model: PlacedModel, batch: Any, shares: Sequence[int] = ()) -> Captured:
    """Capture a step of ``model`` with ``batch``, and of the cores' shares of it, which end at ``shares``.

    ``CannotTrace`` in one line if the model cannot be run on the batch while its operators are watched.
    """
    threads, size = torch.get_num_threads(), batch_size(batch)
    if not size:
        raise UserError("a batch without samples cannot be captured: give data with at least one sample")
    try:
        whole, late = _part(model, batch, threads)
        bounds = [0, *shares] if len(shares) > 1 else []
        parts = [_part(model, between(batch, low, high), 1)[0] for low, high in pairwise(bounds)]
    except UserError:
        raise
    except Exception as fault:  # a user's model can raise anything
        raise CannotTrace.of(model.module, fault) from fault
    dense = model.trained()
    groups = tuple(
        group_lookups(model, batch, number) for number in range(len(model.embeddings.tables.groups))
    )
    parameters = len(dense), sum(parameter.numel() for parameter in dense)
    return Captured(size, whole, tuple(parts), groups, late, parameters)


def group_lookups(model: PlacedModel, batch: Any, number: int) -> GroupLookups:
    """What ``batch`` looks up in group ``number`` of the model's tables; no tables if the model makes their
    ids."""
    tables, found = model.embeddings.tables.groups[number].tables, []
    if model.inputs.bound(number):
        bags: IndexBags = model.inputs.bags(batch, number)
        ends = bags.offsets[np.arange(len(tables.features) + 1) * bags.batch_size]
        for table, rows in enumerate(tables.layout.rows):
            features = np.flatnonzero(tables.table_of == table)
            ids = np.concatenate([bags.indices[ends[f] : ends[f + 1]] for f in features])
            size = bags.batch_size * len(features)
            found.append(TableLookups(int(rows), size, len(ids), len(np.unique(ids))))
    optimizer, loops = tables.optimizer, tables.kernel.by_loops
    return GroupLookups(tables.dim, optimizer.name, tables.pooled, tuple(found), not optimizer.frozen, loops)


def _part(model: PlacedModel, batch: Any, threads: int) -> tuple[Part, int]:
    """The dense part of a step with so many threads, and how many ids the model makes itself."""
    model, watch = model.copied(), _Stages()
    with using_threads(threads), same_random_numbers(), torch.enable_grad():
        with watch:
            # The second of two steps is kept: of it is known when its memory was touched before.
            _watched(model, batch, watch)
            for parameter in model.trained():
                watch.touch([parameter], OPTIMIZER * parameter.numel() * parameter.element_size())
            watch.begin()
            nodes, recorded, late = _watched(model, batch, watch)
        forward, backward = _python_calls(model, batch)
    calls = sum(forward.values()), sum(backward.values())
    stages = tuple(map(tuple, watch.by_stage))
    return Part(batch_size(batch), threads, stages, calls, recorded, nodes, backward["backward(ctx)"]), late


class _Stages(Watch):  # type: ignore[no-untyped-call]
    """Collects operators by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Forget the operators, and not when memory was touched."""
        self.stage, self.paused = 0, False
        self.by_stage: list[list[Operator]] = [[] for _ in STAGES]

    def note(self, operator: Operator) -> None:
        if not self.paused:
            self.by_stage[self.stage].append(operator)


def _watched(model: PlacedModel, batch: Any, watch: _Stages) -> tuple[int, int, int]:
    """Run a step under the watch; returns its nodes, recorded operators and ids that the model makes."""
    handed = {proxy: _Rows(proxy, model, batch, watch) for proxy in model.proxies.values()}
    with handing_out(handed):
        loss, _ = model.called(batch)
    leaves = [leaf for rows in handed.values() for leaf in rows.leaves]
    watch.paused = True
    nodes, waited = _nodes(loss), len(leaves)
    first = torch.ones_like(loss)
    recorded = sum(map(len, watch.by_stage[:2]))
    watch.paused, watch.stage = False, 2 if leaves else 3

    def arrived(gradient: torch.Tensor) -> None:
        nonlocal waited
        waited -= 1
        watch.stage = 2 if waited else 3

    hooks = [leaf.register_hook(arrived) for leaf in leaves]  # type: ignore[no-untyped-call]
    torch.autograd.grad(loss, [*leaves, *model.trained()], first, allow_unused=True)
    for hook in hooks:
        hook.remove()
    return nodes, recorded, sum(len(ids.values()) for rows in handed.values() for ids in rows.others)


def _python_calls(model: PlacedModel, batch: Any) -> tuple[Counter[str], Counter[str]]:
    """Calls of Python functions, by name, in the forward and in the backward pass of a step."""
    handed = {proxy: _Rows(proxy, model, batch, None) for proxy in model.proxies.values()}
    loss: list[torch.Tensor] = []

    def forward() -> None:
        with handing_out(handed):
            loss.append(model.called(batch)[0])

    before = calls_by_name(forward)
    wanted = [*(leaf for rows in handed.values() for leaf in rows.leaves), *model.trained()]
    return before, calls_by_name(partial(torch.autograd.grad, loss[0], wanted, allow_unused=True))


def _nodes(loss: torch.Tensor) -> int:
    """Nodes of the graph behind ``loss``."""
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return len(seen)


class _Rows(HandedRows):
    """Rows whose making is not watched."""

    def __init__(self, proxy: CollectionProxy, model: PlacedModel, batch: Any, watch: _Stages | None) -> None:
        super().__init__(proxy, model.ids_of(proxy, batch), padding=True)
        self._watch = watch

    def rows(self, sparse: KeyedJaggedTensor) -> list[torch.Tensor]:
        """The rows of each group."""
        self._pause(True)
        made = super().rows(sparse)
        self._pause(False)
        return made

    def _pause(self, paused: bool) -> None:
        if self._watch is not None:
            self._watch.paused = paused
            self._watch.stage = max(self._watch.stage, 1)


def calls_by_name(run: Callable[[], object]) -> Counter[str]:
    """Calls of Python functions in this thread while ``run`` runs, by name; a method whose first argument is
    ``ctx`` is ``NAME(ctx)``."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            on_ctx = code.co_argcount > 0 and code.co_varnames[0] == "ctx"
            found[f"{code.co_name}(ctx)" if on_ctx else code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found
