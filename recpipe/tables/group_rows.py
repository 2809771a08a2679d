"""The rows of one group of tables for one batch: looked up once, handed out in parts, and updated once.

``GroupTables`` is how the pipeline drives a group's tables, wherever their rows are. ``GroupRows`` is one
batch in them. A batch passes through these calls, in this order:

    find         any thread        what planning needs of the ids, where a GPU finds it
    input_dist   loader            ids checked; the tier of each row decided
    prefetch     loader            while the batch before trains: its rows are fetched
    advance      training thread   after the update of the batch before: rows that leave are sent away
    wait         training thread   until its rows have arrived
    compute      training thread   the lookup, whose backward pass is the fused update
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import in_this_thread, using_threads
from recpipe.data.parts import require_ids
from recpipe.plugin.bags import RowIds
from recpipe.plugin.collection import TableCollection, TierTimes
from recpipe.plugin.tables import TableSet
from recpipe.tables.changes import ChangedRows
from recpipe.tables.rows import row_bags
from recpipe.tables.tiers.plan import TierPlan

Scale = float | torch.Tensor
"""What a loss is multiplied by; a tensor of one value on a GPU."""
NO_ROWS = torch.empty(0)
"""In place of rows that have not been looked up; made once, since making it lets go of Python's lock."""


class GroupTables:
    """The tables of one group as the pipeline drives them, after TorchRec's ``ShardedModule``.

    The defaults are those of tables whose rows neither move nor are on other ranks.
    """

    tables: TableSet
    times = TierTimes()
    """Seconds so far; none where no row moves."""
    moves: ClassVar[bool] = False
    """Whether rows move between tiers, as decided for each batch before it is trained."""
    sends: ClassVar[bool] = False
    """Whether ids are sent to ranks that hold their rows."""
    finds_ahead = False
    """Whether ``find`` has work to do."""
    prefetches = False
    """Whether to fetch a batch's rows while the batch before it trains."""
    changes: ChangedRows | None = None
    """What notes the rows that are updated; None: nobody asks for them."""

    def find(self, ids: KeyedJaggedTensor) -> Any:
        """What ``input_dist`` needs of a batch's ids and no other batch has a part in; None: it does it all.
        ``DataError`` if an id has no row. From any thread."""
        return None

    def input_dist(self, ids: KeyedJaggedTensor, found: Any = None) -> GroupRows:
        """Take in the ids of a whole batch, features in the tables' order; ``DataError`` if an id has no row.
        ``found``: the result of ``find`` for them. Batches follow one another."""
        require_ids(ids, self.tables.rows_of_features)
        return GroupRows(self, ids)

    def prefetch(self, rows: Any) -> None:
        """Start to fetch the batch's rows, once ``advance`` of the batch before it has been called."""

    def begin(self, rows: Any) -> None:
        """Note that the batch's turn has come: it is not forgotten any more, and the next one may be taken
        in. ``advance`` does it, too."""

    def advance(self, rows: Any) -> None:
        """After the last batch's update: send away the rows that leave their tier."""

    def forget(self) -> None:
        """Undo the decisions for a batch that has been taken in and will not be trained."""

    def renew(self, rows: RowIds, records: torch.Tensor) -> None:
        """Replace the records of distinct ``rows`` of the set, as ids of a table that grows have got them, by
        ``records`` (float32 [n, width]): before the batch with these ids begins, and on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not say how rows are replaced")

    def wait(self) -> None:
        """Wait until the rows of the batch that has advanced are in their places."""

    def compute(self, rows: Any, warm: bool, cold: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Look up the ``warm`` rows, of all samples, and the ``cold`` ones, of samples from
        ``rows.cold_first`` on: float32 [B, F * D] each, or [L, D] with one row for each id; zero for a row of
        the other tier. A backward pass through each updates it.

        Where nothing has to be waited for, or all rows are looked up at once, the first has them all and the
        second is None. ``rows.padding`` columns in front of the first belong to no feature.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how its rows are looked up")

    def graph_lookup(self, rows: Any) -> GraphLookup | None:
        """The lookup of all rows, which have arrived, for a graph of kernels, which makes it and the update
        itself; None: it cannot."""
        return None


class ByLookup(GroupTables):
    """Tables that are a ``TableCollection`` and no more, such as a plugin's own."""

    def __init__(self, collection: TableCollection, tables: TableSet) -> None:
        self.collection, self.tables = collection, tables

    def compute(self, rows: GroupRows, warm: bool, cold: bool) -> tuple[torch.Tensor, None]:
        wide = self.collection.pooled_with_room(rows.ids) if rows.wants_padding else None
        if wide is None:
            return self.collection.lookup(rows.ids), None
        rows.padding = self.tables.dim
        return wide, None


