"""What a user did before, event by event, and what it is compared with: found by the data's schema alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.errors import DataError, UserError, shown
from recpipe.models.parts import Places, width_of


@dataclass(frozen=True)
class Side:
    """Sequences of the same events, and the features that say the same of the target."""

    sequences: tuple[str, ...]
    targets: tuple[str, ...]
    length: int
    """The latest events that are looked at."""
    ages: tuple[int, ...] = ()
    """The columns of dense inputs that say how long ago each of these was; (): none do."""


@dataclass
class History:
    """The latest T events of B samples, and what they are compared with."""

    events: torch.Tensor
    """float32 [B, T, E], the latest last; 0 before the first."""
    present: torch.Tensor
    """Where there is an event, bool [B, T]."""
    target: torch.Tensor
    """float32 [B, E]."""
    ages: torch.Tensor | None = None
    """How many seconds before the sample each event was, float32 [B, T], -1 where there is none; None: it is
    not known, or was not asked for."""

    def at_every_position(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` [B, T, ...] of the P events that are there, [P, ...], sample by sample."""
        places = self.present.flatten().nonzero().squeeze(1)
        return values.flatten(0, 1).index_select(0, places)

    @property
    def following(self) -> torch.Tensor:
        """What came after each event: the next one, and the target after the last, float32 [B, T, E]."""
        return torch.cat([self.events[:, 1:], self.target.unsqueeze(1)], dim=1)


def sides_of(schema: Schema, length: int | None, model: str) -> list[Side]:
    """The sequences of ``schema`` that have targets, side by side until a table comes again: items and
    categories of what was clicked, and then of what was bought.

    ``length``: None: the ``max_length`` of the sequences. ``UserError``, naming the ``model``, if there is no
    sequence or no length.
    """
    groups: list[list[str]] = []
    for name in schema.targets:
        tables = [schema.table_of(other) for other in groups[-1]] if groups else []
        if not groups or schema.table_of(name) in tables:
            groups.append([])
        groups[-1].append(name)
    if not groups:
        raise UserError(
            f"model={model} compares a sequence with a target, and the data have none: name a feature whose "
            "table another feature shares, as in {name: items, kind: sequence, table: item}"
        )
    longest = {feature.name: feature.sequence or 0 for feature in schema.sparse}
    sides = []
    for group in groups:
        own = length or max(longest[name] for name in group)
        if not own:
            raise UserError(
                f"model={model}: how many of the latest events of {shown(group[0])} are looked at? State its "
                "max_length in data.features, or model.history=20"
            )
        ages = next((found for name in group if (found := schema.ages_of(name))), ())
        if ages and len(ages) < own:
            raise UserError(
                f"model={model}: {own} of the latest events of {shown(group[0])} are looked at, and "
                f"the ages of {len(ages)} are known: state size: {own} of these in data.features, or "
                f"model.history={len(ages)}"
            )
        sides.append(Side(tuple(group), tuple(schema.targets[name] for name in group), own, ages[-own:]))
    return sides


class Histories(nn.Module):
    """Looks up the rows of sequences and their targets, side by side."""

    def __init__(self, collection: EmbeddingCollection, sides: Sequence[Side]) -> None:
        super().__init__()
        self.embedding_collection = collection
        self.sides = list(sides)
        self.widths = [collection.embedding_dim() * len(side.sequences) for side in sides]
        """Of each side's events."""
        self._ages = [Places(side.ages) for side in sides]

    def forward(
        self, sparse_features: KeyedJaggedTensor, dense_features: torch.Tensor | None = None
    ) -> list[History]:
        """One for each side; ``dense_features``: given for the ages of events."""
        rows = self.embedding_collection(sparse_features)
        found = [_history(rows, side) for side in self.sides]
        for ages, history in zip(self._ages, found, strict=True):
            if ages.count and dense_features is not None:
                history.ages = ages(dense_features)
        return found


