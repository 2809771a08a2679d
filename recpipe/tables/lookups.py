"""The rows of a batch: looked up once, handed out to the model part by part, and updated once.

Each part of a batch gets leaves of the graph: its samples' rows, detached from the tables. When all parts
have been differentiated, one backward pass for each group and tier makes the fused update of the whole batch.
An update for each part would be wrong for every optimizer with state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.timing import phase
from recpipe.data.parts import in_order, without_weights
from recpipe.tables.beside import Beside
from recpipe.tables.front import BagFront, Front
from recpipe.tables.group_lookup import GroupLookup, Scale


class BatchLookups:
    """The rows of all fronts for one batch."""

    def __init__(self, groups: Mapping[Front, Sequence[GroupLookup]]) -> None:
        self.groups = groups
        self.cold_is_here = False
        self.attached = False
        """Whether the model's backward pass goes on to the update of the tables; the rows are then handed out
        once, for all samples."""
        self._ready: Future[None] = Future()

    @property
    def all(self) -> list[GroupLookup]:
        """All lookups, front by front and group by group."""
        return [lookup for lookups in self.groups.values() for lookup in lookups]

    def share(self) -> None:
        """Prepare for parts trained in several threads; called once rows are looked up."""
        for lookup in self.all:
            lookup.share()

    def look_up(
        self, wait: bool, shared: bool = False, beside: Beside | None = None, by_graph: bool = False
    ) -> None:
        """Look up the resident rows; with ``wait``, all rows, once they have arrived. ``shared``: parts will
        be trained in several threads. ``beside``, if given, looks groups up in parallel. ``by_graph``: leave
        to a graph what it can look up itself; ``look_up_left`` must follow if it does not."""
        try:
            with phase("embedding forward"):
                if wait or any(g.plan is not None and g.plan.fetches_residents for g in self.all):
                    for lookup in self.all:
                        lookup.arrive()
                if by_graph:
                    for lookup in self.all:
                        lookup.leave_to_graph(wait)
                here = [lookup for lookup in self.all if lookup.repeated is None]
                self._each([each.look_up_all if wait else each.look_up_warm for each in here], beside)
                self.cold_is_here = wait
                if shared:
                    self.share()
        except BaseException as fault:
            self._ready.set_exception(fault)
            raise
        self._ready.set_result(None)

    def _each(self, work: list[Callable[[], None]], beside: Beside | None) -> None:
        if beside is None or len(work) == 1:
            for own in work:
                own()
        else:
            beside.begin("look up", work)
            beside.finish()

    def look_up_left(self) -> None:
        """Look up what has been left to a graph, since none has trained the batch."""
        with phase("embedding forward"):
            for lookup in self.all:
                lookup.look_up_left()

    def wait_for_cold(self) -> None:
        """Block until the slabs hold this batch's rows, and look them up."""
        with phase("embedding forward"):
            for lookup in self.all:
                lookup.arrive()
            for lookup in self.all:
                lookup.look_up_cold()
            self.cold_is_here = True

    def part(self, ids: Mapping[Front, KeyedJaggedTensor], low: int, high: int) -> dict[Front, Part]:
        """What the fronts hand out for samples [low, high), which have these ``ids``."""
        return {front: Part(self, front, ids[front], low, high) for front in self.groups}

    def rows(self, front: Front, low: int, high: int) -> list[torch.Tensor]:
        """Leaves of each group for samples [low, high). If another thread is looking them up, waits for
        it."""
        self._ready.result()
        if self.attached:
            return [lookup.attached() for lookup in self.groups[front]]
        return [lookup.leaf(low, high) for lookup in self.groups[front]]

    def backward(self, alone: bool, scale: Scale = 1.0, beside: Beside | None = None) -> None:
        """Update the tables by the leaves' gradients times ``scale``. With ``beside``, begin the update
        there."""
        with phase("embedding backward and update"):
            if beside is not None:
                beside.begin("update", [partial(lookup.backward, alone, scale) for lookup in self.all])
                return
            for lookup in self.all:
                lookup.backward(alone, scale)


class Part:
    """A front's rows for some samples of a batch."""

    def __init__(
        self, lookups: BatchLookups, front: Front, ids: KeyedJaggedTensor, low: int, high: int
    ) -> None:
        self.lookups, self.front, self.ids = lookups, front, ids
        self.low, self.high = low, high
        self.leaves: list[torch.Tensor] | None = None

    def holds(self, sparse: KeyedJaggedTensor) -> bool:
        """Whether ``sparse`` has the ids of these samples."""
        return same_ids(sparse, self.ids, self.front)

    def each(self) -> list[tuple[GroupLookup, torch.Tensor]]:
        """The groups' lookups with the leaves that were handed out; empty before that."""
        return list(zip(self.lookups.groups[self.front], self.leaves or (), strict=False))

    def rows(self) -> list[torch.Tensor]:
        """The leaves; every call returns the same ones, so that their gradients add up."""
        if self.leaves is None:
            self.leaves = self.lookups.rows(self.front, self.low, self.high)
        return self.leaves


def same_ids(
    sparse: KeyedJaggedTensor, own: KeyedJaggedTensor, front: Front, by_weights: bool = True
) -> bool:
    """Whether ``front`` would look up the same rows with either of the two and, if it hands out sums by the
    batch's weights and ``by_weights``, make the same sums."""
    if sparse is own:
        return True
    if not set(front.features) <= set(sparse.keys()):
        return False
    by_weights &= isinstance(front, BagFront) and front.is_weighted() and not front.sums
    if not by_weights:
        own, sparse = without_weights(own), without_weights(sparse)
    elif any(w is None or w.requires_grad for w in (own.weights_or_none(), sparse.weights_or_none())):
        return False
    mine, theirs = (in_order(ids, front.features) for ids in (own, sparse))
    if by_weights and not torch.equal(mine.weights(), theirs.weights()):
        return False
    pairs = ((mine.lengths(), theirs.lengths()), (mine.values(), theirs.values()))
    return all(a is b or (a.shape == b.shape and bool((a == b).all())) for a, b in pairs)