@dataclass(frozen=True)
class GraphLookup:
    """A batch's lookup of one id in each bag, in a table whose backward pass makes the update, for a graph of
    kernels: that makes it again for each batch, with other indices in the same memory.

    Kernels that are repeated get no other sizes, so that this is a lookup of as many ids in each batch.
    """

    table: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Looks up indices and offsets: float32 ``shape``."""
    indices: torch.Tensor
    """int64 [L]; the current stream may read them."""
    offsets: torch.Tensor
    """int64 [L + 1]: 0, 1, ... L. They are the same in each batch of as many ids."""
    shape: tuple[int, int]
    memory: Hashable
    """Where the table is: kernels that were recorded read and write the same place."""

    @property
    def form(self) -> Hashable:
        """What must be the same of two batches' lookups for one graph to make both."""
        return self.shape, len(self.indices), self.memory


class GroupRows:
    """The rows of one group for one batch."""

    plan: TierPlan | None = None
    """Which rows move for it; None if none does."""
    cold_first = 0
    """The first sample, in the order of training, that may need the slab."""

    def __init__(self, tables: GroupTables, ids: KeyedJaggedTensor) -> None:
        self.tables = tables
        self.ids = ids
        """The ids of the samples that this rank trains, in the order of training."""
        self.pooled = tables.tables.pooled
        self.frozen = tables.tables.optimizer.frozen
        """Whether nothing is updated: its rows are handed out without a graph."""
        self.wants_padding = False
        """Whether the model writes one more feature in front of the rows (``recpipe.tables.group_rows``)."""
        self.padding = 0
        """Columns in front of the looked up rows, which belong to no feature."""
        self.warm = NO_ROWS
        self.cold: torch.Tensor | None = None
        self.graph: GraphLookup | None = None
        """The lookup that has been left to a graph of kernels; None: it is made here."""
        self.updated = False
        """Whether a graph has made the update."""
        self._gradient_buffer: torch.Tensor | None = None
        """Gradients of all rows; parts that are trained in other threads put theirs here."""
        self._gradients: list[torch.Tensor] = []
        """The last entry is the gradient of all rows, with columns in front as ``warm`` has them; empty
        before the backward pass. It is a list so that a hook on the rows can fill it without a reference to
        this object, which would keep the rows alive."""
        self._padded_gradients: list[torch.Tensor] = []
        """Gradients of leaves with padding."""
        self._placed: set[tuple[int, int]] = set()
        self._given: list[tuple[int, int, torch.Tensor]] = []

    @property
    def needs_cold(self) -> NDArray[np.bool_]:
        """For each sample, in the batch's own order, whether it looks up a row of the slab, bool [B]. A GPU
        is waited for."""
        return np.zeros(self.ids.stride(), bool)

    def arrange(self, samples: NDArray[np.int64], cold_first: int) -> None:
        """Restrict the lookups to this trainer's ``samples`` (int64 [n]), in this order; those from
        ``cold_first`` on may need the slab. The batch's ids are exchanged by the caller."""

    def send(self) -> None:
        """Begin to send the ids to the ranks that hold their rows; all ranks do so together."""

    def send_ids(self) -> None:
        """Wait for the numbers of ids, which were sent first, and send the ids themselves."""

    def fetch_rows(self) -> None:
        """Start to fetch the rows of the ids that other ranks have sent here, where they lie in tiers."""

    # -- the lookup --------------------------------------------------------------------------

    def look_up(self, warm: bool, cold: bool) -> None:
        """Look up what needs no waiting (``warm``), and what does (``cold``) once it has arrived."""
        found, slab = self.tables.compute(self, warm, cold)
        if found is not None:
            self.warm = found.detach() if self.frozen else found
        if slab is not None:
            self.cold = slab.detach() if self.frozen else slab

    def leave_to_graph(self, wait: bool) -> None:
        """Leave the lookup to a graph, if that can make it: of all rows if ``wait``, else of the resident
        tier, which must then have them all."""
        if wait or self.plan is None or not len(self.plan.slab):
            self.graph = self.tables.graph_lookup(self)

    @property
    def form(self) -> Hashable:
        """What a graph fixes of the lookup, which has been made or left to it."""
        return (self.warm.shape, self.warm.dtype) if self.graph is None else self.graph.form

    # -- parts -------------------------------------------------------------------------------

    def share(self) -> None:
        """Prepare for parts trained in several threads, each of which stores its rows' gradient (``keep``).

        Gradients of padded rows are stored in the rows' own memory: only the interaction has read it, and is
        done.
        """
        if self.pooled and self._gradient_buffer is None and not self.frozen:
            self._gradient_buffer = self.warm.data if self.padding else torch.empty_like(self.warm)

    def keep(self, low: int, high: int, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Store the gradient of ``leaf``, which has the rows of samples [low, high)."""
        if self._gradient_buffer is None:
            leaf.grad = gradient
            return
        place = self._gradient_buffer[low:high, self.padding :]
        if (gradient.data_ptr(), gradient.stride()) != (place.data_ptr(), place.stride()):
            place.copy_(gradient)  # otherwise the interaction has written it there
        self._placed.add((low, high))

    def leaf(self, low: int, high: int) -> torch.Tensor:
        """The rows of samples [low, high) as a leaf of the graph, which requires a gradient unless they are
        frozen: [high - low, F * D], or one row for each id."""
        if self.padding:
            # Parts write in front of rows at the same time; ``.data`` keeps torch from treating this as a
            # change of each other's rows.
            leaf = marked(self.warm.data[low:high, self.padding :], self._gradient_buffer is not None)
            leaf.requires_grad_(not self.frozen)
            if self._gradient_buffer is None and not self.frozen:
                # Taken in a hook: ``leaf.grad`` is a copy without padding.
                leaf.register_hook(self._padded_gradients.append)  # type: ignore[no-untyped-call]
        else:
            rows = self._cut(self.warm.detach(), low, high)
            first = self.cold_first if self.pooled else 0
            if self.cold is not None and first <= low < high:
                rows = rows + self._cut(self.cold.detach(), low - first, high - first)
            leaf = rows.detach().requires_grad_(not self.frozen)
        self._given.append((low, high, leaf))
        return leaf

    def attached(self) -> torch.Tensor:
        """The rows of all samples, in the graph where possible: the model's backward pass then goes on to the
        update of the tables."""
        if self.padding or not self.warm.requires_grad:
            return self.leaf(0, self.ids.stride())
        rows = self.warm if self.cold is None else self.warm + self.cold
        rows.register_hook(self._gradients.append)  # type: ignore[no-untyped-call]
        return rows

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

    # -- the update --------------------------------------------------------------------------

    def backward(self, alone: bool, scale: Scale = 1.0) -> None:
        """Make one backward pass, and thus one fused update, for each tier.

        FBGEMM's CPU update enters a parallel region for every table, which costs more than the threads gain.
        If several ranks train, torch's own operators make the update.
        """
        if self.frozen:
            return
        if self.tables.changes is not None:
            self.tables.changes.looked_up(self.ids)
        if self.updated or self._gradients:  # by a graph, or by the model's backward pass
            return
        if self.plan is not None:
            self.tables.wait()
        gradient = self._gradient()
        gradient = gradient if isinstance(scale, float) and scale == 1 else gradient * scale
        self._gradients = [gradient]
        serial = using_threads(1) if alone and self.warm.device.type == "cpu" else nullcontext()
        with serial, in_this_thread():
            torch.autograd.backward(self.warm, gradient)
            if self.cold is not None:
                first = self.cold_first if self.pooled else 0
                torch.autograd.backward(self.cold, gradient[first:].view(self.cold.shape))

    def gradients(self) -> tuple[RowIds, torch.Tensor]:
        """Before the update: the distinct rows of these lookups, int64 [U], and the gradient of each, summed
        over its lookups, float32 [U, D]."""
        tables = self.tables.tables
        bags = row_bags(tables, self.ids)
        return bags.distinct, bags.gradients(self._gradient()[:, self.padding :].contiguous(), tables.dim)

    def gradient_of(self, tables: TableSet, rows: RowIds) -> torch.Tensor:
        """The contribution of these lookups to the gradients of distinct ``rows`` (sorted), float32 [n,
        D]."""
        total = torch.zeros((len(rows), tables.dim), device=self.warm.device)
        if self._gradients:
            bags = row_bags(tables, self.ids)
            mine = np.flatnonzero(np.isin(bags.distinct, rows))
            found = bags.gradients(self._gradients[-1][:, self.padding :], tables.dim)[torch.from_numpy(mine)]
            total[torch.from_numpy(np.searchsorted(rows, bags.distinct[mine]))] = found
        return total

    def _gradient(self) -> torch.Tensor:
        """The gradient of all rows; zero for rows that no part has used. Columns of padding have values that
        do not matter."""
        if self._gradient_buffer is not None:  # what threads have stored, with this thread's own parts
            for low, high, leaf in self._given:
                if (low, high) not in self._placed:
                    self._gradient_buffer[low:high, self.padding :] = 0.0 if leaf.grad is None else leaf.grad
            return self._gradient_buffer
        given = sorted(self._given, key=itemgetter(0, 1))
        whole = len(given) == 1 and given[0][:2] == (0, self.ids.stride())
        if self.padding:
            if whole and self._padded_gradients:
                wide = widened(self._padded_gradients[-1].flatten(1), self.padding)
                if wide is not None:
                    return wide
        elif whole and given[0][2].grad is not None:
            return given[0][2].grad
        elif self.pooled and [low for low, _, _ in given] == [0, *(high for _, high, _ in given[:-1])]:
            parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, _, leaf in given]
            joined = torch.cat(parts) if parts else self.warm
            if parts and joined.shape == self.warm.shape:
                return joined
        gradient = torch.zeros_like(self.warm)
        for low, high, leaf in given:
            if leaf.grad is None:
                continue
            if self.pooled:
                gradient[low:high, self.padding :] = leaf.grad
                continue
            at = 0
            for start, stop in self._ids_between(low, high):
                gradient[start:stop] = leaf.grad[at : at + stop - start]
                at += stop - start
        return gradient


# Padding in front of pooled rows, so that an interaction writes the dense vector there and copies no rows. A
# collection looks its features up into the columns from D on of a matrix [B, (1 + F) * D]. It hands out the
# matrix without its first D columns, as a tensor with a mark. Code that finds the mark may write into the D
# columns before each row, which nothing else reads. The mark is an attribute of the tensor object, so that
# tensors computed from it have none.
_MARK = "_recpipe_padding"
_SPENT = "_recpipe_spent"


def marked(rows: torch.Tensor, spent: bool = False) -> torch.Tensor:
    """Mark ``rows``, a view of rows with padding in front, such as ``wide[:, dim:]`` of a matrix [B, (1 + F)
    * dim] whose first ``dim`` columns are free. ``spent``: see ``is_spent``."""
    setattr(rows, _MARK, True)
    setattr(rows, _SPENT, spent)
    return rows


def is_spent(rows: torch.Tensor) -> bool:
    """Whether the backward pass of the interaction, which alone reads ``rows``, may write their gradient over
    them."""
    return getattr(rows, _SPENT, False)


def is_padded(rows: torch.Tensor) -> bool:
    """Whether the columns in front of ``rows`` are free to be written."""
    return getattr(rows, _MARK, False)


def widened(rows: torch.Tensor, dim: int) -> torch.Tensor | None:
    """A view of ``rows`` [B, N] together with the ``dim`` columns in front of them, [B, dim + N].

    None if the memory before each row does not hold so many numbers of its own. If rows have no mark, the
    view is only for reading. It serves gradients: that of marked rows has the same strides, and a table whose
    first features are the padding takes it without a copy.
    """
    batch, width = rows.shape
    first = rows.storage_offset() - dim
    # For a single row, torch may give any stride.
    apart = width + dim if batch == 1 else rows.stride(0)
    if batch == 0 or (apart, rows.stride(1)) != (width + dim, 1) or first < 0:
        return None
    return rows.detach().as_strided((batch, dim + width), (dim + width, 1), first)
