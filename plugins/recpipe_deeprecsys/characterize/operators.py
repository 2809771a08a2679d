"""What each operator of a step does and how long it takes, from steps that are watched.

Operators are those that the performance model captures (``recpipe_perf_model.kernels.operators``), each
timed where it runs in the step. Lookups and updates of tables, which torch does not see as one operator, are
timed as a whole. Of several steps the lower quartile counts, since other programs only make a step slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from recpipe_perf_model.kernels.operators import FREE, GEMMS, Operator, Watch
from torch.utils.flop_counter import flop_registry

from recpipe.profiling.traced import Whereabouts
from recpipe_deeprecsys.characterize.roofs import Work

FC, LOOKUP, INTERACTION, MANIPULATION, OTHER = (
    "FC",
    "embedding lookup",
    "interaction",
    "tensor manipulation",
    "other",
)
CLASSES = (FC, LOOKUP, INTERACTION, MANIPULATION, OTHER)
"""Classes of operators, as in the papers. Interaction: products of a batch of matrices, and all products of
modules that combine features (``recpipe.profiling.traced.INTERACTIONS``). Tensor manipulation moves values
and computes none."""
FORWARD, BACKWARD, UPDATE, OPTIMIZER = "forward", "backward", "update of tables", "optimizer"
VIEWS = "views, empty tensors"
_MOVES = ("cat", "fill", "put", "transpose", *FREE)
"""Kinds of operators that compute no values; those that begin with take or cast are others."""
_MOVING = frozenset(
    (
        *("copy_", "clone", "_to_copy", "repeat", "repeat_interleave", "flip", "roll", "constant_pad_nd"),
        *("tril", "triu", "arange", "sort", "argsort", "scatter", "unfold", "unfold_backward", "diag"),
        *("_index_put_impl_", "slice_scatter", "select_scatter", "detach", "unbind", "nonzero"),
    )
)
"""Other operators by name that compute none."""
_LOOKUPS = ("split_embedding", "embedding_bag", "segment_sum_csr", "asynchronous_complete_cumsum")
"""Parts of the names of operators that look rows up, where a model makes ids itself."""


@dataclass(frozen=True)
class Call:
    """One kind of call in a step: what makes calls alike."""

    kind: str
    """One of ``CLASSES``."""
    name: str
    """torch's name of the operator, or what is looked up."""
    phase: str
    part: str
    """The part of the model: interaction, MLP, dense, embedding."""
    shape: str
    """Its sizes, in words."""


@dataclass
class Counted:
    """All calls of one kind in a step."""

    work: Work
    """Of all together."""
    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Timed:
    """One kind of call, over all steps."""

    call: Call
    work: Work
    """Of all calls of a step together."""
    calls: float
    """In a step."""
    seconds: float
    """Of a step, the lower quartile."""


class Watched(Watch):  # type: ignore[no-untyped-call]
    """Times the operators of steps, by call. ``with watched.step():`` is a step; what is to be watched in it
    runs in ``with watched:``."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = FORWARD
        self.steps: list[dict[Call, Counted]] = []
        self._seconds = self._flops = self._values = 0.0
        self._where = Whereabouts()

    @contextmanager
    def step(self) -> Iterator[None]:
        """In the block, operators belong to a new step."""
        self.steps.append({})
        self.phase, self._where = FORWARD, Whereabouts()
        yield

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """In the block, operators belong to the part ``name``, "PART forward", and so do those of their
        backward pass: put by ``recpipe.profiling.traced.tell_parts``."""
        self._where.enter(name.partition(" ")[0])
        yield
        self._where.leave()

    @contextmanager
    def whole(self, call: Call, work: Work) -> Iterator[None]:
        """Time the block, in which nothing is watched, as one call."""
        begun = perf_counter()
        yield
        self.count(call, work, perf_counter() - begun)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operator and time it; count its operations where torch has a formula."""
        begun = perf_counter()
        out = func(*args, **kwargs)
        self._seconds = perf_counter() - begun
        formula, self._flops, self._values = flop_registry.get(func._overloadpacket), 0.0, 0.0
        if formula is not None:
            self._flops = float(formula(*args, **kwargs, out_val=out))
        if func._schema.name.startswith("aten::_foreach"):
            self._values = float(sum(tensor.numel() for tensor in args[0]))
        return out

    def note(self, operator: Operator) -> None:
        """Count an operator that ran."""
        part, way = self._where.here()
        phase = BACKWARD if way == "backward" else self.phase
        work = work_of(operator, self._flops, self._values)
        kind = class_of(operator, part, bool(self._flops))
        name, shape = (VIEWS, "") if operator.kind in FREE else (operator.name, shape_of(operator))
        self.count(Call(kind, name, phase, part, shape), work, self._seconds)

    def count(self, call: Call, work: Work, seconds: float) -> None:
        """Count one call."""
        own = self.steps[-1]
        before = own.get(call)
        if before is None:
            own[call] = Counted(work, 1, seconds)
            return
        before.calls += 1
        before.seconds += seconds
        before.work = added(before.work, work)

    def timed(self) -> list[Timed]:
        """All kinds of calls, over the steps so far, those that take longest first."""
        found: dict[Call, list[Counted]] = defaultdict(list)
        for step in self.steps:
            for call, counted in step.items():
                found[call].append(counted)
        whole = len(self.steps)
        rows = []
        for call, each in found.items():
            share = len(each) / whole
            seconds = typical([counted.seconds for counted in each])
            work = mean_work([counted.work for counted in each]).times(share)
            calls = share * sum(counted.calls for counted in each) / len(each)
            rows.append(Timed(call, work, calls, share * seconds))
        return sorted(rows, key=lambda row: -row.seconds)


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


