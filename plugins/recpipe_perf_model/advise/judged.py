"""What ``task=advise`` knows of a machine, and its judgement of a recipe there."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import hypot
from statistics import median
from typing import Any

from recpipe.distributed.ranks import Emulation
from recpipe.errors import UserError
from recpipe_perf_model.advise.candidates import Candidate, candidates
from recpipe_perf_model.advise.model import Paper
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.kernels.linear import MoveTimes
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.step.amounts import Amounts, Factors
from recpipe_perf_model.step.factors import step_amounts
from recpipe_perf_model.step.step import Prediction, predict_resident
from recpipe_perf_model.tiers.predict import Kind, TieredPrediction, predict_tiered, resident_steps
from recpipe_perf_model.tiers.ranked import measured_with
from recpipe_perf_model.tiers.tiered import Resident


class Machine:
    """What a machine's profile tells of times."""

    def __init__(self, profile: MachineProfile, factors: Factors | None = None) -> None:
        """``factors``: those of a measured machine, if ``profile`` is of one with faster parts."""
        self.profile, self.moves = profile, MoveTimes.of(profile)
        self.amounts = step_amounts(profile) if factors is None else Amounts(profile, factors)
        self.cores = profile.host.cores
        self.spread = median(model.spread for model in self.moves.models.values())
        """The relative error of a part of a tier's work."""
        self._plain: dict[Paper, tuple[Prediction, Resident]] = {}
        self._ranked: dict[tuple[Paper, int], Resident] = {}
        self._messages: dict[int, MoveTimes] = {}

    def plain(self, paper: Paper) -> tuple[Prediction, Resident]:
        """The step with all rows resident, of a batch and of any number of samples."""
        if paper not in self._plain:
            whole = predict_resident(paper.step(paper.samples), self.amounts)
            self._plain[paper] = whole, resident_steps(paper.step, self.amounts)
        return self._plain[paper]

    def of_rank(self, paper: Paper, threads: int) -> Resident:
        """The same of any number of samples on one of several ranks with so many threads."""
        if (paper, threads) not in self._ranked:
            amounts = self.amounts.corrected(self.amounts.factors, threads)
            self._ranked[paper, threads] = resident_steps(
                lambda samples: paper.of_rank(samples, threads), amounts
            )
        return self._ranked[paper, threads]

    def messages(self, ranks: int) -> MoveTimes:
        """The times of tiers, and of messages between so many ranks."""
        if ranks not in self._messages:
            self._messages[ranks] = MoveTimes.of(measured_with(self.profile, ranks))
        return self._messages[ranks]


@dataclass(frozen=True)
class Judged:
    """A recipe's prediction."""

    prediction: TieredPrediction
    of_tiers: float
    """The relative error that comes from what tiers do."""
    of_step: float
    """That of the rest, which all recipes share."""

    @property
    def seconds(self) -> list[float]:
        """A step's seconds, with the least and the most expected."""
        whole, error = self.prediction.step_seconds, hypot(self.of_tiers, self.of_step)
        return [whole, whole / (1 + error), whole * (1 + error)]

    def ratio(self, plain: Judged) -> list[float]:
        """How many times as fast as ``plain``, with the least and the most expected."""
        times = plain.prediction.step_seconds / self.prediction.step_seconds
        if plain.prediction is self.prediction:
            return [1.0, 1.0, 1.0]
        error = hypot(self.of_tiers, plain.of_tiers, self.of_step - plain.of_step)
        return [times, times / (1 + error), times * (1 + error)]

    @property
    def main(self) -> Kind:
        """The kind of batches that most are of."""
        return max(self.prediction.kinds, key=lambda kind: kind.phase.share)


_BOUNDS = {
    "read ahead": "cold reads",
    "read": "input",
    **dict.fromkeys(("fetch", "write"), "cold reads"),
    **dict.fromkeys(("plan", "advance", "arrive", "look ahead"), "moving rows"),
    **dict.fromkeys(("exchange", "tell rows", "add up row", "add up dense"), "network"),
    **dict.fromkeys(("forward", "backward", "dense optimizer", "add up gradients"), "dense math"),
    **dict.fromkeys(("look up", "table update"), "lookups"),
}
"""What a step is bound by where it waits for a task whose name begins so; the first that fits."""
ELSE = "Python"
LEAST = 0.05
"""The share of a step below which a bound is not told."""


def by_beginning(task: str, words: Mapping[str, str], otherwise: str) -> str:
    """The value of the first of ``words`` that the name of a ``task`` begins with, or ``otherwise``."""
    return next((what for begin, what in words.items() if task.startswith(begin)), otherwise)


