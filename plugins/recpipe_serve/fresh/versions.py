"""The versions of a served package: two scorers of it, of which one answers while the other is brought to the
version that comes next, and then takes its place between two batches.

A batch is scored by one scorer from its lookups to its last layer, and a scorer is changed while it does not
answer. So no row is torn, and no answer has rows of one version and a dense part of another. Both map the
package's files: what differs from these are the pages with changed rows, of which each has its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from time import monotonic
from typing import ClassVar

import numpy as np
import torch

from recpipe.answers.apply import fixed_in_code, packed_programs, require_replaceable, same_bits
from recpipe.answers.delta import Version, with_ids
from recpipe.answers.score import RowMap, Scorer, Tables, row_bytes, tensors
from recpipe.errors import UserError
from recpipe_serve.fresh.reading import Coefficients, ReadDelta, Reads

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Rows are copied by the longest of these that fits: the operators go through them value by value."""


Changed = Mapping[int, torch.Tensor] | None
"""By the places of features the rows int64 [n] in which two versions differ, of entities whose ids get rows
as they come the keys; None: they do in more."""


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


class Changing(Scorer):
    """A ``Scorer`` whose rows, ids and parameters can be changed while it does not score. ``UserError`` for
    a package in which they could not."""

    def begin(self) -> None:
        """Find what can be changed; once, after it has been loaded."""
        require_followable(self)
        self.parameters = {
            name: value for program in self.programs for name, value in program.constants.items()
        }
        files = {program["constants"] for program in self.manifest["programs"]} - {None}
        for file in files:  # those that no program takes are known, too
            self.parameters = tensors(self.directory / file) | self.parameters
        self.named_maps = {
            about["map"]: self.maps[place]
            for place, about in enumerate(self.manifest["sparse"])
            if "map" in about
        }

    def fixed_parameters(self) -> set[str]:
        """The parameters that no delta can replace."""
        if packed_programs(self.manifest):
            return {*self.parameters}
        if all(self.parameters.keys() <= program.constants.keys() for program in self.programs):
            return set()
        return set().union(*fixed_in_code(self.manifest, self.directory).values())

    def rows_of_table(self, name: str) -> torch.Tensor | None:
        """The rows of a table that are in memory as a whole, uint8 [rows, bytes]; None: its rows are kept
        otherwise."""
        about = self.manifest["tables"][name]
        width = row_bytes(about)
        return self.tables.rows[self.tables.starts[name] :][: about["rows"] * width].view(-1, width)

    def before(self, step: Step) -> Step:
        """What undoes ``step`` here."""
        rows = {}
        for name, (ids, _) in step.rows.items():
            there = self.rows_of_table(name)
            if there is not None:
                (words,) = in_words(there)
                rows[name] = ids, words.index_select(0, ids).view(torch.uint8)
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
            if there is not None:
                words, newer = in_words(there, rows)
                words.index_copy_(0, ids, newer)
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


