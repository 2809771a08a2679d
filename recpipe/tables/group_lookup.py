"""The rows of one group of tables for one batch: looked up once, handed out in parts, and updated once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import in_this_thread, one_thread
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.tables import TableSet
from recpipe.tables.capabilities import Planned, SendsAhead
from recpipe.tables.repeated import RepeatedLookup
from recpipe.tables.room import widened, with_room
from recpipe.tables.rowtable import row_bags
from recpipe.tables.tiers.placement import TierPlan

Scale = float | torch.Tensor
"""What a loss is multiplied by; a tensor of one value on a GPU."""
NO_ROWS = torch.empty(0)
"""In place of rows that have not been looked up; made once, since making it lets go of Python's lock."""


class GroupLookup:
    """The rows of one group for one batch."""

    def __init__(
        self,
        collection: TableCollection,
        ids: KeyedJaggedTensor,
        plan: TierPlan | None,
        sent: Any,
        tables: TableSet,
        room: int,
    ) -> None:
        self.collection, self.ids, self.plan, self.sent = collection, ids, plan, sent
        self.pooled, self.room = tables.pooled, room
        self.frozen = tables.optimizer.frozen
        """Whether nothing is updated: its rows are handed out without a graph."""
        self.warm = NO_ROWS
        self.cold: torch.Tensor | None = None
        self.repeated: RepeatedLookup | None = None
        """The lookup that has been left to a graph of kernels; None: it is made here."""
        self.updated = False
        """Whether a graph has made the update."""
        self.dim = 0
        """Columns in front of the rows, which belong to no feature."""
        self.kept: torch.Tensor | None = None
        """Gradients of all rows; parts that are trained in other threads put theirs here."""
        self._gradients: list[torch.Tensor] = []
        """The last entry is the gradient of all rows, with columns in front as ``warm`` has them; empty
        before the backward pass. It is a list so that a hook on the rows can fill it without a reference to
        this object, which would keep the rows alive."""
        self._roomy_gradients: list[torch.Tensor] = []
        """Gradients of leaves with room."""
        self._placed: set[tuple[int, int]] = set()
        self._given: list[tuple[int, int, torch.Tensor]] = []

    @property
    def _tiers(self) -> Planned:
        tiers = self.collection.offers(Planned)
        assert tiers is not None, "a plan was made"
        return tiers

    def arrive(self) -> None:
        """Wait for the rows that the batch needs."""
        if self.plan is not None:
            self._tiers.arrive()

    def leave_to_graph(self, wait: bool) -> None:
        """Leave the lookup to a graph, if that can make it: of all rows if ``wait``, else of the resident
        tier, which must then have them all."""
        if self.plan is not None and (wait or not len(self.plan.slab)):
            self.repeated = self._tiers.repeated(self.plan)

    def look_up_left(self) -> None:
        """Look up what has been left to a graph, since none has trained the batch."""
        if self.repeated is not None:
            self.repeated = None
            self.look_up_all()

    @property
    def form(self) -> Hashable:
        """What a graph fixes of the lookup, which has been made or left to it."""
        return (self.warm.shape, self.warm.dtype) if self.repeated is None else self.repeated.form

    def look_up_warm(self) -> None:
        """Look up what needs no waiting: all rows, or those of the resident tier."""
        if self.plan is not None:
            self.warm = self._tiers.lookup_resident(self.plan)
        elif self.sent is not None:
            self.warm = _finished(self.collection, self.sent)
        else:
            roomy = self.collection.pooled_with_room(self.ids) if self.room else None
            self.warm = self.collection.lookup(self.ids) if roomy is None else roomy
            self.dim = 0 if roomy is None else self.room
        if self.frozen:
            self.warm = self.warm.detach()

    def look_up_all(self) -> None:
        """Look up all rows, which have arrived."""
        both = None if self.plan is None else self._tiers.lookup_both(self.plan)
        if both is not None:
            self.warm = both.detach() if self.frozen else both
            return
        self.look_up_warm()
        self.look_up_cold()

    def look_up_cold(self) -> None:
        """Look up the slab's rows, after they have arrived."""
        if self.plan is not None and len(self.plan.slab):
            cold = self._tiers.lookup_slab(self.plan)
            self.cold = cold.detach() if self.frozen else cold

    # -- parts -------------------------------------------------------------------------------

    def share(self) -> None:
        """Prepare for parts trained in several threads, each of which stores its rows' gradient (``keep``).

        If the rows have room, gradients are stored in the rows' own memory: only the interaction has read it,
        and is done.
        """
        if self.pooled and self.kept is None and not self.frozen:
            self.kept = self.warm.data if self.dim else torch.empty_like(self.warm)

    def keep(self, low: int, high: int, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Store the gradient of ``leaf``, which has the rows of samples [low, high)."""
        if self.kept is None:
            leaf.grad = gradient
        else:
            self.kept[low:high, self.dim :] = gradient
            self._placed.add((low, high))

    def leaf(self, low: int, high: int) -> torch.Tensor:
        """The rows of samples [low, high) as a leaf of the graph, which requires a gradient unless they are
        frozen: [high - low, F * D], or one row for each id."""
        if self.dim:
            return self._roomy(low, high)
        rows = self._cut(self.warm.detach(), low, high)
        if self.cold is not None and low < high:
            first = self.plan.cold_first if self.plan is not None and self.pooled else 0
            if low >= first:
                rows = rows + self._cut(self.cold.detach(), low - first, high - first)
        leaf = rows.detach().requires_grad_(not self.frozen)
        self._given.append((low, high, leaf))
        return leaf

    def _roomy(self, low: int, high: int) -> torch.Tensor:
        """As ``leaf``, with room in front of the rows. Parts write there at the same time; ``.data`` keeps
        torch from treating this as a change of each other's rows."""
        leaf = with_room(self.warm.data[low:high], self.dim).requires_grad_(not self.frozen)
        if self.kept is None and not self.frozen:  # taken in a hook: ``leaf.grad`` is a copy without room
            leaf.register_hook(self._roomy_gradients.append)  # type: ignore[no-untyped-call]
        self._given.append((low, high, leaf))
        return leaf

    def whole(self) -> torch.Tensor:
        """The rows of all samples, in the graph: a backward pass through them updates the tables."""
        rows = self.warm if self.cold is None else self.warm + self.cold
        if rows.requires_grad:
            rows.register_hook(self._gradients.append)  # type: ignore[no-untyped-call]
        return rows

    def attached(self) -> torch.Tensor:
        """As ``leaf``, of all samples, but in the graph: the model's backward pass goes on to the update of
        the tables."""
        in_graph = self.warm.requires_grad and not self.dim
        return self.whole() if in_graph else self.leaf(0, self.ids.stride())

    def _cut(self, rows: torch.Tensor, low: int, high: int) -> torch.Tensor:
        if self.pooled:
            return rows if (low, high) == (0, len(rows)) else rows[low:high]
        parts = self._ids_between(low, high)
        return rows[slice(*parts[0])] if len(parts) == 1 else torch.cat([rows[slice(*p)] for p in parts])

    def _ids_between(self, low: int, high: int) -> list[tuple[int, int]]:
        """Where the ids of samples [low, high) begin and end, for each feature."""
        samples, keys = self.ids.stride(), len(self.ids.keys())
        if (low, high) == (0, samples):
            return [(0, self.ids.values().numel())]
        offsets = self.ids.offsets()
        return [
            (int(offsets[key * samples + low]), int(offsets[key * samples + high])) for key in range(keys)
        ]

    def backward(self, alone: bool, scale: Scale = 1.0) -> None:
        """Make one backward pass, and thus one fused update, for each tier.

        FBGEMM's CPU update enters a parallel region for every table, which costs more than the threads gain.
        If several ranks train, torch's own operators make the update.
        """
        if self.frozen or self.updated or self._gradients:  # by a graph, or by the model's backward pass
            return
        self.arrive()
        gradient = self._gradient()
        gradient = gradient if isinstance(scale, float) and scale == 1 else gradient * scale
        self._gradients = [gradient]
        with one_thread(wanted=alone and self.warm.device.type == "cpu"), in_this_thread():
            torch.autograd.backward(self.warm, gradient)
            if self.cold is not None:
                first = self.plan.cold_first if self.plan is not None and self.pooled else 0
                torch.autograd.backward(self.cold, gradient[first:].view(self.cold.shape))

    def gradient_of(self, tables: TableSet, rows: RowIds) -> torch.Tensor:
        """The contribution of these lookups to the gradients of distinct ``rows`` (sorted), float32 [n,
        D]."""
        total = torch.zeros((len(rows), tables.dim), device=self.warm.device)
        if self._gradients:
            bags = row_bags(tables, self.ids)
            mine = np.flatnonzero(np.isin(bags.distinct, rows))
            found = bags.gradients(self._gradients[-1][:, self.dim :], tables.dim)[torch.from_numpy(mine)]
            total[torch.from_numpy(np.searchsorted(rows, bags.distinct[mine]))] = found
        return total

    def _gradient(self) -> torch.Tensor:
        """The gradient of all rows; zero for rows that no part has used."""
        given = sorted(self._given, key=lambda part: part[:2])
        if self.kept is not None:
            return self._completed(self.kept, given)
        if self.dim:
            return self._wide_gradient(given)
        if len(given) == 1 and given[0][2].grad is not None and given[0][2].shape == self.warm.shape:
            return given[0][2].grad
        if self.pooled and [low for low, _, _ in given] == [0, *(high for _, high, _ in given[:-1])]:
            parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, _, leaf in given]
            joined = torch.cat(parts) if parts else self.warm
            if joined.shape == self.warm.shape and parts:
                return joined
        gradient = torch.zeros_like(self.warm)
        for low, high, leaf in given:
            if leaf.grad is not None:
                self._put(gradient, low, high, leaf.grad)
        return gradient

    def _completed(self, gradient: torch.Tensor, given: list[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
        """The gradients that threads have stored, together with those of parts trained in this thread."""
        for low, high, leaf in given:
            if (low, high) not in self._placed:
                gradient[low:high, self.dim :] = 0.0 if leaf.grad is None else leaf.grad
        return gradient

    def _wide_gradient(self, given: list[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
        """The gradient with columns for the room, whose values do not matter."""
        if len(given) == 1 and self._roomy_gradients and given[0][1] == len(self.warm):
            wide = widened(self._roomy_gradients[-1].flatten(1), self.dim)
            if wide is not None:
                return wide
        gradient = torch.zeros_like(self.warm)
        for low, high, leaf in given:
            if leaf.grad is not None:
                gradient[low:high, self.dim :] = leaf.grad
        return gradient

    def _put(self, gradient: torch.Tensor, low: int, high: int, part: torch.Tensor) -> None:
        if self.pooled:
            gradient[low:high] = part
            return
        at = 0
        for start, stop in self._ids_between(low, high):
            gradient[start:stop] = part[at : at + stop - start]
            at += stop - start


def _finished(collection: TableCollection, sent: Any) -> torch.Tensor:
    ahead = collection.offers(SendsAhead)
    assert ahead is not None, "no batch is sent otherwise"
    return collection.joined(ahead.finish(sent))
