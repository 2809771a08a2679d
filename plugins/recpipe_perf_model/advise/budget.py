"""The recipes that fit a budget of memory, ranked by their predicted speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import TracebackType
from typing import Any

import torch

from recpipe.backend.matmul import has_bfloat16_units
from recpipe.common.words import Amount, readable_bytes
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.setup.placing import Unplaced
from recpipe_perf_model.advise.candidates import Candidate, candidates, command
from recpipe_perf_model.advise.config import AdviseConfig
from recpipe_perf_model.advise.judged import (
    Judged,
    Machine,
    all_bounds,
    another_rank,
    bound,
    bounds,
    judge,
    predicted,
    told_timeline,
)
from recpipe_perf_model.advise.machine import DISK, faster
from recpipe_perf_model.advise.model import Paper
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.machine import MachineProfile

IMAGINED = {DISK: 2.0, "gemm": 2.0}
"""What-ifs that are always told, beside more memory and bfloat16."""
MORE_MEMORY = 2.0
NOTHING = 1.01
"""What makes a recipe at most so many times as fast is no gain."""


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
        judged = min(
            (
                self._judged(each, self.facts)
                for each in candidates(self.facts.at(share=1.0), {})
                if not each.alters
            ),
            key=lambda each: each.prediction.step_seconds,
        )
        seconds = judged.seconds
        return {
            "step_seconds": seconds,
            "samples_per_second": self._speeds(seconds),
            "bound_by": all_bounds(bounds(judged.main)),
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

    def bytes_of(self, amount: Amount) -> int:
        """Those of an amount of memory, at most of all rows."""
        return min(amount.of(self._whole), self._whole)

    def too_small(self, size: int) -> str | None:
        """Why so many bytes cannot be advised on; None: they hold rows of every group of tables."""
        share = size / self._whole
        group = next((g for g in self.facts.groups if int(share * g.rows) < 1), None)
        if group is None:
            return None
        return (
            f"advise.memory of {readable_bytes(size)} holds not even one row of {len(group.table_rows)} "
            f"tables, {group.record_bytes} bytes each with its state: it is left out; raise it"
        )

    def budget(self, size: int, own: Sequence[str]) -> dict[str, Any]:
        """The recipes for so many bytes, the fastest first. ``own``: the user's overrides."""
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
                judged = self._judged(candidate, facts)
            except UserError as error:
                left_out[candidate.name] = str(error)
            else:
                found[candidate.name] = candidate, judged
        return found

    def _speeds(self, seconds: Sequence[float]) -> list[float]:
        """Samples per second with the least and the most expected, of a step's seconds with theirs."""
        whole, least, most = (self.facts.batch_size / each for each in seconds)
        return [whole, most, least]

    def _judged(self, candidate: Candidate, facts: Facts) -> Judged:
        return judge(candidate, facts, self.machine, self.paper, self.config.network)

    def _row(
        self, candidate: Candidate, judged: Judged, plain: Judged, own: Sequence[str], size: int
    ) -> dict[str, Any]:
        prediction, kind = judged.prediction, judged.main
        seconds, shares = judged.seconds, bounds(kind)
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
            "bound_by": bound(shares),
            "bounds": shares,
            "critical": dict(kind.walked.critical),
            "utilisation": dict(kind.walked.utilisation),
            "cores_busy": kind.walked.cores_busy,
            "timeline": told_timeline(kind),
            "command": command(own, candidate, size, self.config.ranks, self.config.network is not None),
            "row": candidate.row(size, self.config.ranks),
        }

    def _imagined(self, candidate: Candidate, judged: Judged, facts: Facts) -> list[dict[str, Any]]:
        """What would make a recipe faster, and how many times; what would not is left out, unless asked."""
        now = judged.prediction.step_seconds
        found = []

        def tell(what: str, asked: bool, facts: Facts, machine: Machine, paper: Paper) -> None:
            offered = list(candidates(facts, {}))
            # Where all rows fit, no cache is offered: then the best of the plain recipes counts.
            same = [c for c in offered if c.name == candidate.name] or [c for c in offered if not c.plugins]
            then = min(
                predicted(other, facts, machine, paper, self.config.network).step_seconds for other in same
            )
            if asked or now / then > NOTHING:
                found.append({"what": what, "ratio": now / then})

        share = min(1.0, MORE_MEMORY * facts.share)
        if share > facts.share:
            what = f"{share / facts.share:.3g} times the memory"
            tell(what, False, facts.at(share=share), self.machine, self.paper)
        asked = self.config.what_if or {}
        for what, times in {**IMAGINED, **asked}.items():
            machine = Machine(faster(self.profile, what, times), self.machine.amounts.factors)
            tell(f"{times:g} times as fast {what}", what in asked, facts, machine, self.paper)
        if facts.trainers == 1:
            network = self.config.network
            found += another_rank(
                facts,
                network,
                lambda other, over, between: (
                    predicted(other, over, self.machine, self.paper, between).step_seconds
                ),
                now,
            )
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


def _pays(candidate: Candidate, others: Iterable[Candidate], seconds: Mapping[str, float]) -> bool:
    """Whether a recipe with two plugins is faster than those with one of them; others are always told."""
    if len(candidate.plugins) < 2:
        return True
    parts = [
        seconds.get(o.name, inf) for o in others if o.plugins and o.plugins.keys() < candidate.plugins.keys()
    ]
    return seconds[candidate.name] * NOTHING < min(parts, default=inf)