class FreshScorer(Changing):
    """One that has all rows in memory, those of the package's files that have not changed mapped."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, mapped=True)
        self.begin()

    def make_tables(self) -> Tables:
        """All tables, mapped, with pages of their own where they are written to."""
        return Tables(self.directory, self.manifest["tables"], True, True)


def in_words(*rows: torch.Tensor) -> list[torch.Tensor]:
    """``rows`` uint8 [n, bytes] of one size as the longest words that fit all of them."""
    size = reduce(or_, (int(n) for r in rows for n in (r.shape[1], r.data_ptr(), r.storage_offset())))
    kind = next(kind for kind in WORDS if not size % kind.itemsize)
    return [each.view(kind) for each in rows]


@dataclass
class Kept:
    """A version that can be served: what it is ``of``, its delta's ``time`` (None: of the package itself) and
    figures of training, why it must not answer (None: it may), and the steps to it and back from it; None
    where there is none."""

    of: Version
    time: float | None = None
    """In seconds since 1970."""
    progressive: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    refused: str | None = None
    forward: Step | None = None
    backward: Step | None = None
    came: float = field(default_factory=monotonic)
    """When it came here, on a clock that nobody sets."""
    age: float = field(init=False)
    """How old it was then, in seconds; 0 where the clocks of two machines differ by more."""

    def __post_init__(self) -> None:
        self.age = 0.0 if self.time is None else max(0.0, time.time() - self.time)

    @property
    def seconds_old(self) -> float:
        """Its age; 0 for the package itself."""
        return 0.0 if self.time is None else self.age + monotonic() - self.came


@dataclass
class Versions:
    """The versions of the package ``directory`` that are kept, at most ``most``, and its two scorers.
    ``goes_back``: whether earlier ones may answer again; without, what leads back is not kept, but for the
    entities of effects, whose answers are others then (``changed``)."""

    directory: Path
    most: int
    goes_back: bool = True
    scores_before: ClassVar[bool] = True
    """Whether the waiting scorer can score as its version does before it answers."""
    kept: list[Kept] = field(init=False)
    """In their order; deltas lead from one to the next."""
    served: int = field(default=0, init=False)
    """The place in ``kept`` of the version that answers."""

    def __post_init__(self) -> None:
        self.scorers = self.made_scorers()
        self.front = 0
        self._at = [0, 0]
        first = self.scorers[0]
        self.kept = [Kept(Version.of_package(self.directory, first.manifest))]
        # Looked for now: it takes as long as a hundred requests.
        self._fixed = first.fixed_parameters()

    def made_scorers(self) -> Sequence[Changing]:
        """The two scorers."""
        return [FreshScorer(self.directory) for _ in range(2)]

    @property
    def answering(self) -> Changing:
        """The scorer that answers."""
        return self.scorers[self.front]

    @property
    def waiting(self) -> Changing:
        """The other one."""
        return self.scorers[1 - self.front]

    @property
    def version(self) -> Kept:
        """The version that answers."""
        return self.kept[self.served]

    def reader(self, reads: type[Reads], trust: Path | None) -> Reads:
        """What ``reads`` deltas of the package."""
        return reads(self.scorers[0].manifest, self.scorers[0].parameters, trust)

    def add(self, delta: ReadDelta) -> None:
        """Take ``delta``, which follows the latest version, and bring the waiting scorer there; ``UserError``
        if it does not follow, and nothing has changed then."""
        latest = self.kept[-1]
        latest.of.require_next(delta.of)
        self.move(len(self.kept) - 1)
        step = self._step_of(delta, self.waiting)
        back = self.before(step) if self.goes_back or step.effects else None
        told = delta.of.content
        figures = told.get("progressive", {})
        self.kept.append(Kept(delta.of.version, told["time"], figures, None, step, back))
        self.move(len(self.kept) - 1)

    def _step_of(self, delta: ReadDelta, scorer: Changing) -> Step:
        """What ``delta`` changes."""
        held = scorer.parameters
        moved = {name: v for name, v in delta.dense.items() if not same_bits(v, held[name])}
        if not self._fixed.isdisjoint(moved):
            require_replaceable(scorer.manifest, self.directory, moved)
        maps = {}
        for name, (keys, own) in delta.ids.items():
            before = scorer.named_maps[name]
            maps[name] = RowMap(*with_ids(before.keys, before.rows, keys, own))
        numbers = {about["entity"]: n for n, about in enumerate(scorer.manifest.get("effects", ()))}
        effects = {numbers[entity]: own for entity, own in delta.effects.items()}
        return Step(delta.rows, maps, moved, effects)

    def before(self, step: Step) -> Step:
        """What undoes ``step``, which follows the version of the waiting scorer."""
        return self.waiting.before(step)

    def move(self, place: int) -> None:
        """Bring the waiting scorer to the version at ``place``."""
        waits = 1 - self.front
        for step in self.path(self._at[waits], place):
            self.scorers[waits].take(step)
        self._at[waits] = place

    def path(self, start: int, end: int) -> list[Step]:
        """What leads from the version at ``start`` to the one at ``end``."""
        forwards = [one.forward for one in self.kept[start + 1 : end + 1]]
        backwards = [one.backward for one in self.kept[end + 1 : start + 1]]
        steps = [step for step in (*forwards, *backwards[::-1]) if step is not None]
        assert len(steps) == abs(end - start), "each has been kept"
        return steps

    def swap(self) -> None:
        """Let the waiting scorer answer from now on; between two batches."""
        self.front = 1 - self.front
        self.served = self._at[self.front]

    def settle(self) -> int:
        """Bring what answers to where it belongs, while it does; returns the bytes that were written to a
        disk."""
        return 0

    def changed(self, start: int, end: int) -> Changed:
        """By which rows the version at ``end`` differs from the earlier one at ``start``; None if that is no
        earlier one, or if it differs in more."""
        kept = self.kept[start + 1 : end + 1]
        steps = [one.forward for one in kept]
        if start > end or any(step is None or step.dense or step.maps for step in steps):
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
        if any("map" in self.answering.manifest["sparse"][place] for place in found):
            return None  # requests have keys there, and not rows
        for n, about in enumerate(self.answering.manifest.get("effects", ())):
            own = [step.effects[n].keys for step in steps if step and n in step.effects]
            own += [
                one.backward.effects[n].keys for one in kept if one.backward and n in one.backward.effects
            ]
            if own:
                found.setdefault(names.index(about["entity"]), []).extend(own)
        return {feature: torch.from_numpy(np.unique(torch.cat(own))) for feature, own in found.items()}

    def forget(self) -> list[Step | None]:
        """Let versions go beyond ``most``, the oldest ones first, which both scorers have passed. Returns
        their steps: to give their memory back takes a while, and is for a thread that has time."""
        gone: list[Step | None] = []
        while len(self.kept) > self.most and min(self._at) > 0:
            self.kept.pop(0)
            first = self.kept[0]
            gone += first.forward, first.backward
            first.forward = first.backward = None
            self._at = [at - 1 for at in self._at]
            self.served -= 1
        return gone

    @property
    def nbytes(self) -> int:
        """Memory of the steps between versions."""
        steps = (step for one in self.kept for step in (one.forward, one.backward) if step is not None)
        return sum(step.nbytes for step in steps)


def require_followable(scorer: Scorer) -> None:
    """``UserError`` for packages of which some parts would not follow."""
    pruned = [name for name in scorer.manifest["tables"] if name in scorer.tables.places]
    if pruned:
        raise UserError(
            f"{scorer.directory}: rows of table '{pruned[0]}' are left out (pruned), and a delta may bring "
            "some: serve it without follow=, or quantize without pruning"
        )
