"""Rounds of all ranks: every trainer pushes, then checks its rows; every holder applies the pushes, then
answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import ColdStore, HoldersStore, Ranks, TableSet
from recpipe_het.bounds import Bounds
from recpipe_het.holder import Holder
from recpipe_het.messages import Check, Floats, Push, Reply, Rows

NONE: Rows = np.empty(0, np.int64)
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


class Rounds:
    """This rank's side of the rounds, with its holder if it holds rows. Every rank makes one."""

    def __init__(self, tables: TableSet, store: ColdStore, ranks: Ranks, bounds: Bounds) -> None:
        self.dim, self.width = tables.dim, tables.layout.width
        self.store, self.ranks = store, ranks
        self.channel = ranks.channel()
        self.made = 0
        """How many updates this rank's trainer has made; the next round tells the others."""
        self.totals = Totals()
        self.holder: Holder | None = None
        local = store.local if isinstance(store, HoldersStore) else store
        if local is not None:
            part = bounds.part(ranks.holders.index(ranks.rank), len(ranks.holders))
            self.holder = Holder(local, tables.optimizer, tables.dim, part)
        self._write = np.dtype([("row", "<i8"), ("record", "<f4", (self.width,))])
        self._push = np.dtype([("row", "<i8"), ("updates", "<i8"), ("gradient", "<f4", (self.dim,))])
        self._check = np.dtype([("row", "<i8"), ("version", "<i8")])
        self._reply = np.dtype([("at", "<i8"), ("version", "<i8"), ("record", "<f4", (self.width,))])

    def run(self, push: Push | None = None, check: Check | None = None, write: Write | None = None) -> Reply:
        """Run one round. Writes and pushes of all ranks are applied before checks are answered."""
        reply, _ = self._round(self._packed(push, check, write), stop=False)
        return reply

    def serve(self) -> None:
        """Take part in the trainers' rounds until they stop."""
        while not self._round(self._packed(), stop=False)[1]:
            pass

    def stop(self) -> None:
        """Tell the ranks that only hold rows that no round follows."""
        self._round(self._packed(), stop=True)

    def _packed(
        self, push: Push | None = None, check: Check | None = None, write: Write | None = None
    ) -> list[Items]:
        """The arrays that a round sends."""
        written = np.empty(0 if write is None else len(write.rows), self._write)
        if write is not None:
            written["row"], written["record"] = write.rows, write.records
        pushed = np.empty(0 if push is None else len(push.rows), self._push)
        if push is not None:
            pushed["row"], pushed["updates"], pushed["gradient"] = push.rows, push.updates, push.gradients
        checked = np.empty(0 if check is None else len(check.rows), self._check)
        if check is not None:
            checked["row"], checked["version"] = check.rows, check.versions
        return [written, pushed, checked]

    def _round(self, items: list[Items], *, stop: bool) -> tuple[Reply, bool]:
        """Returns the holders' answers, and whether a rank has announced that no round follows."""
        parts = [self._by_holder(item) for item in items]
        sizes, totals, stopped = self._tell(parts, items, stop)
        writes, pushes, checks = (
            self._send(*sent) for sent in zip(items, parts, sizes.T, totals, strict=True)
        )
        if self.holder is not None:
            for part in writes:
                if len(part):
                    self.holder.store.scatter(part["row"].copy(), part["record"].copy())
            self.holder.push([Push(p["row"].copy(), p["updates"], p["gradient"]) for p in pushes])
        return self._answer(checks, parts[2], totals[2]), stopped

    def _tell(self, parts: list[list[Rows]], items: list[Items], stop: bool) -> tuple[Rows, Rows, bool]:
        """Exchange how many items of each kind come from each rank, [ranks, 3], and are sent in total,
        [3]."""
        applied, stale = (
            (0, 0) if self.holder is None else (self.holder.applied, self.holder.largest_staleness)
        )
        mine = [*(len(item) for item in items), int(stop), self.made, applied, stale]
        headers = [np.array([[*(len(p[rank]) for p in parts), *mine]]) for rank in range(self.channel.size)]
        told = np.concatenate(self.channel.exchange(headers, [1] * self.channel.size))
        self.totals = Totals(int(told[:, 7].sum()), int(told[:, 8].sum()), int(told[:, 9].max()))
        return told[:, :3], told[:, 3:6].sum(axis=0), bool(told[:, 6].any())

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

    def _answer(self, checks: list[Items], asked: list[Rows], total: int) -> Reply:
        if not total:
            return Reply(NONE, NONE, np.empty((0, self.width), np.float32))
        answers = []
        for check in checks:
            answer = np.empty(0, self._reply)
            if self.holder is not None and len(check):
                reply = self.holder.pull(Check(check["row"].copy(), check["version"]))
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
