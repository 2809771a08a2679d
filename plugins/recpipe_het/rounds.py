"""Rounds in lockstep: every trainer pushes, then checks its rows; every holder applies, then answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.embedding.stores.base import ColdStore
from recpipe.embedding.stores.sharded import ShardedStore
from recpipe.embedding.tables import TableSet
from recpipe.ranks import Ranks
from recpipe_het.holder import Holder
from recpipe_het.messages import Check, Floats, Push, Reply, Rows

NONE: Rows = np.empty(0, np.int64)


@dataclass(frozen=True)
class Write:
    """Records (float32 [n, width]) that replace those of ``rows``."""

    rows: Rows
    records: Floats


class Rounds:
    """This rank's end of the rounds, and its holder where it holds rows. Made on every rank alike."""

    def __init__(self, tables: TableSet, store: ColdStore, ranks: Ranks) -> None:
        self.dim, self.width = tables.dim, tables.layout.width
        self.store, self.ranks = store, ranks
        self.channel = ranks.channel()
        local = store.local if isinstance(store, ShardedStore) else store
        self.holder = None if local is None else Holder(local, tables.optimizer, tables.dim)
        self._push = np.dtype([("row", "<i8"), ("updates", "<i8"), ("gradient", "<f4", (self.dim,))])
        self._check = np.dtype([("row", "<i8"), ("newest", "<i8")])
        self._write = np.dtype([("row", "<i8"), ("record", "<f4", (self.width,))])
        self._reply = np.dtype([("at", "<i8"), ("version", "<i8"), ("record", "<f4", (self.width,))])

    def run(self, push: Push | None = None, check: Check | None = None, write: Write | None = None) -> Reply:
        """One round; writes and pushes of all ranks are applied before its checks are answered."""
        reply, _ = self._round(push, check, write, stop=False)
        return reply

    def serve(self) -> None:
        """Take part in the trainers' rounds until they stop."""
        while not self._round(None, None, None, stop=False)[1]:
            pass

    def stop(self) -> None:
        """Tell the ranks that only hold rows that no round follows."""
        self._round(None, None, None, stop=True)

    def _round(
        self, push: Push | None, check: Check | None, write: Write | None, *, stop: bool
    ) -> tuple[Reply, bool]:
        stops = np.concatenate(self.channel.gather(np.array([stop])))
        pushed = np.empty(0 if push is None else len(push.rows), self._push)
        if push is not None:
            pushed["row"], pushed["updates"], pushed["gradient"] = push.rows, push.updates, push.gradients
        checked = np.empty(0 if check is None else len(check.rows), self._check)
        if check is not None:
            checked["row"], checked["newest"] = check.rows, check.newest
        written = np.empty(0 if write is None else len(write.rows), self._write)
        if write is not None:
            written["row"], written["record"] = write.rows, write.records
        writes, _ = self._send(written)
        pushes, _ = self._send(pushed)
        checks, asked = self._send(checked)
        if self.holder is not None:
            for part in writes:
                if len(part):
                    self.holder.store.scatter(part["row"].copy(), part["record"].copy())
            self.holder.push([Push(p["row"].copy(), p["updates"], p["gradient"]) for p in pushes])
        return self._answer(checks, asked), bool(stops.any())

    def _send(self, items: NDArray[np.void]) -> tuple[list[NDArray[np.void]], list[Rows]]:
        """``items`` to the holders of their rows, there by their number within the holder's part; what came
        from each rank, and which items went to each."""
        rows = items["row"].copy()
        asked: list[Rows] = [NONE] * self.channel.size
        if isinstance(self.store, ShardedStore):
            owners = self.store.owner_of(rows)
            items["row"] = self.store.local_rows(rows)
            for index, rank in enumerate(self.ranks.holders):
                asked[rank] = np.flatnonzero(owners == index)
        else:
            asked[0] = np.arange(len(rows))
        came = self.channel.exchange([_raw(items[part]) for part in asked])
        return [_items(part, items.dtype) for part in came], asked

    def _answer(self, checks: list[NDArray[np.void]], asked: list[Rows]) -> Reply:
        answers = []
        for check in checks:
            answer = np.empty(0, self._reply)
            if self.holder is not None and len(check):
                reply = self.holder.pull(Check(check["row"].copy(), check["newest"]))
                answer = np.empty(len(reply.positions), self._reply)
                answer["at"], answer["version"] = reply.positions, reply.versions
                answer["record"] = reply.records
            answers.append(_raw(answer))
        came = [_items(part, self._reply) for part in self.channel.exchange(answers)]
        at = np.concatenate([part[reply["at"]] for part, reply in zip(asked, came, strict=True)])
        whole = np.concatenate(came)
        return Reply(at, whole["version"].copy(), whole["record"].copy())


def _raw(items: NDArray[np.void]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(items).view(np.uint8).reshape(len(items), items.dtype.itemsize)


def _items(raw: NDArray[np.uint8], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    return np.ascontiguousarray(raw).reshape(-1).view(dtype)
