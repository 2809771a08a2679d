"""The versions of a served package: two scorers of it, of which one answers while the other is brought to the
version that comes next, and then takes its place between two batches.

A batch is scored by one scorer from its lookups to its last layer, and a scorer is changed while it does not
answer. So no row is torn, and no answer has rows of one version and a dense part of another. Both map the
package's files: what differs from these are the pages with changed rows, of which each has its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from recpipe.answers.apply import require_replaceable, same_bits
from recpipe.answers.delta import Delta, Version, with_ids
from recpipe.answers.score import PackageError, RowMap, Scorer, Tables, row_bytes, tensors
from recpipe.errors import UserError

AT_ONCE = 4096
"""Rows that are written before others have their turn on the core."""
PAUSE = 5e-4
"""Seconds in which they may."""


class Coefficients(NamedTuple):
    """Rows of an effect."""

    rows: torch.Tensor
    """int64 [n]."""
    keys: torch.Tensor
    """Their entities, int64 [n]."""
    means: torch.Tensor
    """float64 [n, D]."""
    used: int
    """How many rows the effect has."""


@dataclass(frozen=True)
class Step:
    """What brings a scorer from one version to the next one, or back. ``rows``: by table ids int64 [n] and
    rows uint8 [n, bytes]; ``maps``: by the manifest's names; ``dense``: parameters by name; ``effects``: by
    the number of an effect what ``Effects.take`` takes."""

    rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    maps: Mapping[str, RowMap]
    dense: Mapping[str, torch.Tensor]
    effects: Mapping[int, Coefficients] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        own = [each for pair in self.rows.values() for each in pair]
        own += [each for found in self.maps.values() for each in (found.keys, found.rows)]
        own += [each for found in self.effects.values() for each in found[:3]]
        return sum(each.nbytes for each in (*own, *self.dense.values()))


class FreshScorer(Scorer):
    """A ``Scorer`` of the package ``directory``, whose rows, ids and parameters can be changed while it does
    not score."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, mapped=True)
        pruned = [name for name in self.manifest["tables"] if name in self.tables.places]
        if pruned:
            raise PackageError(
                f"{directory}: rows of table '{pruned[0]}' are left out (pruned), and a delta may bring "
                "some: serve it without follow=, or quantize without pruning"
            )
        self.parameters = {
            name: value for program in self.programs for name, value in program.constants.items()
        }
        files = {program["constants"] for program in self.manifest["programs"]} - {None}
        for file in files:  # those that no program takes are known, too
            self.parameters = tensors(directory / file) | self.parameters
        self.named_maps = {
            about["map"]: self.maps[place]
            for place, about in enumerate(self.manifest["sparse"])
            if "map" in about
        }

    def make_tables(self) -> Tables:
        """All tables, mapped, with pages of their own where they are written to."""
        return Tables(self.directory, self.manifest["tables"], True, True)

    def rows_of_table(self, name: str) -> torch.Tensor:
        """The rows of a table in the buffer, uint8 [rows, bytes]."""
        about = self.manifest["tables"][name]
        width = row_bytes(about)
        return self.tables.rows[self.tables.starts[name] :][: about["rows"] * width].view(-1, width)

    def before(self, step: Step) -> Step:
        """What undoes ``step``."""
        rows = {name: (ids, self.rows_of_table(name)[ids]) for name, (ids, _) in step.rows.items()}
        maps = {name: self.named_maps[name] for name in step.maps}
        dense = {name: self.parameters[name] for name in step.dense}
        return Step(
            rows, maps, dense, {n: self._coefficients(n, own.rows) for n, own in step.effects.items()}
        )

    def _coefficients(self, number: int, rows: torch.Tensor) -> Coefficients:
        """Those of ``rows`` of an effect, as far as it has them."""
        assert self.effects is not None, "the delta fits"
        means, keys = self.effects.each[number][-1], self.effects.keys[number]
        rows = rows[rows < len(means)]
        return Coefficients(rows, keys[rows], means[rows], len(means))

    def take(self, step: Step) -> None:
        """Change to what ``step`` leads to."""
        for name, (ids, rows) in step.rows.items():
            there = self.rows_of_table(name)
            for start in range(0, len(ids), AT_ONCE):
                own = slice(start, start + AT_ONCE)
                there.index_copy_(0, ids[own], rows[own])
                if start:
                    time.sleep(PAUSE)
        self.named_maps |= step.maps
        sparse = enumerate(self.manifest["sparse"])
        self.maps = {place: self.named_maps[f["map"]] for place, f in sparse if "map" in f}
        for number, coefficients in step.effects.items():
            assert self.effects is not None, "the delta fits"
            self.effects.take(number, *coefficients)
        if step.dense:
            self.parameters |= step.dense
            for program in self.programs:
                program.use(self.parameters)


@dataclass
class Kept:
    """A version that can be served: what it is ``of``, its delta's ``time`` (None: of the package itself) and
    figures of training, why it must not answer (None: it may), and the steps to it and back from it; None
    where there is none."""

    of: Version
    time: float | None = None
    progressive: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    refused: str | None = None
    forward: Step | None = None
    backward: Step | None = None


