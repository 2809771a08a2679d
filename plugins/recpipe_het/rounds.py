"""Rounds of all ranks: every trainer pushes, then checks its rows; every holder applies the pushes, then
answers."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import HoldersStore, Ranks
from recpipe.plugin import ColdStore, TableSet
from recpipe_het.holder import (
    NONE,
    Bounds,
    Check,
    Floats,
    Holder,
    Missed,
    MissedTotals,
    Push,
    Reply,
    Rows,
    Sums,
)

Items = NDArray[np.void]


@dataclass(frozen=True)
class Write:
    """Records (float32 [n, width]) that replace those of ``rows``."""

    rows: Rows
    records: Floats


@dataclass(frozen=True)
class Totals:
    """Totals over all ranks when the last round began."""

    made: int = 0
    """How many updates trainers made."""
    applied: int = 0
    """How many updates holders applied."""
    largest_staleness: int = 0
    """As in ``Holder``."""
    missed: MissedTotals = field(default_factory=MissedTotals)


@dataclass(frozen=True)
class Told:
    """What the ranks tell each other before a round."""

    sizes: Rows
    """How many items of each kind come from each rank, [ranks, kinds]."""
    totals: Rows
    """How many items of each kind all ranks send to any, [kinds]."""
    made: Rows
    """How many updates of the batch that it read last each rank has made since the last round, [ranks]."""
    training: NDArray[np.bool_]
    """Whether the rows that each rank checks are those of a training batch, [ranks]."""
    rate: float
    """The learning rate of what trainers push."""
    stop: bool
    """Whether a rank announces that no round follows."""


class Rounds:
    """This rank's side of the rounds, with its holder if it holds rows. Every rank makes one.

    ``measured``: holders count what reads miss. One trainer alone misses nothing.
    """

    def __init__(
        self, tables: TableSet, store: ColdStore, ranks: Ranks, bounds: Bounds, *, measured: bool
    ) -> None:
        self.dim, self.width = tables.dim, tables.layout.width
        self.store, self.ranks = store, ranks
        self.channel = ranks.channel()
        self.totals = Totals()
        self.rate = tables.optimizer.rate.value
        """The learning rate of what this trainer pushes; ranks that only hold rows are told."""
        self.holder: Holder | None = None
        self._made = self._made_now = 0
        local = store.local if isinstance(store, HoldersStore) else store
        if local is not None:
            part = bounds.part(ranks.holders.index(ranks.rank), len(ranks.holders))
            trainers = len(ranks.trainers)
            missed = Missed(trainers, local.layout.total_rows) if measured and trainers > 1 else None
            self.holder = Holder(local, tables.optimizer, tables.dim, part, missed)
        self._write = np.dtype([("row", "<i8"), ("record", "<f4", (self.width,))])
        self._gradients, self._steps = (
            np.dtype([("row", "<i8"), ("updates", "<i8"), ("values", "<f4", (width,))])
            for width in (self.dim, self.width)
        )
        self._check = np.dtype([("row", "<i8"), ("version", "<i8")])
        self._reply = np.dtype([("at", "<i8"), ("version", "<i8"), ("record", "<f4", (self.width,))])

    def update_made(self, rows: int) -> None:
        """This rank's trainer has made an update of every row that it read last; the next round tells the
        others."""
        self._made += rows
        self._made_now += 1

    def run(self, push: Push | None = None, check: Check | None = None, write: Write | None = None) -> Reply:
        """Run one round. Writes and pushes of all ranks are applied before checks are answered."""
        if self.channel.size > 1:
            training = check is not None and check.training
            return self._round(self._packed(push, check, write), training=training)[0]
        # In one process nothing is sent.
        holder = self.holder
        assert holder is not None, "one process holds all rows"
        self.totals = Totals(self._made, holder.applied, holder.largest_staleness)
        if write is not None and len(write.rows):
            holder.store.scatter(write.rows, write.records)
        if push is not None:
            holder.push([(0, push)], self.rate)
        if check is None:
            return Reply(NONE, NONE, np.empty((0, self.width), np.float32))
        return holder.pull(0, check)

    def serve(self) -> None:
        """Take part in the trainers' rounds until they stop."""
        while not self._round(self._packed())[1]:
            pass

    def stop(self) -> None:
        """Tell the ranks that only hold rows that no round follows."""
        if self.channel.size > 1:
            self._round(self._packed(), stop=True)

    def _packed(
        self, push: Push | None = None, check: Check | None = None, write: Write | None = None
    ) -> list[Items]:
        """The arrays that a round sends, one for each kind of item."""
        written = np.empty(0 if write is None else len(write.rows), self._write)
        if write is not None:
            written["row"], written["record"] = write.rows, write.records
        pushed = []
        for sums, kind in (
            (None if push is None else push.gradients, self._gradients),
            (None if push is None else push.steps, self._steps),
        ):
            items = np.empty(0 if sums is None else len(sums.rows), kind)
            if sums is not None:
                items["row"], items["updates"], items["values"] = sums.rows, sums.updates, sums.values
            pushed.append(items)
        checked = np.empty(0 if check is None else len(check.rows), self._check)
        if check is not None:
            checked["row"], checked["version"] = check.rows, check.versions
        return [written, *pushed, checked]

    def _round(self, items: list[Items], *, training: bool = False, stop: bool = False) -> tuple[Reply, bool]:
        """Returns the holders' answers, and whether a rank has announced that no round follows."""
        parts = [self._by_holder(item) for item in items]
        told = self._tell(parts, items, training, stop)
        writes, gradients, steps, checks = (
            self._send(*sent) for sent in zip(items, parts, told.sizes.T, told.totals, strict=True)
        )
        if self.holder is not None:
            for part in writes:
                if len(part):
                    self.holder.store.scatter(part["row"].copy(), part["record"].copy())
            pushes = []
            for trainer, rank in enumerate(self.ranks.trainers):
                if self.holder.missed is not None:
                    self.holder.missed.made(trainer, int(told.made[rank]))
                summed, stepped = (
                    Sums(part["row"].copy(), part["updates"].copy(), part["values"].copy())
                    for part in (gradients[rank], steps[rank])
                )
                pushes.append((trainer, Push(summed, stepped)))
            self.holder.push(pushes, told.rate)
        return self._answer(told, checks, parts[3]), told.stop

    def _tell(self, parts: list[list[Rows]], items: list[Items], training: bool, stop: bool) -> Told:
        """Exchange the sizes of what follows, and what is known of this rank's updates and reads."""
        kinds, holder = len(items), self.holder
        figures = [0] * 6
        if holder is not None:
            missed = MissedTotals() if holder.missed is None else holder.missed.totals
            figures = [holder.applied, holder.largest_staleness, *astuple(missed)]
        rate = int(np.float64(self.rate).view(np.int64))
        mine = [*map(len, items), int(stop), int(training), self._made_now, self._made, rate, *figures]
        self._made_now = 0
        headers = [np.array([[*(len(p[rank]) for p in parts), *mine]]) for rank in range(self.channel.size)]
        told = np.concatenate(self.channel.exchange(headers, [1] * self.channel.size))
        rest = told[:, 2 * kinds :]
        self.totals = Totals(
            int(rest[:, 3].sum()),
            int(rest[:, 5].sum()),
            int(rest[:, 6].max()),
            reduce(MissedTotals.plus, (MissedTotals(*map(int, of_rank)) for of_rank in rest[:, 7:])),
        )
        return Told(
            told[:, :kinds],
            told[:, kinds : 2 * kinds].sum(axis=0),
            rest[:, 2],
            rest[:, 1].astype(bool),
            float(rest[self.ranks.trainers[0], 4].view(np.float64)),
            bool(rest[:, 0].any()),
        )

    def _by_holder(self, items: Items) -> list[Rows]:
        """Positions of the items for each rank, whose rows are numbered as on that rank from here on."""
        parts: list[Rows] = [NONE] * self.channel.size
        if not isinstance(self.store, HoldersStore):
            parts[0] = np.arange(len(items))
            return parts
        rows = items["row"].copy()
        owners = self.store.owner_of(rows)
        items["row"] = self.store.local_rows(rows)
        for index, rank in enumerate(self.ranks.holders):
            parts[rank] = np.flatnonzero(owners == index)
        return parts

    def _send(self, items: Items, parts: list[Rows], sizes: Rows, total: int) -> list[Items]:
        """Exchange items; returns what came from each rank. If no rank has any, nothing is sent."""
        if not total:
            return [items] * self.channel.size
        came = self.channel.exchange([_raw(items[part]) for part in parts], sizes.tolist())
        return [_items(part, items.dtype) for part in came]

    def _answer(self, told: Told, checks: list[Items], asked: list[Rows]) -> Reply:
        """The holders' answers; ``asked`` are the positions of what was asked of each."""
        if not told.totals[3] and not told.training.any():
            return Reply(NONE, NONE, np.empty((0, self.width), np.float32))
        answers = []
        for rank, check in enumerate(checks):
            answer = np.empty(0, self._reply)
            # Holders also note that a batch read none of their rows.
            if self.holder is not None and (len(check) or told.training[rank]):
                asker = self.ranks.trainers.index(rank)
                rows, versions = check["row"].copy(), check["version"].copy()
                reply = self.holder.pull(asker, Check(rows, versions, bool(told.training[rank])))
                answer = np.empty(len(reply.positions), self._reply)
                answer["at"], answer["version"] = reply.positions, reply.versions
                answer["record"] = reply.records
            answers.append(_raw(answer))
        came = [_items(part, self._reply) for part in self.channel.exchange(answers)]
        at = np.concatenate([part[reply["at"]] for part, reply in zip(asked, came, strict=True)])
        whole = np.concatenate(came)
        return Reply(at, whole["version"].copy(), whole["record"].copy())


def _raw(items: Items) -> NDArray[np.uint8]:
    return np.ascontiguousarray(items).view(np.uint8).reshape(len(items), items.dtype.itemsize)


def _items(raw: NDArray[np.uint8], dtype: np.dtype[np.void]) -> Items:
    return np.ascontiguousarray(raw).reshape(-1).view(dtype)
