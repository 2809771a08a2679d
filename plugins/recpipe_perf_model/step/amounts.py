"""Times of parts of a step, added up from the models of their operators."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recpipe.errors import UserError
from recpipe.profiling.limits import Sample
from recpipe_perf_model.kernels.linear import At, Linear, LookupWork, Vector, lookup_features
from recpipe_perf_model.kernels.models import KernelModels
from recpipe_perf_model.kernels.operators import Operator, optimizer_sizes
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.step.capture import Captured, GroupLookups, Part

COLD = (2.0**18, 2.0**26)
"""Bytes that a step's operators touch, from those that leave Python's code and data in a core's caches to
those that leave nothing of it. Between them, the logarithm of the factor grows with that of the bytes."""
SMALL = 64
"""Values of a parameter with which an optimizer's step is mostly its call."""


@dataclass(frozen=True)
class Factors:
    """How many times as long parts of a step take as they do in their micro-benchmarks; 1 where no steps were
    measured (``step.fitted_factors``)."""

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


def _lookups(profile: MachineProfile) -> dict[tuple[str, float], Linear]:
    """The models of lookups, by kind and threads."""
    found: dict[tuple[str, float], list[Sample]] = {}
    for sample in (*profile.samples.get("lookups", ()), *profile.samples.get("loops", ())):
        if sample.kind.removeprefix("loop ") in ("lookup forward", "lookup update"):
            found.setdefault((sample.kind, float(sample.at.get("threads", 1))), []).append(sample)
    return {key: Linear.fit(samples, lookup_features) for key, samples in found.items()}


class Amounts:
    """The seconds of a machine's operators, lookups and overheads."""

    def __init__(self, profile: MachineProfile, factors: Factors = Factors()) -> None:
        self.kernels = KernelModels.of(profile)
        self.threads = profile.host.threads
        self.factors = factors
        self._known: dict[Any, float] = {}
        self._lookups = _lookups(profile)

    def corrected(self, factors: Factors, threads: int | None = None) -> Amounts:
        """The same machine with other ``factors``, or with so many threads, of those that were measured."""
        other = copy(self)
        other.factors, other.threads = factors, threads or self.threads
        return other

    def among(self, touched: float) -> Amounts:
        """The same machine in a step whose operators touch so many bytes."""
        low, high = np.log(COLD)
        share = float(np.clip((np.log(max(1.0, touched)) - low) / (high - low), 0.0, 1.0))
        return self.corrected(replace(self.factors, python=self.factors.python**share))

    def overhead(self, kind: str, times: float = 1.0) -> float:
        """An overhead of ``bench.overheads`` that does not depend on sizes."""
        return times * self.factors.python * self._kernel(kind, {})

    def pipeline(self, captured: Captured) -> float:
        """What the pipeline's step takes beside the model and the tables' kernels."""
        tables = sum(len(group.tables) for group in captured.groups)
        return self.factors.python * self._kernel("step", {"elements": float(tables)})

    def operator(self, operator: Operator, threads: float) -> float:
        """The time of an operator: of its call, and of what it then does."""
        whole = self._kernel(operator.kind, {**operator.at, "threads": threads})
        call = min(whole, self._kernel("view", {"threads": threads}))
        return self.factors.python * self._turns(threads) * call + self.factors.kernels * (whole - call)

    def optimizer(self, name: str, sizes: At, threads: float) -> float:
        """A step of the dense optimizer; of one that was not measured, as Adam's."""
        kind = f"optimizer {name}"
        at = {**sizes, "threads": threads}
        kind = kind if self.kernels.knows(kind, at) else "optimizer Adam"
        runs = int(float(sizes["runs"]))
        whole = self._kernel(kind, at)
        call = min(
            whole, self._kernel(kind, {**optimizer_sizes(name, runs, SMALL * runs), "threads": threads})
        )
        return self.factors.python * call + self.factors.kernels * (whole - call)

    def stages(self, part: Part) -> list[float]:
        """The times of a part's ``capture.STAGES``, with autograd's and Python's in proportion to the
        operators."""
        turns, found = self._turns(part.threads), []
        forward, backward = ((sum(map(len, some)) or 1) for some in (part.operators[:2], part.operators[2:]))
        for number, operators in enumerate(part.operators):
            seconds = sum((self.operator(each, part.threads) for each in operators), 0.0)
            if number < 2:
                share = turns * len(operators) / forward
                extra = {"call": part.calls[0], "recorded": part.recorded}
            else:
                share = turns * len(operators) / backward
                extra = {"call": part.calls[1], "node": part.nodes, "function": part.functions}
            found.append(seconds + sum(self.overhead(kind, share * times) for kind, times in extra.items()))
        return found

    def lookups(self, groups: Iterable[GroupLookups], kind: str, threads: float | None = None) -> float:
        """``lookup forward``, or ``lookup update`` of those that are trained, of all groups: by FBGEMM in one
        thread, by loops in so many, or in all."""
        total = 0.0
        for group in groups:
            if not group.tables or (kind == "lookup update" and not group.trained):
                continue
            key = (f"loop {kind}", threads or self.threads) if group.by_loops else (kind, 1.0)
            if key not in self._lookups:
                raise UserError("the machine profile has no samples of lookups: run recpipe perf calibrate")
            tables = [LookupWork(t.rows, group.dim, t.bags, t.lookups, t.distinct) for t in group.tables]
            footprint = sum(table.bytes for table in tables)
            work: Vector = np.concatenate([[1.0], sum(table.features(footprint) for table in tables)])
            total += float(work @ self._lookups[key].coefficients)
        return self.factors.tables * total

    def _turns(self, threads: float) -> float:
        """The factor for Python in a part with so many threads, beside the one for all Python."""
        return self.factors.shared if threads < self.threads else 1.0

    def _kernel(self, kind: str, at: At) -> float:
        """The micro-benchmarks' seconds, asked once for the same sizes."""
        key = kind, tuple(at.items())
        if key not in self._known:
            self._known[key] = self.kernels.seconds(kind, at)
        return self._known[key]