@dataclass
class Versions:
    """The versions of the package ``directory`` that are kept, at most ``most``, and its two scorers."""

    directory: Path
    most: int
    kept: list[Kept] = field(init=False)
    """In their order; deltas lead from one to the next."""
    served: int = field(default=0, init=False)
    """The place in ``kept`` of the version that answers."""

    def __post_init__(self) -> None:
        self.scorers = [FreshScorer(self.directory) for _ in range(2)]
        self.front = 0
        self._at = [0, 0]
        first = self.scorers[0]
        self.kept = [Kept(Version.of_package(self.directory, first.manifest))]

    @property
    def answering(self) -> FreshScorer:
        """The scorer that answers."""
        return self.scorers[self.front]

    @property
    def waiting(self) -> FreshScorer:
        """The other one."""
        return self.scorers[1 - self.front]

    @property
    def version(self) -> Kept:
        """The version that answers."""
        return self.kept[self.served]

    def add(self, delta: Delta) -> None:
        """Read ``delta``, which follows the latest version, and bring the waiting scorer there; ``UserError``
        if it does not fit, and nothing has changed then."""
        latest = self.kept[-1]
        latest.of.require_next(delta)
        self.move(len(self.kept) - 1)
        scorer = self.waiting
        step = self._step_of(delta, scorer)
        back = scorer.before(step)
        told = delta.content
        figures = told.get("progressive", {})
        self.kept.append(Kept(delta.version, told["time"], figures, None, step, back))
        self.move(len(self.kept) - 1)

    def _step_of(self, delta: Delta, scorer: FreshScorer) -> Step:
        """What ``delta`` changes, in memory: its files may go."""
        manifest = scorer.manifest
        delta.require_one_kind(manifest)
        dense = delta.dense(scorer.parameters)
        held = scorer.parameters
        moved = {name: v.clone() for name, v in dense.items() if not same_bits(v, held[name])}
        if any(not moved.keys() <= program.constants.keys() for program in scorer.programs):
            require_replaceable(manifest, self.directory, moved)
        rows = {name: (ids.clone(), own.clone()) for name, ids, own in delta.rows(manifest)}
        maps = {}
        for name, keys, own in delta.ids(manifest):
            before = scorer.named_maps[name]
            maps[name] = RowMap(*with_ids(before.keys, before.rows, keys, own))
        numbers = {about["entity"]: n for n, about in enumerate(manifest.get("effects", ()))}
        effects = {}
        for entity, learnt in delta.coefficients(manifest):
            given = learnt.rows, learnt.records[:, 0], learnt.parts["means"]
            ids, keys, means = (torch.from_numpy(each.copy()) for each in given)
            effects[numbers[entity]] = Coefficients(ids, keys, means, learnt.used)
        return Step(rows, maps, moved, effects)

    def move(self, place: int) -> None:
        """Bring the waiting scorer to the version at ``place``."""
        waits = 1 - self.front
        at, scorer = self._at[waits], self.scorers[waits]
        while at != place:
            step = self.kept[at + 1].forward if at < place else self.kept[at].backward
            assert step is not None, "it has been read"
            scorer.take(step)
            at += 1 if at < place else -1
            self._at[waits] = at

    def swap(self) -> None:
        """Let the waiting scorer answer from now on; between two batches."""
        self.front = 1 - self.front
        self.served = self._at[self.front]

    def changed_since(self, place: int) -> dict[int, torch.Tensor] | None:
        """By the places of features the rows int64 [n] by which the version that answers differs from the
        earlier one at ``place``; None if it is no earlier one, or differs in more than rows."""
        kept = self.kept[place + 1 : self.served + 1]
        steps = [one.forward for one in kept]
        if place > self.served or any(step is None or step.dense or step.maps for step in steps):
            return None
        names = [f["name"] for f in self.answering.manifest["sparse"]]
        tables = {t for step in steps if step is not None for t in step.rows}
        rows = {
            table: torch.cat([step.rows[table][0] for step in steps if step and table in step.rows])
            for table in tables
        }
        found: dict[int, list[torch.Tensor]] = {}
        for about in self.answering.manifest["lookups"]:
            for feature, table in about["parts"]:
                if table in rows:
                    found.setdefault(names.index(feature), []).append(rows[table])
        for n, about in enumerate(self.answering.manifest.get("effects", ())):
            own = [step.effects[n].keys for step in steps if step and n in step.effects]
            own += [
                one.backward.effects[n].keys for one in kept if one.backward and n in one.backward.effects
            ]
            if own:
                found.setdefault(names.index(about["entity"]), []).extend(own)
        if any("map" in self.answering.manifest["sparse"][place] for place in found):
            return None  # entities are keys there, and not rows
        return {feature: torch.from_numpy(np.unique(torch.cat(own))) for feature, own in found.items()}

    def forget(self) -> None:
        """Let versions go beyond ``most``, the oldest ones first, which both scorers have passed."""
        while len(self.kept) > self.most and min(self._at) > 0:
            self.kept.pop(0)
            self.kept[0].forward = self.kept[0].backward = None
            self._at = [at - 1 for at in self._at]
            self.served -= 1

    @property
    def nbytes(self) -> int:
        """Memory of the steps between versions."""
        steps = (step for one in self.kept for step in (one.forward, one.backward) if step is not None)
        return sum(step.nbytes for step in steps)


def require_followable(scorer: Scorer) -> None:
    """``UserError`` for packages whose other parts would not follow."""
    if "retrieval" in scorer.manifest and scorer.maps:
        raise UserError(
            f"{scorer.directory} finds candidates by ids that grow (rows: dynamic), whose rows would change "
            "under them: serve it without follow="
        )
