"""Reads a part of the training data once, and counts what predictions are to know of its ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import numpy as np

from recpipe.access.misses import SHARES, Curve, Followed
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.parts import leaves, tensors_in
from recpipe.errors import UserError
from recpipe.plugin.bags import IndexBags, RowIds
from recpipe.tables.inputs import Inputs
from recpipe_perf_model.facts.facts import NEVER, Facts, GroupFacts, Stretch
from recpipe_perf_model.facts.replay import MOST, KeptLookups

STRETCH = 24
"""How many consecutive batches' ids are kept in ``GroupFacts.stretch``."""


def collect(
    cfg: Recipe,
    dataset: Dataset,
    inputs: Inputs,
    batches: int,
    steps: int,
    progress: Callable[[int], None] = lambda done: None,
    followed: Sequence[Followed] | None = None,
) -> Facts:
    """The facts of a run of so many ``steps`` with the recipe's store and pipeline, from the first
    ``batches`` of the training data, which are read once.

    ``followed``: for each group what follows the same batches, if their miss rates are wanted beside.

    Caches are judged by the second half, when those that start empty have filled. ``UserError`` if there are
    fewer than four batches, or none looks anything up.
    """
    if batches < 4:
        raise UserError(
            f"{batches} batches are too few to learn from: lower data.batch_size, or give more data"
        )
    read = partial(dataset.batches, "train", cfg.data.batch_size)
    if followed is None:
        followed = [Followed(number, inputs, read, batches) for number in range(len(inputs.tables.groups))]
    groups = [_Counting(each, batches) for each in followed]
    size = 0
    for done, batch in zip(range(batches), read(), strict=False):
        if not size:
            tensors = [tensor for leaf in leaves(batch) for tensor in tensors_in(leaf)]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for number, own in enumerate(groups):
            own.add(inputs.bags(batch, number))
        progress(done + 1)
    if not any(group.rates.lru.lookups for group in groups):
        raise UserError("the batches that were read look nothing up: there is nothing to keep in tiers")
    return Facts(
        batch_size=cfg.data.batch_size,
        epoch_samples=dataset.size("train"),
        steps=steps,
        groups=tuple(group.facts() for group in groups),
        batch_bytes=size,
        store=cfg.tiers.store,
        prefetch=cfg.tiers.prefetch,
        emulation=cfg.tiers.emulate,
        seed=cfg.seed,
    )


class _Counting:
    """One group's lookups, as batches come."""

    def __init__(self, followed: Followed, batches: int) -> None:
        self.followed, self.group, self.learn = followed, followed.group, batches // 2
        self.rates = followed.together
        self._filled: dict[str, Curve] = {}
        """The curves when half of the batches were read."""
        self._learnt: list[RowIds] = []
        self._kept: list[IndexBags] = []
        self._read: list[IndexBags] = []
        """All batches' lookups, up to ``MOST``."""
        self._lookups = 0
        self._last: RowIds = np.empty(0, np.int64)
        self._repeated = 0
        self._batches = 0

    def add(self, bags: IndexBags) -> None:
        """Count a batch."""
        if self._batches == self.learn:
            self._filled = deepcopy({"lru": self.rates.lru, "lfu": self.rates.lfu})
        if self._batches < self.learn:
            self._learnt.append(bags.indices)
        elif len(self._kept) < STRETCH:
            self._kept.append(bags)
        self._lookups += len(bags.indices)
        if self._lookups <= MOST:
            # Numbers of 32 bits where these do, and offsets that are those of the batch before once.
            small = np.int32 if self.group.tables.layout.total_rows <= np.iinfo(np.int32).max else np.int64
            same = self._read and np.array_equal(self._read[-1].offsets, bags.offsets)
            offsets = self._read[-1].offsets if same else bags.offsets
            self._read.append(IndexBags(bags.indices.astype(small), offsets, bags.batch_size))
        else:
            self._read = []
        self.followed.add(bags)
        rows = np.unique(bags.indices)
        self._repeated += len(np.intersect1d(rows, self._last, assume_unique=True))
        self._last = rows
        self._batches += 1

    def facts(self) -> GroupFacts:
        """What was counted."""
        tables, rates = self.group.tables, self.rates
        points = np.searchsorted(self.followed.shares, SHARES)
        late = {name: getattr(rates, name).since(curve).at(points) for name, curve in self._filled.items()}
        judged = max(1, late["lru"].batches)
        return GroupFacts(
            table_rows=tuple(tables.layout.rows),
            dim=tables.dim,
            record_bytes=tables.record_bytes,
            features=len(tables.features),
            pooled=tables.pooled,
            width=tables.layout.width,
            lookups=late["lru"].lookups / judged,
            distinct=late["lru"].rows / judged,
            repeated=self._repeated / max(1, self._batches - 1),
            curves={**late, "hot": rates.hot.at(points)},
            windows=rates.windows()[0],
            stretch=self._stretch(),
            first={name: curve.at(points) for name, curve in self._filled.items()},
            kept=KeptLookups.of(self._read, tables.layout.bases) if self._read else None,
            frozen=tables.optimizer.frozen,
        )

    def _stretch(self) -> Stretch:
        """The kept batches' lookups, ranked by the counts before them."""
        known, counts = np.unique(np.concatenate(self._learnt), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        rank = np.empty(len(known), np.float32)
        rank[order] = np.arange(len(known)) / self.group.tables.layout.total_rows
        rows = np.concatenate([bags.indices for bags in self._kept])
        at = np.searchsorted(known, rows).clip(max=max(0, len(known) - 1))
        ranks = np.full(len(rows), NEVER, np.float32)
        if len(known):
            here = known[at] == rows
            ranks[here] = rank[at[here]]
        samples, before = [], 0
        for bags in self._kept:
            bag = np.repeat(np.arange(len(bags.offsets) - 1), np.diff(bags.offsets))
            samples.append(before + bag % max(1, bags.batch_size))
            before += bags.batch_size
        return Stretch(len(self._kept), np.concatenate(samples), rows, ranks)