def autoregressive(
    history: History,
    side: Side,
    sparse_features: KeyedJaggedTensor,
    query: torch.Tensor,
    candidate: torch.Tensor,
) -> dict[str, Any]:
    """What a retriever gives that is trained at every position of a history: ``query`` and ``candidate``
    [P, D], and of each position the ``sample`` int64 [P] and, under the targets' names, the ``ids`` int64 [P]
    of what came next.

    ``query``: after each event, ``candidate``: of what came after it, both [B, T, D].
    """
    size, length = history.present.shape
    samples = torch.arange(size, device=query.device).unsqueeze(1).expand(size, length)
    ids = {}
    for name, target in zip(side.sequences, side.targets, strict=True):
        own = sparse_features[name]
        events, _ = latest(own.values().unsqueeze(1), own.lengths(), length)
        next_ids = torch.cat([events[:, 1:, 0], sparse_features[target].values().unsqueeze(1)], dim=1)
        ids[target] = history.at_every_position(next_ids)
    return {
        "query": history.at_every_position(query),
        "candidate": history.at_every_position(candidate),
        "sample": history.at_every_position(samples),
        "ids": ids,
    }


def require_one_history(sides: Sequence[Side], retrieval: bool, model: str) -> None:
    """``UserError`` if a model cannot be trained at every position."""
    if not retrieval:
        raise UserError(
            "model.autoregressive=true trains vectors at each position of a history: set "
            "model.retrieval=true and model.loss=in_batch_softmax, too"
        )
    if len(sides) > 1:
        names = " and ".join(shown(side.sequences[0]) for side in sides)
        raise UserError(
            f"model={model}: model.autoregressive=true takes one history, and the data have those of "
            f"{names}: leave one out"
        )


def _history(rows: dict[str, JaggedTensor], side: Side) -> History:
    sequences = [rows[name] for name in side.sequences]
    lengths = sequences[0].lengths()
    # On a CPU alone: looking at a GPU's would wait for it.
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        for name, sequence in zip(side.sequences, sequences, strict=True):
            if not torch.equal(sequence.lengths(), lengths):
                raise DataError(
                    f"{shown(side.sequences[0])} and {shown(name)} have other numbers of ids in a sample, "
                    "and are taken for the same events: leave one out, or state the same max_length and "
                    "padding for both"
                )
        for name in side.targets:
            if rows[name].values().shape[0] != lengths.shape[0]:
                raise DataError(
                    f"{shown(name)} has several ids or none in a sample, and is the target that "
                    f"{shown(side.sequences[0])} is compared with: it must be of kind id"
                )
    events, present = latest(torch.cat([one.values() for one in sequences], dim=1), lengths, side.length)
    return History(events, present, torch.cat([rows[name].values() for name in side.targets], dim=1))


def latest(values: torch.Tensor, lengths: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last ``count`` rows of each sample, float32 [B, count, E], with zeros before the first; and where
    there is one, bool [B, count].

    ``values``: float32 [L, E], sample by sample; ``lengths``: of the samples, [B].
    """
    lengths = lengths.long()
    ends = lengths.cumsum(0)
    places = ends[:, None] - count + torch.arange(count, device=lengths.device)
    present = places >= (ends - lengths)[:, None]
    with_zero = F.pad(values, (0, 0, 1, 0))
    return with_zero[torch.where(present, places + 1, 0)], present


def up_to_each(present: torch.Tensor) -> torch.Tensor:
    """Which events each event sees, bool [B, T, T]: those of ``present`` [B, T] that are no later."""
    count = present.shape[1]
    no_later = torch.ones(count, count, dtype=torch.bool, device=present.device).tril()
    return present.unsqueeze(1) & no_later


class Context(nn.Module):
    """What else is known of a sample, side by side: dense features and the pooled rows of all other tables,
    if there are any."""

    def __init__(self, collection: EmbeddingBagCollection | None, num_dense_features: int) -> None:
        super().__init__()
        self.embedding_bag_collection = collection
        self.width = num_dense_features + (0 if collection is None else width_of(collection))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """float32 [B, width]."""
        if self.embedding_bag_collection is None:
            return dense_features
        return torch.cat([dense_features, self.embedding_bag_collection(sparse_features).values()], dim=1)