def bounds(kind: Kind) -> dict[str, float]:
    """What a step is bound by, with shares of the critical path, the largest first."""
    found: dict[str, float] = defaultdict(float)
    for task, seconds in kind.walked.critical.items():
        found[by_beginning(task, _BOUNDS, ELSE)] += seconds
    whole = max(sum(found.values()), 1e-12)
    return {what: found[what] / whole for what in sorted(found, key=lambda what: -found[what])}


def bound(shares: Mapping[str, float]) -> str:
    """The largest of ``bounds``, in words."""
    what = next(iter(shares))
    return f"{what} {100 * shares[what]:.0f}%"


def all_bounds(shares: Mapping[str, float]) -> str:
    """``bounds`` in words, without the smallest."""
    return ", ".join(f"{what} {100 * share:.0f}%" for what, share in shares.items() if share >= LEAST)


def of_tiers(kind: Kind, whole: Prediction) -> float:
    """The share of a step's critical path that is not in the resident step."""
    critical = kind.walked.critical
    known = sum(seconds for name, seconds in critical.items() if name.partition(",")[0] in whole.tasks)
    return 1 - known / max(sum(critical.values()), 1e-12)


def judge(
    candidate: Candidate, facts: Facts, machine: Machine, paper: Paper, network: Emulation | None = None
) -> Judged:
    """The prediction for a recipe; ``network``: as in ``predicted``."""
    whole, _ = machine.plain(paper)
    prediction = predicted(candidate, facts, machine, paper, network)
    step = (whole.step.high - whole.step.low) / (2 * whole.step.seconds)
    part = sum(kind.phase.share * of_tiers(kind, whole) for kind in prediction.kinds)
    return Judged(prediction, machine.spread * part, step * (1 - part))


def predicted(
    candidate: Candidate, facts: Facts, machine: Machine, paper: Paper, network: Emulation | None
) -> TieredPrediction:
    """``network``: that between the ranks of ``facts``, if they are on machines of their own."""
    stated, base, cores = candidate.stated, candidate.base, float(machine.cores)
    if facts.trainers == 1:
        return predict_tiered(facts, stated, base, machine.moves, machine.plain(paper)[1], cores)
    threads = threads_of_rank(machine.amounts.threads, network is not None)
    cores = cores / facts.trainers if network is None else cores
    times, resident = machine.messages(facts.trainers), machine.of_rank(paper, threads)
    return predict_tiered(candidate.facts(facts), stated, base, times, resident, cores, network)


def told_timeline(kind: Kind) -> list[dict[str, Any]]:
    """Some steps' tasks, with their seconds since the walk's begin."""
    return [
        {"place": span.task.place, "name": span.task.name, "start": span.start, "end": span.end}
        for span in kind.walked.timeline
    ]


NETWORK = Emulation(latency_us=100.0, gbit_per_s=10.0)
"""Between machines, if ``advise.network`` names no other."""


Seconds = Callable[[Candidate, Facts, Emulation | None], float]
"""Predicts a recipe's step over the ranks of its facts."""


def threads_of_rank(threads: int, apart: bool) -> int:
    """The threads of one of several ranks, where a run of one process has ``threads``: torchrun gives each of
    those that share a machine one thread, unless OMP_NUM_THREADS says how many."""
    said = os.environ.get("OMP_NUM_THREADS", "1")
    return threads if apart else min(threads, int(said) if said.isdigit() and int(said) else 1)


def another_rank(
    facts: Facts, network: Emulation | None, seconds: Seconds, now: float
) -> list[dict[str, Any]]:
    """How many times as fast the best exact recipe of two ranks is as a step of ``now`` seconds: with the
    memory of ``facts`` shared by both on this machine, and with as much on each of two machines. Empty if the
    machine's profile lacks messages between ranks."""
    network = network or NETWORK
    wire = f"{network.latency_us:g} us" if network.latency_us else "no latency"
    wire += f" and {network.gbit_per_s:g} Gbit/s" if network.gbit_per_s else ""
    two = facts.at(trainers=2)
    whole = facts.share >= 1
    places = {
        "2 ranks on this machine": (two if whole else two.at(share=facts.share / 2), None),
        f"one more machine like this, {wire} away": (two, network),
    }
    found = []
    for what, (over, between) in places.items():
        times: dict[str, float] = {}
        for candidate in candidates(over, {}):
            if candidate.alters:
                continue
            try:
                times[candidate.name] = seconds(candidate, over, between)
            except UserError:
                continue
        if times:
            best = min(times, key=lambda name: times[name])
            found.append({"what": f"{what} ({best})", "ratio": now / times[best]})
    return found