def added(one: Work, other: Work) -> Work:
    """Both, each over memory of its own like the other's."""
    return Work(
        one.flops + other.flops,
        one.streamed + other.streamed,
        one.gathered + other.gathered,
        max(one.footprint, other.footprint),
        one.dtype,
        one.row_bytes,
        one.weights + other.weights,
    )


def mean_work(each: Sequence[Work]) -> Work:
    """The mean of steps' work, which differs by how many rows a batch looks up."""
    first, count = each[0], len(each)
    flops, streamed, gathered, footprint, weights = (
        sum(getattr(work, name) for work in each) / count
        for name in ("flops", "streamed", "gathered", "footprint", "weights")
    )
    return Work(flops, streamed, gathered, footprint, first.dtype, first.row_bytes, weights)


def work_of(operator: Operator, flops: float = 0.0, values: float = 0.0) -> Work:
    """What a captured operator does; ``flops`` by torch's formula, if it has one. ``values``: of all tensors
    that an operator on lists of them changes.

    A product of m x k and k x n takes 2 m n k operations, biases not counted; an operator that computes
    values takes one for each of its largest tensor, and one that moves them none.
    """
    if operator.kind in FREE:
        return Work()
    at = operator.at
    footprint, dtype = float(at["footprint"]), str(at["dtype"])
    if operator.kind in GEMMS:
        b, m, n, k = (float(at[name]) for name in "bmnk")
        return Work(2 * b * m * n * k, footprint, 0.0, footprint, dtype, weights=b * k * n)
    if any(part in operator.name for part in _LOOKUPS):
        # Of ids that the model makes: as many bytes are read as rows come out.
        out = 4 * float(at["results"])
        return Work(float(at["results"]), out, out, out, dtype, 4 * float(at["row"]), float(at["results"]))
    moved = float(at["bytes"])
    if flops:
        return Work(flops, moved, 0.0, footprint, dtype)
    computed = 0.0 if moves(operator) else values or float(at["elements"])
    return Work(computed, moved, 0.0, footprint, dtype)


def moves(operator: Operator) -> bool:
    """Whether an operator moves values and computes none."""
    if operator.kind.startswith(("take ", "cast ")) or operator.kind in _MOVES:
        return True
    return operator.name in _MOVING


def class_of(operator: Operator, part: str, formula: bool) -> str:
    """One of ``CLASSES``; ``formula``: whether torch counts its operations as those of products."""
    if any(name in operator.name for name in _LOOKUPS):
        return LOOKUP
    if operator.kind in GEMMS or formula:
        return INTERACTION if part == "interaction" or operator.kind.startswith("bmm") else FC
    return MANIPULATION if moves(operator) else OTHER


def shape_of(operator: Operator) -> str:
    """The sizes of an operator, in words: ``1024 x 128 x 64`` for a product of 1024 x 128 and 128 x 64."""
    at = operator.at
    if operator.kind in GEMMS:
        sizes = [int(float(at[name])) for name in "bmkn"]
        return " x ".join(f"{size}" for size in (sizes if sizes[0] > 1 else sizes[1:]))
    return f"{float(at['elements']):,.0f} values"


def lookup_call(number: int, tables: int, dim: int, phase: str) -> Call:
    """The lookup, or the update, of a group of so many tables."""
    what = "update" if phase == UPDATE else "lookup"
    shape = f"{tables} table{'s' if tables != 1 else ''} of {dim} columns"
    return Call(LOOKUP, f"{what} of group {number}", phase, "embedding", shape)
