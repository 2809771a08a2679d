"""What ``task=advise`` knows of a model and of a machine, and its judgement of a recipe there."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import hypot
from pathlib import Path
from statistics import median
from typing import Any

import torch

from recpipe.backend.build import Backend, build_backend
from recpipe.backend.convert import padded_paths
from recpipe.common.console import log
from recpipe.common.own_cache import default_cache_dir
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.parts import batch_size
from recpipe.data.select import between
from recpipe.distributed.ranks import Emulation, Ranks
from recpipe.errors import UserError, nearest_or_all
from recpipe.pipeline.placed import PlacedModel
from recpipe.setup.placing import Unplaced
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.resident import FewRows, with_few_rows
from recpipe.training.dense import dense_optimizer
from recpipe_perf_model.advise.candidates import Candidate
from recpipe_perf_model.calibrate import calibrate, with_ranks
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.kernels.linear import MoveTimes
from recpipe_perf_model.machine import Host, MachineProfile, own_profile, profile_path
from recpipe_perf_model.step.amounts import Amounts, Factors
from recpipe_perf_model.step.capture import CannotTrace, Captured, captured
from recpipe_perf_model.step.step import FAMILY as STEPS
from recpipe_perf_model.step.step import Estimate, Prediction, Step, predict_resident, reading, step_amounts
from recpipe_perf_model.tiers.predict import Kind, TieredPrediction, predict_tiered, resident_steps
from recpipe_perf_model.tiers.ranked import measured_with
from recpipe_perf_model.tiers.tiered import Resident

NEEDED = ("limits", "gemm", "pointwise", "overheads", "lookups", "loops", "tiers", "stores", "steps")
"""Families of measurements that predictions for a CPU are made of."""
BESIDE = ("rows", "collectives")
"""Those that only predictions for several ranks, and of tables with rows as plain arrays, are made of."""
DISK = "disk"
"""The what-if for waiting for an ssd store; what the processor does for it stays as it is."""


@dataclass(eq=False)
class Paper:
    """A model, whose tables may be stand-ins, with the back end that it would run with."""

    model: PlacedModel
    backend: Backend
    first_batch: Any
    optimizer: str
    read: Estimate
    """How long a batch's reading takes."""
    _captured: dict[int, Captured] = field(default_factory=dict)

    @classmethod
    def of(cls, cfg: Recipe, dataset: Dataset, unplaced: Unplaced, device: torch.device) -> Paper:
        """``CannotTrace`` if the model cannot be traced. The back end's own measurements are made if they are
        not known."""
        wide = padded_paths(unplaced.called.module) if cfg.trainer.kernels != "plain" else set()
        tables = unplaced.tables
        groups = zip(tables.groups, with_few_rows(tables), strict=True)
        few = GroupedCollection(tables, [FewRows(cut, group.path in wide) for group, cut in groups])
        model = unplaced.over(few)
        ranks = Ranks()
        try:
            backend = build_backend(
                cfg.trainer.kernels,
                model,
                None,
                unplaced.first_batch,
                cfg.data.batch_size,
                device,
                ranks.channel(ranks.trainers),
                default_cache_dir() / "backend",
            )
        except UserError:
            raise
        except Exception as fault:  # the back end runs the model, which can raise anything
            raise CannotTrace.of(model.module, fault) from fault
        return cls.over(cfg, dataset, model, backend, unplaced.first_batch)

    @classmethod
    def over(cls, cfg: Recipe, dataset: Dataset, model: PlacedModel, backend: Backend, batch: Any) -> Paper:
        """Of a model with its back end. ``CannotTrace`` if it cannot be traced with ``batch``."""
        optimizer = type(dense_optimizer(cfg.optim.dense, list(model.trained()))).__name__
        made = cls(model, backend, batch, optimizer, reading(dataset, cfg.data.batch_size, model.inputs))
        made.step(made.samples)
        return made

    @property
    def samples(self) -> int:
        """Of a batch."""
        return batch_size(self.first_batch)

    def step(self, samples: int) -> Step:
        """A step of so many samples, at most those of a batch."""
        samples = min(samples, self.samples)
        cores = self.backend.cores
        shares = [] if cores is None else cores.shares(samples)
        if samples not in self._captured:
            self._captured[samples] = captured(self.model, between(self.first_batch, 0, samples), shares)
        return Step(
            self._captured[samples],
            self.optimizer,
            self.read,
            self.backend.beside is not None,
            len(shares) > 1,
        )

    def of_rank(self, samples: int, threads: int) -> Step:
        """A step of so many samples on one of several ranks with so many threads: cores do not share its
        batch. Its reading is that of a whole batch."""
        step = self.step(samples)
        whole = replace(step.captured.whole, threads=threads)
        return replace(
            step, captured=replace(step.captured, whole=whole, shares=()), beside=False, shared=False
        )


class Machine:
    """What a machine's profile tells of times."""

    def __init__(self, profile: MachineProfile, factors: Factors | None = None) -> None:
        """``factors``: those of a measured machine, if ``profile`` is of one with faster parts."""
        self.profile, self.moves = profile, MoveTimes.of(profile)
        self.amounts = step_amounts(profile) if factors is None else Amounts(profile, factors)
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


def by_beginning(task: str, words: Mapping[str, str], otherwise: str) -> str:
    """The value of the first of ``words`` that the name of a ``task`` begins with, or ``otherwise``."""
    return next((what for begin, what in words.items() if task.startswith(begin)), otherwise)


