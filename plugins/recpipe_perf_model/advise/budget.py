"""The recipes that fit a budget of memory, ranked by their predicted speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any

import torch
from annotated_types import Interval, MinLen

from recpipe.backend.matmul import has_bfloat16_units
from recpipe.common.validation import Count, FilePath, Positive, Text
from recpipe.common.words import Amount, readable_bytes
from recpipe.config.recipe import Recipe
from recpipe.config.task import MOST_RANKS, TaskConfig
from recpipe.data.dataset import Dataset
from recpipe.distributed.ranks import Emulation
from recpipe.errors import UserError
from recpipe.setup.placing import Unplaced
from recpipe_perf_model.advise.candidates import Candidate, candidates
from recpipe_perf_model.advise.judged import (
    DISK,
    Judged,
    Machine,
    Paper,
    bounds,
    faster,
    judge,
    predicted,
    told_timeline,
)
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.machine import MachineProfile

IMAGINED = {DISK: 2.0, "gemm": 2.0}
"""What-ifs that are always told, beside more memory and bfloat16."""
MORE_MEMORY = 2.0
NOTHING = 1.01
"""What makes a recipe at most so many times as fast is no gain."""
LEAST = 0.05
"""The share of a step below which a bound is not told."""
NETWORK = Emulation(latency_us=100.0, gbit_per_s=10.0)
"""Between machines, if ``advise.network`` names no other."""


@dataclass(frozen=True)
class AdviseTask(TaskConfig):
    """``task`` of conf/task/advise.yaml; ``batches``: how many to read, from the start of training."""

    batches: Positive = 300


@dataclass(frozen=True)
class AdviseConfig:
    """``advise`` of conf/task/advise.yaml."""

    memory: Annotated[list[int | float | str], MinLen(1)]
    """Memory for table rows, each an amount as ``tiers.resident_bytes``."""
    machine: FilePath | None = None
    """A machine profile to use, also one of another machine; None: this machine's, measured if needed."""
    what_if: dict[Text, Annotated[float, Interval(gt=0, le=1000)]] | None = None
    """For a family of the profile's measurements, how many times as fast it is imagined to be."""
    ranks: Annotated[int, Interval(ge=1, le=MOST_RANKS)] = 1
    """Processes that train together; ``memory`` is that of each."""
    network: Emulation | None = None
    """The network between them, if each is on a machine of its own; None: they share this one."""
    verify: Count = 0
    """How many of the best recipes to run, beside the plain one."""
    steps: Positive | None = None
    """Steps of each of those runs; None: as many as batches were read."""
    repetitions: Positive = 3
    """How often each of them runs."""

    def amounts(self) -> list[Amount]:
        """``memory``, parsed."""
        return [Amount.parsed(text, "advise.memory") for text in self.memory]

    def __post_init__(self) -> None:
        self.amounts()  # refuses what is no amount


