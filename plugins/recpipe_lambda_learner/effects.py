"""``Effect``: the coefficients of every value of one column, learnt from the events it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch
from annotated_types import MinLen
from numpy.typing import NDArray

from recpipe.common.loops import ALONE, Spread
from recpipe.common.validation import Text
from recpipe_lambda_learner.posterior import Events, Floats, Learning, Posteriors, unlearnt, updated

Entities = NDArray[np.int64]
"""int64 [N]: rows of the entity's table."""


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
    """What is believed of each entity seen so far. An entity has a row from its first event on; scores of
    others are 0.

    ``width``: D, inputs of an event.
    """

    def __init__(self, width: int, how: Learning, threads: Spread = ALONE) -> None:
        self.width, self.how, self._threads = width, how, threads
        self.believed = unlearnt(0, width, how)
        self.unsettled = 0
        """Updates that stopped before the minimum, since nothing held their coefficients."""
        self._known: Entities = np.empty(0, np.int64)
        """Entities in ascending order."""
        self._rows: Entities = np.empty(0, np.int64)
        """Their rows in ``believed``."""

    def __len__(self) -> int:
        return len(self._known)

    def scores(self, entities: Entities, inputs: Floats) -> Floats:
        """What is added to the fixed effect's logits: float64 [N], for ``inputs`` [N, D]."""
        rows = self._found(entities)
        means = self.believed.means[np.maximum(rows, 0)] if len(self) else np.zeros_like(inputs)
        added: Floats = np.where(rows >= 0, (means * inputs).sum(1), 0.0)
        return added

    def learn(
        self, entities: Entities, inputs: Floats, clicks: Floats, weights: Floats, offsets: Floats
    ) -> None:
        """Update the coefficients of all ``entities`` by their events, whose fixed logits (and other effects)
        are ``offsets``; all arrays are of length N, in the order of time."""
        self._meet(entities)
        rows = self._found(entities)
        order = np.argsort(rows, kind="stable")
        own, starts = np.unique(rows[order], return_index=True)
        ends = np.append(starts, len(rows))
        events = Events(inputs[order], clicks[order], weights[order], offsets[order], ends)
        prior = Posteriors(self.believed.means[own], self.believed.precisions[own])
        found, unsettled = updated(prior, events, self.how, self._threads)
        self.unsettled += unsettled
        for kept, new in zip(self.believed, found, strict=True):
            kept[own] = new

    def _found(self, entities: Entities) -> Entities:
        """The rows of ``entities``; -1: not seen."""
        if not len(self):
            return np.full(len(entities), -1)
        place = np.minimum(np.searchsorted(self._known, entities), len(self) - 1)
        return np.where(self._known[place] == entities, self._rows[place], -1)

    def _meet(self, entities: Entities) -> None:
        new = np.setdiff1d(entities, self._known)
        if not len(new):
            return
        place = np.searchsorted(self._known, new)
        rows = np.arange(len(self), len(self) + len(new))
        need = len(self) + len(new)
        self._known, self._rows = np.insert(self._known, place, new), np.insert(self._rows, place, rows)
        if need > len(self.believed.means):  # twice the room, so that growing costs a constant an entity
            room = max(need, 2 * len(self.believed.means))
            means, precisions = unlearnt(room - len(self.believed.means), self.width, self.how)
            self.believed = Posteriors(
                np.concatenate([self.believed.means, means]),
                np.concatenate([self.believed.precisions, precisions]),
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything learnt, for a checkpoint."""
        rows = np.argsort(self._rows)
        state = {"entities": self._known[rows]}
        state |= {name: each[: len(self)] for name, each in self.believed._asdict().items()}
        return {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in state.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up ``state_dict``'s state."""
        entities = state["entities"].numpy()
        self._rows = np.argsort(entities)
        self._known = entities[self._rows]
        self.believed = Posteriors(state["means"].numpy().copy(), state["precisions"].numpy().copy())


class Effects:
    """Several effects, each learning what the fixed effect and the others leave (coordinate order)."""

    def __init__(self, widths: Sequence[int], how: Learning, threads: Spread = ALONE) -> None:
        self.each = [Effect(width, how, threads) for width in widths]

    def scores(self, seen: Sequence[Seen]) -> list[Floats]:
        """What each effect adds to the logits of N events, of which it has ``seen`` its own: float64 [N]."""
        return [e.scores(own.entities, own.inputs) for e, own in zip(self.each, seen, strict=True)]

    def learn(self, seen: Sequence[Seen], clicks: Floats, weights: Floats, offsets: Floats) -> None:
        """Update one effect after the other by the same N events, whose fixed logits are ``offsets``."""
        parts = self.scores(seen)
        for number, (effect, own) in enumerate(zip(self.each, seen, strict=True)):
            others = sum((part for n, part in enumerate(parts) if n != number), np.zeros_like(offsets))
            effect.learn(own.entities, own.inputs, clicks, weights, offsets + others)
            parts[number] = effect.scores(own.entities, own.inputs)
