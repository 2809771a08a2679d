"""What requests look like apart from their values: most look like one that has come before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe_serve.batching.scorer import Side

Array = NDArray[Any]


class FeatureBags(NamedTuple):
    """What a request has of one feature."""

    ids: Array
    """int64, one sample's after the other's."""
    lengths: Array | int
    """How many ids each sample has, or all of them."""
    samples: int
    weights: Array | None = None
    """float32, of the ids."""


class Form:
    """The samples of a request, and how many ids of which feature each of them has.

    ``samples``: N; ``bags``: of each feature, N or 1; ``lengths``: of each feature, how many ids each of its
    bags has, or all of them. A request's ids are kept by feature, first of those that its samples share.
    """

    def __init__(self, samples: int, bags: Sequence[int], lengths: Sequence[Array | int]) -> None:
        self.samples, self.bags, self.lengths = samples, bags, lengths
        every = range(len(bags))
        self.shared = tuple(f for f in every if bags[f] == 1 and samples > 1)
        """Features of which the samples share one bag."""
        self.order = self.shared + tuple(f for f in every if f not in self.shared)
        """All features, as the ids are kept."""
        ids = [
            n * own if isinstance(own, int) else int(own.sum()) for n, own in zip(bags, lengths, strict=True)
        ]
        self.counts = np.array([ids[f] for f in self.order])
        """How many ids the features have, in this order."""
        ends = np.cumsum(self.counts).tolist()
        self.slices = {f: slice(end - ids[f], end) for f, end in zip(self.order, ends, strict=True)}
        """Where the ids of each feature are."""
        self.limits: Array | None = None
        """What each id must be below, uint64; set by ``Features``, which knows the tables."""
        self.single = all(isinstance(own, int) and own == 1 for own in lengths)
        """Whether there is one id in each bag."""
        self._parts: dict[int, Form] = {}

    def part(self, places: Array) -> Form:
        """The form of these of its samples, int64 [M]."""
        found = self._parts.get(len(places))
        if found is None:
            bags = [min(own, len(places)) if own == self.samples else own for own in self.bags]
            lengths = [
                own if isinstance(own, int) or self.bags[f] == 1 else own[places]
                for f, own in enumerate(self.lengths)
            ]
            found = Form(len(places), bags, lengths)
            if all(isinstance(own, int) for own in lengths):
                self._parts[len(places)] = found
        return found


@dataclass(eq=False, slots=True)
class Asked:
    """The inputs of one request of N samples, and what its batcher knows of it while it waits."""

    dense: Array
    """float32 [N, D]."""
    ids: Array
    """int64, as the form says."""
    form: Form
    rows: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """The raw values that these are of, if they came so."""
    keys: Array | None = field(default=None, repr=False)
    """The ids as they came, if some of them are keys."""
    weights: Array | None = field(default=None, repr=False)
    """float32, of the ids; None: they have none."""
    taught: Callable[..., None] | None = field(default=None, repr=False)
    """Called with what learns, what its effects see of these samples, and the model's own logits, if they are
    labelled events and not a request for scores (``Corrected``)."""
    done: Callable[[Array | Exception], None] = field(init=False)
    """Called with its scores, or with why there are none."""
    since: float = field(init=False)
    """When it came, by ``monotonic``."""
    until: float = field(init=False)
    """When it is refused if it still waits."""
    level: int = 1
    """Its priority: those of lower numbers are scored first."""
    ticket: Any = field(default=None, repr=False)
    """By which what stands in front of the model knows it again (``AnswerServer``)."""
    span: Any = field(default=None, repr=False)
    """Of OpenTelemetry (``Spans.begin``); None: it is not traced."""
    lacking: str = ""
    """What other rows stood for those of, in its scores; mostly nothing."""
    whole: Asked | None = field(default=None, repr=False)
    """The request of which these are the samples that are not answered yet; None: these are all."""
    alone: bool = False
    """Whether it is scored in a batch of its own, since one with others failed."""
    samples: int = field(init=False)
    """N."""

    def __post_init__(self) -> None:
        self.samples = self.form.samples

    def part(self, places: Array) -> Asked:
        """The same request for these of its samples alone, ``places`` int64 [M], ascending, M > 0."""
        form = self.form.part(places)
        pieces = [self._places(feature, places) for feature in form.order]
        taken = slice(0, 0) if not pieces else np.concatenate(pieces)
        return Asked(
            self.dense[places],
            self.ids[taken],
            form,
            [self.rows[place] for place in places.tolist()] if self.rows else (),
            None if self.keys is None else self.keys[taken],
            None if self.weights is None else self.weights[taken],
        )

    def _places(self, feature: int, places: Array) -> Array:
        """Where the ids of a feature are of these samples."""
        form, own = self.form, self.form.slices[feature]
        lengths, bags = form.lengths[feature], form.bags[feature]
        if bags == 1:
            return np.arange(own.start, own.stop)
        if isinstance(lengths, int):
            each: Array = own.start + places[:, None] * lengths + np.arange(lengths)
            return each.reshape(-1)
        starts, counts = own.start + np.cumsum(lengths) - lengths, lengths[places]
        begins = starts[places] - (np.cumsum(counts) - counts)
        found: Array = np.repeat(begins, counts) + np.arange(counts.sum())
        return found

    def bags(self, feature: int, of_each: bool = False, keyed: bool = False) -> FeatureBags:
        """What the request has of a feature: N bags, or one that all samples share, which is repeated if bags
        ``of_each`` sample are asked for; ``keyed``: with the ids as they came."""
        form, given = self.form, self.keys if keyed and self.keys is not None else self.ids
        ids, lengths, bags = given[form.slices[feature]], form.lengths[feature], form.bags[feature]
        weights = None if self.weights is None else self.weights[form.slices[feature]]
        if of_each and bags != form.samples:
            if not isinstance(lengths, int):
                lengths = np.tile(lengths, form.samples)
            weights = None if weights is None else np.tile(weights, form.samples)
            return FeatureBags(np.tile(ids, form.samples), lengths, form.samples, weights)
        return FeatureBags(ids, lengths, bags, weights)


def together(asked: Sequence[Asked]) -> tuple[torch.Tensor, list[Side]]:
    """All samples of these requests in their order: dense float32 [B, D], and the ids (``sides_of``)."""
    return torch.from_numpy(np.concatenate([one.dense for one in asked])), sides_of(asked)


def sides_of(asked: Sequence[Asked]) -> list[Side]:
    """The ids of all samples of these requests in their order.

    Features that the samples of every request share make a side with one bag a request.
    """
    first = asked[0].form
    alike = all(one.form.single and one.form.shared == first.shared for one in asked)
    if alike and asked[0].weights is None:
        return _of_singles(asked, len(first.shared))
    every = range(len(first.order))
    shared = [f for f in every if all(one.form.bags[f] == 1 for one in asked)]
    if all(one.samples == 1 for one in asked):
        shared = []  # a bag a request is a bag a sample
    own = [f for f in every if f not in shared]
    sides = []
    if shared:
        sides.append(
            _side(shared, [one.bags(f) for f in shared for one in asked], len(asked), _places(asked))
        )
    if own:
        samples = sum(one.samples for one in asked)
        sides.append(_side(own, [one.bags(f, True) for f in own for one in asked], samples))
    return sides


def _of_singles(asked: Sequence[Asked], shared: int) -> list[Side]:
    """``sides_of`` requests with one id in each bag, of which the first ``shared`` features are shared."""
    order, sides, single = asked[0].form.order, [], len(asked) == 1
    if shared:
        users = asked[0].ids[:shared] if single else np.stack([one.ids[:shared] for one in asked], axis=1)
        ids = torch.from_numpy(users.reshape(-1))
        sides.append(Side(order[:shared], ids, None, len(asked), _places(asked)))
    if shared < len(order):
        own, samples = asked[0].ids[shared:], asked[0].samples
        if not single:
            own = np.concatenate([one.ids[shared:].reshape(-1, one.samples) for one in asked], axis=1)
            samples = own.shape[1]
        sides.append(Side(order[shared:], torch.from_numpy(own.reshape(-1)), None, samples))
    return sides


def _places(asked: Sequence[Asked]) -> torch.Tensor:
    """The request of each sample."""
    if len(asked) == 1:
        return _zeros(asked[0].samples)
    return torch.from_numpy(np.repeat(np.arange(len(asked)), [one.samples for one in asked]))


@lru_cache(64)
def _zeros(samples: int) -> torch.Tensor:
    return torch.zeros(samples, dtype=torch.int64)


def _side(
    features: Sequence[int], bags: Sequence[FeatureBags], count: int, of_sample: torch.Tensor | None = None
) -> Side:
    ids = np.concatenate([own.ids for own in bags])
    lengths = np.empty(len(features) * count, np.int64)
    end = 0
    for own in bags:
        lengths[end : end + own.samples] = own.lengths
        end += own.samples
    weights = [own.weights for own in bags if own.weights is not None]
    return Side(
        tuple(features),
        torch.from_numpy(ids),
        torch.from_numpy(lengths),
        count,
        of_sample,
        torch.from_numpy(np.concatenate(weights)) if weights else None,
    )
