"""The recipes that fit a budget of memory, ranked by their predicted speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf
from statistics import median
from types import TracebackType
from typing import Any

import torch

from recpipe.backend.matmul import has_bfloat16_units
from recpipe.common.sizes import Amount
from recpipe.config.recipe import Recipe
from recpipe.config.task import AdviseConfig
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.perf.amounts import Amounts
from recpipe.perf.facts import Facts
from recpipe.perf.moves import MoveTimes
from recpipe.perf.predict import Prediction, predict_resident
from recpipe.perf.predict_tiered import Kind, TieredPrediction, predict_tiered, resident_steps
from recpipe.perf.profile import MachineProfile
from recpipe.perf.statements import RESIDENT
from recpipe.perf.tiered import Resident
from recpipe.setup.placing import Unplaced
from recpipe.tasks.advise_candidates import Candidate, candidates, command
from recpipe.tasks.advise_machine import DISK, faster
from recpipe.tasks.advise_model import Paper

IMAGINED = {DISK: 2.0, "gemm": 2.0}
"""What-ifs that are always told, beside more memory and bfloat16."""
MORE_MEMORY = 2.0
NOTHING = 1.01
"""What makes a recipe at most so many times as fast is no gain."""


class Machine:
    """What a machine's profile tells of times."""

    def __init__(self, profile: MachineProfile) -> None:
        self.amounts, self.moves = Amounts(profile), MoveTimes.of(profile)
        self.cores = profile.host.cores
        self.spread = median(model.spread for model in self.moves.models.values())
        """The relative error of a part of a tier's work."""
        self._plain: dict[Paper, tuple[Prediction, Resident]] = {}

    def plain(self, paper: Paper) -> tuple[Prediction, Resident]:
        """The step with all rows resident, of a batch and of any number of samples."""
        if paper not in self._plain:
            whole = predict_resident(paper.step(paper.samples), self.amounts)
            self._plain[paper] = whole, resident_steps(paper.step, self.amounts)
        return self._plain[paper]


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


