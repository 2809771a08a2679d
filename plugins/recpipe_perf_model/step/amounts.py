"""Times of parts of a step, added up from the models of their operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recpipe.profiling.limits import Limits
from recpipe_perf_model.kernels.linear import At, Linear, Vector
from recpipe_perf_model.kernels.models import NO_TIME, Estimate, KernelModels
from recpipe_perf_model.kernels.moves import LookupWork, lookup_features
from recpipe_perf_model.kernels.operators import Operator, optimizer_sizes
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.step.capture import Captured, GroupLookups, Part

FAR = 2.0**24
"""Bytes touched between two uses of a gradient or a parameter: most of a step's."""
COLD = (2.0**18, 2.0**26)
"""Bytes that a step's operators touch, from those that leave Python's code and data in a core's caches to
those that leave nothing of it. Between them, the logarithm of the factor grows with that of the bytes."""
SMALL = 64
"""Values of a parameter with which an optimizer's step is mostly its call."""
RECORDED, NODE, FUNCTION, CALL = "recorded", "node", "function", "call"


@dataclass(frozen=True)
class Factors:
    """How many times as long parts of a step take as they do in their micro-benchmarks; 1 where no steps were
    measured (``recpipe_perf_model.step.factors``)."""

    python: float = 1.0
    """Python, autograd and the calls of operators, in a step that touches so much memory that their code and
    data leave the caches between two steps (``COLD``); in a step that touches little, 1."""
    kernels: float = 1.0
    """What operators do once they are called."""
    shared: float = 1.0
    """Python again, where cores share a batch: their threads take turns with the interpreter."""
    tables: float = 1.0
    """Lookups and updates of rows."""
    error: float = 0.06
    """The relative error that is left in a step, as a standard deviation."""


class Total:
    """A sum of estimates. Errors of operators of one kind go the same way; those of different kinds do
    not."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._below: dict[str, float] = defaultdict(float)
        self._above: dict[str, float] = defaultdict(float)

    def add(self, kind: str, estimate: Estimate) -> None:
        """Add an estimate for an operator of this kind."""
        self.seconds += estimate.seconds
        self._below[kind] += estimate.seconds - estimate.low
        self._above[kind] += estimate.high - estimate.seconds

    @property
    def estimate(self) -> Estimate:
        """The sum."""
        below, above = (
            float(np.sqrt(sum(size**2 for size in each.values()))) for each in (self._below, self._above)
        )
        return Estimate(self.seconds, max(0.0, self.seconds - below), self.seconds + above)


@dataclass(frozen=True)
class Stages:
    """Estimates of a part's stages: see ``capture.STAGES``."""

    before: Estimate
    forward: Estimate
    to_rows: Estimate
    rest: Estimate


