"""A batch on its way: read, taken in by the tables, on the device, looked up, trained and updated.

Its rows are looked up once. The model gets them part by part, as leaves of the graph: rows of some samples,
detached from the tables. When all parts have been differentiated, one backward pass for each group and tier
makes the fused update of the whole batch. An update for each part would be wrong for every optimizer with
state.

FBGEMM's CPU kernels use only the core that calls them, so that other cores idle while tables are looked up
and updated. Groups of tables need not wait for each other, and the dense optimizer need not wait for the
tables' update: ``TableWorkers`` run them in threads::

    this core     look up | ...dense part... | dense optimizer | update
    other cores   look up |                  | update          | update
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import arrived, keep_to_one_core, one_thread
from recpipe.common.timing import phase, watched
from recpipe.data.parts import batch_size, leaves, on_gpu
from recpipe.tables.dynamic.growing import Plan
from recpipe.tables.group_rows import GroupRows, GroupTables, Scale
from recpipe.tables.inputs import GroupIds
from recpipe.tables.proxy import CollectionProxy, same_ids

Work = Callable[[], None]
"""Work on tables that no other work touches at the same time."""
WORTH = 2e-3
"""Work that takes fewer seconds runs in the calling thread, since waking a thread costs a tenth of this.
Results do not depend on the choice."""


def nothing() -> None:
    """What is done about the next batch where somebody else reads it."""


@dataclass
class InFlight:
    """A batch from its reading to its update."""

    batch: Any
    """The samples; once it is staged, those that this rank trains, on the device and in the order of their
    micro-batches."""
    bounds: tuple[int, ...] = ()
    """Where its micro-batches end; empty if nothing in the run cuts batches."""
    cold_from: int = 0
    """The first micro-batch that waits for cold rows."""
    total: int = 0
    """Number of samples of the whole batch, of which ``batch`` is this rank's share (0: ``batch`` is all of
    it)."""
    consumed: int = 0
    """Number of samples read for it, of which plugins may have left some out (0: none were read for it)."""
    skipped: int = 0
    """How many of them a skipper has left out."""
    mean_weights: tuple[float, ...] = ()
    """By what the weights of each label were divided, so that their mean is 1; empty if there are none."""
    alone: bool = True
    """Whether no other rank trains a share of it."""
    ids: GroupIds | None = None
    """Its ids for each group; None: they have not been put in order yet."""
    found: Sequence[Any] | None = None
    """What ``GroupTables.find`` said of them, if it was asked ahead."""
    growth: Plan = field(default_factory=list)
    """What it has changed in the rows of ids of tables that grow."""
    read_next: Callable[[], object] = nothing
    """Starts to read the next batch; further calls return the same one."""
    next_is_slow: bool = False
    """Whether reading the next batch takes longer than the tables' update, judged by earlier batches."""
    upcoming: InFlight | None = None
    """The next batch, whose ids are sent while this one trains; None at the epoch's end or without sending
    ahead."""
    size: int = 0
    """Number of samples of ``batch`` (0: not counted yet)."""
    copied: torch.cuda.Event | None = None
    """The end of its copy to a GPU, on the loader's stream; None: there is nothing to wait for."""

    groups: list[GroupRows | None] | None = field(default=None, init=False)
    """Its rows in each group of tables; None for a group whose ids the model makes. None altogether before it
    is taken in and after its update."""
    rows: list[GroupRows] = field(default_factory=list, init=False)
    """Those of the groups whose ids it has."""
    moving: list[GroupRows] = field(default_factory=list, init=False)
    """Its rows in tables whose rows move between tiers."""
    proxies: Mapping[CollectionProxy, list[GroupRows]] = field(default_factory=dict, init=False)
    """Its rows by the proxy that hands them out."""
    cold_is_here: bool = field(default=False, init=False)
    attached: bool = field(default=False, init=False)
    """Whether the model's backward pass goes on to the update of the tables; the rows are then handed out
    once, for all samples."""

    def __post_init__(self) -> None:
        self.size = self.size or batch_size(self.batch)
        self.total = self.total or self.size
        self.consumed = self.consumed or self.total
        self.looked_up: Future[None] = Future()
        """Done once its rows may be handed out, also to parts in other threads."""

    def take_in(self, tables: Sequence[GroupTables]) -> None:
        """Let the ``tables`` of each group take its ids in; ``DataError`` if an id has no row."""
        assert self.ids is not None, "they have been put in order"
        self.groups, self.rows, self.moving = [], [], []
        found, self.found = self.found or repeat(None), None
        for own, ids, ahead in zip(tables, self.ids, found, strict=False):
            rows = None if ids is None else own.input_dist(ids, ahead)
            self.groups.append(rows)
            if rows is not None:
                self.rows.append(rows)
                if rows.plan is not None:
                    self.moving.append(rows)

    def arrive(self) -> None:
        """Let this thread's stream wait until the batch is on the GPU; call it before anything uses the
        batch."""
        copied, self.copied = self.copied, None
        if copied is not None:
            # Jagged parts keep all their tensors, also offsets that were computed on the way.
            arrived(copied, [part for part in leaves((self.batch, self.ids)) if on_gpu(part)])

    def needs_cold(self) -> NDArray[np.bool_]:
        """For each sample, in the batch's own order, whether it looks up a row that is not resident yet, bool
        [B]. A GPU is waited for."""
        needs = np.zeros(self.size, bool)
        for rows in self.moving:
            needs |= rows.needs_cold
        return needs

    def look_up(
        self, wait: bool, shared: bool = False, workers: TableWorkers | None = None, by_graph: bool = False
    ) -> None:
        """Look up the resident rows; with ``wait``, all rows, once they have arrived. ``shared``: parts will
        be trained in several threads. ``workers``, if given, look groups up in parallel. ``by_graph``: leave
        to a graph what it can look up itself; ``look_up_left`` must follow if it does not."""
        try:
            with phase("embedding forward"):
                waits = wait
                for rows in self.moving:
                    waits = waits or (rows.plan is not None and rows.plan.fetches_residents)
                if waits:
                    for rows in self.moving:
                        rows.tables.wait()
                here = self.rows
                if by_graph:
                    for rows in self.rows:
                        rows.leave_to_graph(wait)
                    here = [rows for rows in self.rows if rows.graph is None]
                if workers is None or len(here) == 1:
                    for rows in here:
                        rows.look_up(True, wait)
                else:
                    workers.begin("look up", [partial(rows.look_up, True, wait) for rows in here])
                    workers.finish()
                self.cold_is_here = wait
                if shared:
                    for rows in self.rows:
                        rows.share()
        except BaseException as fault:
            self.looked_up.set_exception(fault)
            raise
        self.looked_up.set_result(None)

    def look_up_left(self) -> None:
        """Look up what has been left to a graph, since none has trained the batch."""
        with phase("embedding forward"):
            for rows in self.rows:
                if rows.graph is not None:
                    rows.graph = None
                    rows.look_up(True, True)

    def wait_for_cold(self) -> None:
        """Block until the slabs hold this batch's rows, and look them up."""
        with phase("embedding forward"):
            for rows in self.moving:
                rows.tables.wait()
            for rows in self.moving:
                rows.look_up(False, True)
            self.cold_is_here = True

    def backward(self, scale: Scale = 1.0, workers: TableWorkers | None = None) -> None:
        """Update the tables by the leaves' gradients times ``scale``. With ``workers``, begin the update
        there."""
        with phase("embedding backward and update"):
            if workers is not None:
                workers.begin("update", [partial(rows.backward, self.alone, scale) for rows in self.rows])
                return
            for rows in self.rows:
                rows.backward(self.alone, scale)

    def release(self) -> None:
        """Let go of its rows and of their gradients. It may then be taken in once more."""
        self.groups, self.rows, self.moving, self.proxies = None, [], [], {}
        self.cold_is_here, self.looked_up = False, Future()