class Adviser:
    """Judges recipes for one model, data and machine."""

    def __init__(
        self,
        cfg: Recipe,
        config: AdviseConfig,
        facts: Facts,
        profile: MachineProfile,
        dataset: Dataset,
        unplaced: Unplaced,
        device: torch.device,
    ) -> None:
        self.cfg, self.config, self.facts, self.profile = cfg, config, facts, profile
        self.dataset, self.device = dataset, device
        self.machine = Machine(profile)
        self.paper = Paper.of(cfg, dataset, unplaced, device)
        self._papers = [self.paper]

    def __enter__(self) -> Adviser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for paper in self._papers:
            paper.close()

    @property
    def _whole(self) -> int:
        return sum(group.rows * group.record_bytes for group in self.facts.groups)

    def all_in_memory(self) -> dict[str, Any]:
        """The speed with all rows in memory."""
        found = judge(Candidate("resident", RESIDENT), self.facts, self.machine, self.paper)
        seconds = found.seconds
        return {
            "step_seconds": seconds,
            "samples_per_second": self._speeds(seconds),
            "bound_by": _bound(found.main),
        }

    def unsure(self) -> list[str]:
        """What holds for all predictions."""
        found = list(self.machine.plain(self.paper)[0].notes)
        if self.profile.quick:
            found.append("the machine was measured in the quick form; recpipe perf calibrate is closer")
        found.append(
            "speeds are those of full caches; a short run, in which they fill, is slower. More ranks are not "
            "predicted"
        )
        return found

    def budget(self, amount: Amount, own: Sequence[str]) -> dict[str, Any]:
        """The recipes for a budget, the fastest first. ``own``: the user's overrides."""
        size = min(amount.of(self._whole), self._whole)
        facts = self.facts.at(share=size / self._whole)
        left_out: dict[str, str] = {}
        found = self._all(facts, left_out)
        plain = next(iter(found))
        seconds = {name: judged.prediction.step_seconds for name, (_, judged) in found.items()}
        chosen = [candidate for candidate, _ in found.values()]
        paying = [candidate.name for candidate in chosen if _pays(candidate, chosen, seconds)]
        order = sorted(paying, key=lambda name: seconds[name])
        exact = [name for name in order if not found[name][0].alters]
        recommended = exact[0] if NOTHING * seconds[exact[0]] < seconds[plain] else plain
        return {
            "bytes": size,
            "share": facts.share,
            "batch_size": facts.batch_size,
            "plain": plain,
            "recommended": recommended,
            "rows": [self._row(*found[name], found[plain][1], own, size) for name in order],
            "what_if": self._imagined(*found[recommended], facts),
            "left_out": left_out,
            "verified": None,
        }

    def short(self, budget: Mapping[str, Any], steps: int) -> dict[str, Judged]:
        """The predictions of a budget's recipes for runs of so many steps, which begin with empty caches."""
        facts = self.facts.at(share=budget["share"]).from_empty(steps)
        return {name: judged for name, (_, judged) in self._all(facts, {}).items()}

    def _all(self, facts: Facts, left_out: dict[str, str]) -> dict[str, tuple[Candidate, Judged]]:
        """All recipes by name, the plain one first; those that cannot be judged are put into ``left_out``."""
        found = {}
        for candidate in candidates(facts, left_out):
            try:
                judged = judge(candidate, facts, self.machine, self.paper)
            except UserError as error:
                left_out[candidate.name] = str(error)
            else:
                found[candidate.name] = candidate, judged
        return found

    def _speeds(self, seconds: Sequence[float]) -> list[float]:
        """Samples per second with the least and the most expected, of a step's seconds with theirs."""
        whole, least, most = (self.facts.batch_size / each for each in seconds)
        return [whole, most, least]

    def _row(
        self, candidate: Candidate, judged: Judged, plain: Judged, own: Sequence[str], size: int
    ) -> dict[str, Any]:
        prediction, kind = judged.prediction, judged.main
        seconds = judged.seconds
        return {
            "name": candidate.name,
            "step_seconds": seconds,
            "samples_per_second": self._speeds(seconds),
            "ratio": judged.ratio(plain),
            "rows_read": prediction.read,
            "memory": dict(prediction.memory),
            "memory_bytes": prediction.memory["resident"] + prediction.memory["beside"],
            "alters": candidate.alters,
            "because": f"{prediction.statement.why[:1].upper()}{prediction.statement.why[1:]}.",
            "unsure": prediction.statement.unsure,
            "bound_by": _bound(kind),
            "critical": dict(kind.walked.critical),
            "utilisation": dict(kind.walked.utilisation),
            "cores_busy": kind.walked.cores_busy,
            "timeline": told_timeline(kind),
            "command": command(own, candidate, size),
        }

    def _imagined(self, candidate: Candidate, judged: Judged, facts: Facts) -> list[dict[str, Any]]:
        """What would make a recipe faster, and how many times; what would not is left out, unless asked."""
        now = judged.prediction.step_seconds
        found = []

        def tell(what: str, asked: bool, facts: Facts, machine: Machine, paper: Paper) -> None:
            other = next(c for c in candidates(facts, {}) if c.name == candidate.name)
            then = judge(other, facts, machine, paper).prediction.step_seconds
            if asked or now / then > NOTHING:
                found.append({"what": what, "ratio": now / then})

        share = min(1.0, MORE_MEMORY * facts.share)
        if share > facts.share:
            what = f"{share / facts.share:.3g} times the memory"
            tell(what, False, facts.at(share=share), self.machine, self.paper)
        asked = self.config.what_if or {}
        for what, times in {**IMAGINED, **asked}.items():
            machine = Machine(faster(self.profile, what, times))
            tell(f"{times:g} times as fast {what}", what in asked, facts, machine, self.paper)
        half = self._in_bfloat16()
        if half is not None:
            tell("bfloat16 (alters rounding)", False, facts, self.machine, half)
        return found

    def _in_bfloat16(self) -> Paper | None:
        """The model in bfloat16, if it is not and the processor has units for it."""
        model = self.cfg.model
        if model.precision == "bfloat16" or not has_bfloat16_units():
            return None
        if len(self._papers) == 1:
            cfg = replace(self.cfg, model=replace(model, precision="bfloat16"))
            unplaced = Unplaced.of(cfg, self.dataset, self.device, None)
            self._papers.append(Paper.of(cfg, self.dataset, unplaced, self.device))
        return self._papers[1]


def judge(candidate: Candidate, facts: Facts, machine: Machine, paper: Paper) -> Judged:
    """The prediction for a recipe."""
    whole, resident = machine.plain(paper)
    prediction = predict_tiered(
        facts, candidate.stated, candidate.base, machine.moves, resident, machine.cores
    )
    step = (whole.step.high - whole.step.low) / (2 * whole.step.seconds)
    part = sum(kind.phase.share * _of_tiers(kind, whole) for kind in prediction.kinds)
    return Judged(prediction, machine.spread * part, step * (1 - part))


def told_timeline(kind: Kind) -> list[dict[str, Any]]:
    """Some steps' tasks, with their seconds since the walk's begin."""
    return [
        {"place": span.task.place, "name": span.task.name, "start": span.start, "end": span.end}
        for span in kind.walked.timeline
    ]


def _pays(candidate: Candidate, others: Iterable[Candidate], seconds: Mapping[str, float]) -> bool:
    """Whether a recipe with two plugins is faster than those with one of them; others are always told."""
    if len(candidate.plugins) < 2:
        return True
    parts = [
        seconds.get(o.name, inf) for o in others if o.plugins and o.plugins.keys() < candidate.plugins.keys()
    ]
    return seconds[candidate.name] * NOTHING < min(parts, default=inf)


def _bound(kind: Kind) -> str:
    """The task on the critical path that takes longest, and its share of the step."""
    critical = kind.walked.critical
    name = max(critical, key=lambda task: critical[task])
    return f"{name} {100 * critical[name] / sum(critical.values()):.0f}%"


def _of_tiers(kind: Kind, whole: Prediction) -> float:
    """The share of a step's critical path that is not in the resident step."""
    critical = kind.walked.critical
    known = sum(seconds for name, seconds in critical.items() if name.partition(",")[0] in whole.tasks)
    return 1 - known / max(sum(critical.values()), 1e-12)