class Amounts:
    """The times of a machine's operators, lookups and overheads."""

    def __init__(self, profile: MachineProfile, factors: Factors = Factors()) -> None:
        self.kernels = KernelModels.of(profile)
        self.threads = profile.host.threads
        self.factors = factors
        self._known: dict[Any, Estimate] = {}
        self._lookups = {
            kind: Linear.fit(found, lookup_features)
            for kind in ("lookup forward", "lookup update")
            if (found := [s for s in profile.samples.get("lookups", ()) if s.kind == kind])
        }
        self._limits = Limits.of(profile.samples.get("limits", ()), 64, self.threads)

    def corrected(self, factors: Factors) -> Amounts:
        """The same machine with other ``factors``."""
        other = copy(self)
        other.factors = factors
        return other

    def with_threads(self, threads: int) -> Amounts:
        """The same machine with so many threads, of those that were measured."""
        other = copy(self)
        other.threads = threads
        return other

    def among(self, touched: float) -> Amounts:
        """The same machine in a step whose operators touch so many bytes."""
        low, high = np.log(COLD)
        share = float(np.clip((np.log(max(1.0, touched)) - low) / (high - low), 0.0, 1.0))
        return self.corrected(replace(self.factors, python=self.factors.python**share))

    def overhead(self, kind: str, times: float = 1.0) -> Estimate:
        """An overhead of ``bench.overheads`` that does not depend on sizes."""
        return self._kernel(kind, {}).times(times * self.factors.python)

    def pipeline(self, captured: Captured) -> Estimate:
        """What the pipeline's step takes beside the model and the tables' kernels."""
        tables = sum(len(group.tables) for group in captured.groups)
        return self._kernel("step", {"elements": float(tables)}).times(self.factors.python)

    def operator(self, operator: Operator, threads: float) -> Estimate:
        """The time of an operator: of its call, and of what it then does."""
        whole = self._kernel(operator.kind, {**operator.at, "threads": threads})
        call = self._kernel("view", {"threads": threads})
        return self._scaled(whole, call, self._turns(threads))

    def _turns(self, threads: float) -> float:
        """The factor for Python in a part with so many threads, beside the one for all Python."""
        return self.factors.shared if threads < self.threads else 1.0

    def _scaled(self, whole: Estimate, call: Estimate, turns: float = 1.0) -> Estimate:
        """``whole`` with its call and its work times their factors."""
        factors, calls = self.factors, min(whole.seconds, call.seconds)
        seconds = factors.python * turns * calls + factors.kernels * (whole.seconds - calls)
        return whole.times(seconds / max(whole.seconds, 1e-12))

    def _kernel(self, kind: str, at: At) -> Estimate:
        """``kernels.seconds``, asked once for the same sizes."""
        key = kind, tuple(at.items())
        if key not in self._known:
            self._known[key] = self.kernels.seconds(kind, at)
        return self._known[key]

    def stages(self, part: Part) -> Stages:
        """The times of a part's stages, with autograd's and Python's in proportion to the operators."""
        totals = [Total() for _ in part.operators]
        forward = sum(map(len, part.operators[:2])) or 1
        backward = sum(map(len, part.operators[2:])) or 1
        turns = self._turns(part.threads)
        for number, (total, operators) in enumerate(zip(totals, part.operators, strict=True)):
            for operator in operators:
                total.add(operator.kind, self.operator(operator, part.threads))
            if number < 2:
                share = len(operators) / forward
                total.add(CALL, self.overhead(CALL, turns * share * part.calls[0]))
                total.add(RECORDED, self.overhead(RECORDED, turns * share * part.recorded))
            else:
                share = len(operators) / backward
                total.add(CALL, self.overhead(CALL, turns * share * part.calls[1]))
                total.add(NODE, self.overhead(NODE, turns * share * part.nodes))
                total.add(FUNCTION, self.overhead(FUNCTION, turns * share * part.functions))
        return Stages(*(total.estimate for total in totals))

    def lookups(self, groups: Iterable[GroupLookups], kind: str) -> Estimate:
        """``lookup forward``, or ``lookup update`` of those that are trained, of all groups."""
        total = Total()
        for group in groups:
            idle = kind == "lookup update" and not group.trained
            if (group.lookups or group.tables) and not idle:
                total.add(kind, self._lookup(group, kind))
        return total.estimate.times(self.factors.tables)

    def _lookup(self, group: GroupLookups, kind: str) -> Estimate:
        model = self._lookups.get(kind)
        if model is None:
            return self._by_limits(group, kind)
        seconds = float(_work(group) @ model.coefficients)
        spread = float(np.exp(1.28 * model.spread))
        return Estimate(seconds, seconds / spread, seconds * spread)

    def _by_limits(self, group: GroupLookups, kind: str) -> Estimate:
        """By the rate of random rows, for a profile without lookups."""
        if self._limits is None:
            return NO_TIME
        ways = 1 if kind == "lookup forward" else 3
        moved = 4.0 * ways * (group.dim * sum(table.distinct for table in group.tables) + group.handed_out)
        seconds = moved / self._limits.gather_bytes_per_s_one_thread
        return Estimate(seconds, seconds / 2, seconds * 2)

    def optimizer(self, name: str, sizes: At, threads: float) -> Estimate:
        """A step of the dense optimizer; of one that was not measured, as Adam's."""
        kind = f"optimizer {name}"
        at = {**sizes, "threads": threads}
        kind = kind if self.kernels.knows(kind, at) else "optimizer Adam"
        small = optimizer_sizes(name, int(float(sizes["runs"])), SMALL * int(float(sizes["runs"])))
        call = self._kernel(kind, {**small, "threads": threads})
        return self._scaled(self._kernel(kind, at), call)


def _work(group: GroupLookups) -> Vector:
    tables = [
        LookupWork(table.rows, group.dim, table.bags, table.lookups, table.distinct) for table in group.tables
    ]
    footprint = sum(table.bytes for table in tables)
    features: Vector = np.concatenate([[1.0], sum(table.features(footprint) for table in tables)])
    return features


def copied(values: float, runs: float = 0.0) -> Operator:
    """A copy of so many float32 values, which were just made."""
    at = {"bytes": 8.0 * values, "footprint": 8.0 * values, "elements": values, "runs": runs}
    at["reuse"] = 2 * at["footprint"]
    return Operator("elementwise", {**at, "dtype": "float32"}, "copy_")


def added(values: float) -> Operator:
    """A sum of two tensors of so many float32 values, in new memory."""
    at = {"bytes": 12.0 * values, "footprint": 12.0 * values, "elements": values, "runs": 0.0}
    at["reuse"] = FAR
    return Operator("elementwise", {**at, "dtype": "float32"}, "add")


def together(estimates: Sequence[Estimate]) -> Estimate:
    """The sum of estimates whose errors are independent."""
    total = Total()
    for number, estimate in enumerate(estimates):
        total.add(str(number), estimate)
    return total.estimate


def keeping(captured: Captured, part: Part) -> Operator:
    """The copy of a core's gradients of rows to those of the whole batch."""
    share = part.samples / captured.samples
    values = share * sum(group.handed_out for group in captured.groups)
    return copied(values, 2.0 * part.samples)