@dataclass(eq=False)
class Handed:
    """What a proxy hands out for samples [low, high) of a batch, whose ids are ``ids``."""

    batch: InFlight
    proxy: CollectionProxy
    ids: KeyedJaggedTensor
    low: int
    high: int
    leaves: list[torch.Tensor] | None = None
    """The rows of each group; None: the model has not asked for them yet."""

    def rows(self, sparse: KeyedJaggedTensor) -> list[torch.Tensor] | None:
        """The leaves, the same at every call, so that their gradients add up; None if ``sparse`` has other
        ids than these samples. If another thread is looking the rows up, waits for it."""
        if sparse is not self.ids and not same_ids(sparse, self.ids, self.proxy):
            return None
        if self.leaves is None:
            batch = self.batch
            batch.looked_up.result()
            self.leaves = []
            for rows in batch.proxies[self.proxy]:
                self.leaves.append(rows.attached() if batch.attached else rows.leaf(self.low, self.high))
        return self.leaves


class TableWorkers:
    """``count`` threads for work on tables, each of which uses one core."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count, "recpipe-tables", keep_to_one_core)
        self.busy = 0
        """How many cores the unfinished work may use."""
        self._begun: list[tuple[Work, Future[None]]] = []
        self._seconds: dict[str, list[float]] = {}
        """Seconds that the latest works of each kind took."""
        with one_thread():  # setting torch's number of threads also applies to all future threads
            self._threads.submit(int).result()

    def begin(self, kind: str, works: Sequence[Work]) -> None:
        """Begin ``works``, in any order. Call ``finish`` before anything else uses their tables.

        They run here and now if works of this ``kind`` were short the last time, or under torch's profiler,
        which does not see other threads.
        """
        before, now = sum(self._seconds.get(kind, ())), list[float]()
        self._seconds[kind] = now
        if before < WORTH or watched():
            for work in works:
                _timed(work, now)
            return
        for work in works:
            timed = partial(_timed, work, now)
            self._begun.append((timed, self._threads.submit(timed)))
        self.busy = min(self.count, len(works))

    def finish(self) -> None:
        """Wait for the work that was begun. Work that no thread has started yet runs here. Raises the work's
        faults."""
        begun, self._begun, self.busy = self._begun, [], 0
        for work, end in reversed(begun):
            if end.cancel():
                work()
        for _, end in begun:
            if not end.cancelled():
                end.result()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _timed(work: Work, seconds: list[float]) -> None:
    started = perf_counter()
    work()
    seconds.append(perf_counter() - started)
