"""``Effect``: the coefficients of every value of one column, learnt from the events it is in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import MinLen

from recpipe.common.loops import ALONE, Spread
from recpipe.common.validation import Text
from recpipe.tables.dynamic.loops import FIRST_ROW
from recpipe_lambda_learner.posterior import (
    Events,
    Floats,
    Learning,
    Posteriors,
    added,
    packed,
    unlearnt,
    unpacked,
    updated,
)
from recpipe_lambda_learner.rows import Entities, EntityRows, Keeping

MEANS, PRECISIONS = "means", "precisions"
IN_MEMORY = Keeping()


@dataclass(frozen=True)
class EffectConfig:
    """An element of ``lambda.effects``."""

    entity: Text
    """A sparse column with one id an event."""
    inputs: Annotated[list[Text], MinLen(1)]


class Seen(NamedTuple):
    """What one effect sees of N events."""

    entities: Entities
    inputs: Floats
    """float64 [N, D]."""


class Effect:
    """What is believed of each entity seen so far. An entity has a row from its first event on, until others
    need it that were seen since; scores of those without one are 0.

    One thread may learn while others ask for scores: these find an entity's coefficients before an update or
    after it, and nothing between.

    ``width``: D, inputs of an event.
    """

    def __init__(
        self, name: str, width: int, how: Learning, keeping: Keeping = IN_MEMORY, threads: Spread = ALONE
    ) -> None:
        self.name, self.width, self.how, self._threads = name, width, how, threads
        prior = unlearnt(1, width, how)
        first = {MEANS: prior.means[0], PRECISIONS: packed(prior.precisions)[0]}
        self.rows = EntityRows(name, first, keeping)
        self.unsettled = 0
        """Updates that stopped before the minimum, since nothing held their coefficients."""
        self.updates = 0
        """Of one entity by the events of one mini-batch."""
        self.noted: list[Entities] | None = None
        """Rows that were updated, if somebody asks for them; whoever does takes them away."""
        self._lock = threading.Lock()
        """Held while rows are looked up and moved, which is short beside finding a minimum."""

    def __len__(self) -> int:
        return len(self.rows)

    def scores(self, entities: Entities, inputs: Floats) -> Floats:
        """What is added to the fixed effect's logits: float64 [N], for ``inputs`` [N, D]."""
        found = np.zeros(len(entities))
        with self._lock:
            rows = self.rows.found(entities)
            known = np.flatnonzero(rows >= 0)
            own, which = np.unique(rows[known], return_inverse=True)
            means = self.rows.read(MEANS, own)
        found[known] = added(means[which], inputs[known])
        return found

    def evicts(self, entities: Entities) -> bool:
        """Whether learning these takes rows of others: more of them are new than there are free rows."""
        with self._lock:
            new = np.unique(entities[self.rows.found(entities) < 0])
        return len(new) > self.rows.free

    def learn(
        self, entities: Entities, inputs: Floats, clicks: Floats, weights: Floats, offsets: Floats
    ) -> Entities:
        """Update the coefficients of all ``entities`` by their events, whose fixed logits (and other effects)
        are ``offsets``; all arrays are of length N, in the order of time. Returns those whose coefficients
        are others now, int64 [n]: also of entities whose rows others have got."""
        with self._lock:
            rows, turn = self.rows.met(entities)
            order = np.argsort(rows, kind="stable")
            order = order[rows[order] >= 0]
            own, starts = np.unique(rows[order], return_index=True)
            precisions = unpacked(self.rows.read(PRECISIONS, own), self.width, self.how.precision)
            prior = Posteriors(self.rows.read(MEANS, own), precisions)
        gone: Entities = turn.before[turn.rows < turn.used, 0]
        if not len(own):
            return gone
        ends = np.append(starts, len(order))
        events = Events(inputs[order], clicks[order], weights[order], offsets[order], ends)
        after, unsettled = updated(prior, events, self.how, self._threads)
        with self._lock:
            self.rows.write(MEANS, own, after.means)
            self.rows.write(PRECISIONS, own, packed(after.precisions))
        if self.noted is not None:
            self.noted.append(own)
        self.unsettled += unsettled
        self.updates += len(own)
        return np.concatenate([entities[order[starts]], gone])

    def records(self, rows: Entities) -> Entities:
        """The entity of each of ``rows``, and the state that the map has of it, int64 [n, 2]; 0 of rows that
        are of no entity."""
        found: Entities = self.rows.map.content.records.reshape(-1, 2)[rows].copy()
        found[rows < FIRST_ROW] = 0
        return found

    def believed(self, entities: Entities) -> Posteriors:
        """What is believed of distinct ``entities``, which have been seen."""
        with self._lock:
            rows = self.rows.found(entities)
            precisions = unpacked(self.rows.read(PRECISIONS, rows), self.width, self.how.precision)
            return Posteriors(self.rows.read(MEANS, rows), precisions)


class Effects:
    """Several effects, each learning what the fixed effect and the others leave (coordinate order).

    ``widths``: D of each, by the name of its column.
    """

    def __init__(
        self,
        widths: dict[str, int],
        how: Learning,
        keeping: Keeping = IN_MEMORY,
        threads: Spread = ALONE,
    ) -> None:
        self.each: list[Effect] = []
        for number, (name, width) in enumerate(widths.items()):
            place = keeping.directory and keeping.directory / str(number)
            self.each.append(Effect(name, width, how, replace(keeping, directory=place), threads))

    def logits(self, seen: Sequence[Seen], offsets: Floats) -> Floats:
        """The fixed effect's logits ``offsets`` float64 [N] of N events, of which each effect has ``seen``
        its own, and what the effects add to them."""
        for effect, own in zip(self.each, seen, strict=True):
            offsets = offsets + effect.scores(*own)
        return offsets

    def evict(self, seen: Sequence[Seen]) -> bool:
        """Whether learning these takes rows of other entities."""
        return any(effect.evicts(own.entities) for effect, own in zip(self.each, seen, strict=True))

    def learn(self, seen: Sequence[Seen], clicks: Floats, weights: Floats, offsets: Floats) -> list[Entities]:
        """Update one effect after the other by the same N events, whose fixed logits are ``offsets``; by
        effect the entities whose coefficients are others now, int64 [n]."""
        changed = []
        parts = [effect.scores(*own) for effect, own in zip(self.each, seen, strict=True)]
        for number, (effect, own) in enumerate(zip(self.each, seen, strict=True)):
            others = sum((part for n, part in enumerate(parts) if n != number), np.zeros_like(offsets))
            changed.append(effect.learn(*own, clicks, weights, offsets + others))
            if number + 1 < len(parts):  # the others learn what it leaves
                parts[number] = effect.scores(*own)
        return changed

    @property
    def updates(self) -> int:
        """Of one entity by the events of one mini-batch."""
        return sum(effect.updates for effect in self.each)

    def save(self, directory: Path) -> None:
        """Write all that is believed into ``directory``."""
        for effect in self.each:
            effect.rows.save(directory)

    def load(self, directory: Path) -> None:
        """Take up what ``save`` wrote; ``UserError`` if it is damaged, or of other effects."""
        for effect in self.each:
            effect.rows.load(directory)

    def close(self) -> None:
        """Release memory and files."""
        for effect in self.each:
            effect.rows.close()