class Adviser:
    """Judges recipes for one model, data and machine. To be closed, which ends the threads of back ends."""

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
        self.whole = sum(group.rows * group.record_bytes for group in facts.groups)
        """Bytes of all rows."""
        self.machine = Machine(profile)
        self.paper = Paper.of(cfg, dataset, unplaced, device)
        self._half: Paper | None = None
        """The model in bfloat16, once it was asked for."""

    def close(self) -> None:
        """End the back ends' threads."""
        for paper in filter(None, (self.paper, self._half)):
            paper.backend.close()

    def all_in_memory(self) -> dict[str, Any]:
        """The speed with all rows in memory."""
        judged = min(
            (
                judge(each, self.facts, self.machine, self.paper, self.config.network)
                for each in candidates(self.facts.at(share=1.0), {})
                if not each.alters
            ),
            key=lambda each: each.prediction.step_seconds,
        )
        shares = bounds(judged.main).items()
        return {
            "step_seconds": judged.seconds,
            "samples_per_second": self._speeds(judged.seconds),
            "bound_by": ", ".join(f"{what} {100 * share:.0f}%" for what, share in shares if share >= LEAST),
        }

    def unsure(self) -> list[str]:
        """What holds for all predictions."""
        found = list(self.machine.plain(self.paper)[0].notes)
        if self.profile.quick:
            found.append("the machine was measured in the quick form; recpipe perf calibrate is closer")
        found.append("speeds are those of full caches; a short run, in which they fill, is slower")
        if self.config.ranks > 1:
            found.append(
                "ranks on this machine disturb each other and wait for the slowest as in a short benchmark"
            )
        return found

    def too_small(self, size: int) -> str | None:
        """Why so many bytes cannot be advised on; None: they hold rows of every group of tables."""
        share = size / self.whole
        group = next((g for g in self.facts.groups if int(share * g.rows) < 1), None)
        if group is None:
            return None
        return (
            f"advise.memory of {readable_bytes(size)} holds not even one row of {len(group.table_rows)} "
            f"tables, {group.record_bytes} bytes each with its state: it is left out; raise it"
        )

    def budget(self, size: int, own: Sequence[str]) -> dict[str, Any]:
        """The recipes for so many bytes, the fastest first. ``own``: the user's overrides."""
        facts = self.facts.at(share=size / self.whole)
        left_out: dict[str, str] = {}
        found = self._all(facts, left_out)
        plain = next(iter(found))
        seconds = {name: judged.prediction.step_seconds for name, (_, judged) in found.items()}
        order = []
        for name, (candidate, _) in found.items():
            # Two plugins are told if they are faster than each of them.
            names = candidate.plugins.keys()
            parts = [
                seconds[other] for other, (each, _) in found.items() if names > each.plugins.keys() > set()
            ]
            if len(names) < 2 or seconds[name] * NOTHING < min(parts, default=inf):
                order.append(name)
        order.sort(key=lambda name: seconds[name])
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
                judged = judge(candidate, facts, self.machine, self.paper, self.config.network)
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
        seconds, shares = judged.seconds, bounds(kind)
        most = next(iter(shares))
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
            "bound_by": f"{most} {100 * shares[most]:.0f}%",
            "bounds": shares,
            "critical": dict(kind.walked.critical),
            "utilisation": dict(kind.walked.utilisation),
            "cores_busy": kind.walked.cores_busy,
            "timeline": told_timeline(kind),
            "command": candidate.command(own, size, self.config.ranks, self.config.network is not None),
            "row": candidate.row(size, self.config.ranks),
        }

    def _imagined(self, candidate: Candidate, judged: Judged, facts: Facts) -> list[dict[str, Any]]:
        """What would make a recipe faster, and how many times; what would not is left out, unless asked."""
        now, found = judged.prediction.step_seconds, {}
        share = min(1.0, MORE_MEMORY * facts.share)
        if share > facts.share:
            then = self._best(candidate, facts.at(share=share), self.machine, self.paper)
            found[f"{share / facts.share:.3g} times the memory"] = now / then
        asked = self.config.what_if or {}
        for what, times in {**IMAGINED, **asked}.items():
            machine = Machine(faster(self.profile, what, times), self.machine.amounts.factors)
            found[f"{times:g} times as fast {what}"] = now / self._best(candidate, facts, machine, self.paper)
        told = {f"{times:g} times as fast {what}" for what, times in asked.items()}
        if facts.trainers == 1:
            more = self._another_rank(facts, now)
            told, found = told | more.keys(), found | more
        model = self.cfg.model
        if model.precision != "bfloat16" and has_bfloat16_units():
            if self._half is None:
                cfg = replace(self.cfg, model=replace(model, precision="bfloat16"))
                unplaced = Unplaced.of(cfg, self.dataset, self.device, None)
                self._half = Paper.of(cfg, self.dataset, unplaced, self.device)
            then = self._best(candidate, facts, self.machine, self._half)
            found["bfloat16 (alters rounding)"] = now / then
        gains = {what: ratio for what, ratio in found.items() if what in told or ratio > NOTHING}
        return [{"what": what, "ratio": ratio} for what, ratio in gains.items()]

    def _best(self, candidate: Candidate, facts: Facts, machine: Machine, paper: Paper) -> float:
        """The seconds of a recipe's step if ``facts`` held, on another machine or with another model."""
        offered = list(candidates(facts, {}))
        # Where all rows fit, no cache is offered: then the best of the plain recipes counts.
        same = [c for c in offered if c.name == candidate.name] or [c for c in offered if not c.plugins]
        return min(predicted(c, facts, machine, paper, self.config.network).step_seconds for c in same)

    def _another_rank(self, facts: Facts, now: float) -> dict[str, float]:
        """How many times as fast the best exact recipe of two ranks is as a step of ``now`` seconds: with the
        memory of ``facts`` shared by both on this machine, and with as much on each of two machines. Empty if
        the machine's profile lacks messages between ranks."""
        network = self.config.network or NETWORK
        wire = f"{network.latency_us:g} us" if network.latency_us else "no latency"
        wire += f" and {network.gbit_per_s:g} Gbit/s" if network.gbit_per_s else ""
        two = facts.at(trainers=2)
        here = two if facts.share >= 1 else two.at(share=facts.share / 2)
        places = {
            "2 ranks on this machine": (here, None),
            f"one more machine like this, {wire} away": (two, network),
        }
        found = {}
        for what, (over, between) in places.items():
            times: dict[str, float] = {}
            for candidate in candidates(over, {}):
                if candidate.alters:
                    continue
                try:
                    whole = predicted(candidate, over, self.machine, self.paper, between)
                except UserError:
                    continue
                times[candidate.name] = whole.step_seconds
            if times:
                best = min(times, key=lambda name: times[name])
                found[f"{what} ({best})"] = now / times[best]
        return found