def bounds(kind: Kind) -> dict[str, float]:
    """What a step is bound by, with shares of the critical path, the largest first."""
    found: dict[str, float] = defaultdict(float)
    for task, seconds in kind.walked.critical.items():
        found[by_beginning(task, _BOUNDS, "Python")] += seconds
    whole = max(sum(found.values()), 1e-12)
    return {what: found[what] / whole for what in sorted(found, key=lambda what: -found[what])}


def judge(
    candidate: Candidate, facts: Facts, machine: Machine, paper: Paper, network: Emulation | None = None
) -> Judged:
    """The prediction for a recipe; ``network``: as in ``predicted``."""
    whole, _ = machine.plain(paper)
    prediction = predicted(candidate, facts, machine, paper, network)
    part = 0.0
    for kind in prediction.kinds:
        # The share of the critical path that is not in the resident step.
        critical = kind.walked.critical
        known = sum(seconds for name, seconds in critical.items() if name.partition(",")[0] in whole.tasks)
        part += kind.phase.share * (1 - known / max(sum(critical.values()), 1e-12))
    step = (whole.step.high - whole.step.low) / (2 * whole.step.seconds)
    return Judged(prediction, machine.spread * part, step * (1 - part))


def predicted(
    candidate: Candidate, facts: Facts, machine: Machine, paper: Paper, network: Emulation | None
) -> TieredPrediction:
    """``network``: that between the ranks of ``facts``, if they are on machines of their own."""
    stated, base, cores = candidate.stated, candidate.base, float(machine.profile.host.cores)
    if facts.trainers == 1:
        return predict_tiered(facts, stated, base, machine.moves, machine.plain(paper)[1], cores)
    threads = machine.amounts.threads
    if network is None:
        # torchrun gives each rank of a machine one thread, unless OMP_NUM_THREADS says how many.
        said = os.environ.get("OMP_NUM_THREADS", "1")
        threads = min(threads, int(said) if said.isdigit() and int(said) else 1)
        cores /= facts.trainers
    if candidate.shards:  # ranks keep different rows in their memory
        facts = facts.at(share=min(1.0, facts.trainers * facts.share))
    times, resident = machine.messages(facts.trainers), machine.of_rank(paper, threads)
    return predict_tiered(facts, stated, base, times, resident, cores, network)


def told_timeline(kind: Kind) -> list[dict[str, Any]]:
    """Some steps' tasks, with their seconds since the walk's begin."""
    return [
        {"place": span.task.place, "name": span.task.name, "start": span.start, "end": span.end}
        for span in kind.walked.timeline
    ]


def machine_profile(given: str | None, device: torch.device, ranks: int = 1) -> MachineProfile:
    """The profile in the file ``given``, of any machine; or this machine's, measured in the quick form if it
    is not known. A family that it lacks, or messages between so many ``ranks``, are measured, too."""
    host = Host.current(device)
    if given is not None:
        profile = MachineProfile.load(Path(given).expanduser())
        if profile.host.device != "cpu":
            raise UserError(
                f"advise.machine={given} is of a GPU ({profile.host.device}), and task=advise predicts "
                "training on a CPU: give the profile of a CPU, or predict a GPU on paper with task=scale"
            )
        lacking = [name for name in NEEDED if name not in profile.samples]
        lacking += [name for name in BESIDE if ranks > 1 and not profile.samples.get(name)]
        if lacking:
            raise UserError(
                f"advise.machine={given} lacks {', '.join(lacking)}: run recpipe perf calibrate on that "
                "machine once more"
            )
        return profile
    found, whole = own_profile(host), (*NEEDED, *BESIDE)
    if found is None or any(name not in found.samples for name in whole):
        log.info("measuring this machine once; recpipe perf calibrate does it more closely")
        found = calibrate(profile_path(host), quick=found is None or found.quick, only=whole)
    if ranks > 1 and not any(sample.at.get("ranks") == ranks for sample in found.samples[BESIDE[1]]):
        log.info("measuring messages between %d ranks once", ranks)
        found = with_ranks(profile_path(host), ranks, quick=found.quick)
    return found


def words(profile: MachineProfile, device: torch.device, given: str | None) -> str:
    """The profile's machine, and in what it is not this one."""
    host = profile.host
    text = f"{host.processor}, {host.instruction_set}, {host.threads} threads of {host.cores} cores"
    text += ", measured in the quick form" if profile.quick else ""
    if profile.disturbed:
        text += (
            f", while {next(iter(profile.disturbed.values()))} (not kept: measure it again when it is quiet)"
        )
    differences = Host.current(device).differs(host)
    if given is None or not differences:
        return text
    return f"{text}, from {given}, which is not this one ({'; '.join(differences)})"


def faster(profile: MachineProfile, what: str, times: float) -> MachineProfile:
    """``profile`` of a machine on which a family or a kind of its measurements, or ``DISK``, takes so many
    times less time."""
    parts = {family: samples for family, samples in profile.samples.items() if family != STEPS}
    kinds = {sample.kind for samples in parts.values() for sample in samples}
    known = [DISK, *parts, *sorted(kinds)]
    if what not in known:
        raise UserError(f"advise.what_if: {what} is nothing that is measured. {nearest_or_all(what, known)}")

    disk = {kind for kind in kinds if kind.startswith("ssd ") and not kind.endswith(" busy")}
    meant = disk if what == DISK else {what}
    found = {}
    for family, samples in profile.samples.items():
        found[family] = tuple(
            replace(each, seconds=each.seconds / times) if meant & {family, each.kind} else each
            for each in samples
        )
    return replace(profile, samples=found)
