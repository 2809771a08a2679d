"""Shards that follow deltas: ``recpipe serve SHARD follow=DIRECTORY``.

A shard has its rows several times, each with another of the latest versions: mapped, so that they share the
pages that have not changed. It answers for all of them but the one that is brought to the next version. The
main servers change over once all shards have it, each between two of its batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from recpipe_serve.fresh.versions import in_words

from recpipe.answers.delta import Delta, Version
from recpipe.answers.score import Tables, row_bytes
from recpipe.errors import UserError
from recpipe_scale_out.rows import InMemory, Rows
from recpipe_scale_out.sealed import Applied
from recpipe_scale_out.versions import version_of

log = logging.getLogger("recpipe")
KEPT = 3
"""Versions that a following shard has."""
Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By table ids int64 [n], ascending, and rows uint8 [n, bytes]."""


class Replaceable(InMemory):
    """Tables whose rows can be replaced while nothing is looked up; the files are not written to."""

    def __init__(self, directory: Path, tables: dict[str, Any]) -> None:
        self.tables = Tables(directory, tables, True, True)
        pruned = next(iter(self.tables.places), None)
        if pruned is not None:
            raise UserError(
                f"{directory}: rows of table '{pruned}' are left out (pruned), and a delta may bring some: "
                "serve it without follow=, or quantize without pruning"
            )

    def rows_of(self, name: str) -> torch.Tensor:
        """The rows of a table, uint8 [rows, bytes]."""
        about = self.tables.about[name]
        width = row_bytes(about)
        return self.tables.rows[self.tables.starts[name] :][: about["rows"] * width].view(-1, width)

    def replace(self, name: str, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Put ``rows`` uint8 [n, bytes] at ``places`` int64 [n] of a table."""
        if len(places):
            there, newer = in_words(self.rows_of(name), rows.contiguous())
            there.index_copy_(0, places, newer)


class FreshRows(Rows):
    """The rows of the shard ``directory``, which deltas replace. ``taken``: how many it has taken."""

    def __init__(self, directory: Path, trust: Path | None = None) -> None:
        super().__init__(directory, trust, Replaceable)
        self.directory, self.taken = directory, 0
        if "applied" not in self.content or "plan" not in self.content:
            raise UserError(
                f"{directory} is of a cut of an earlier version, which follows nothing: cut it anew"
            )

    @property
    def of(self) -> Version:
        """What it has come to."""
        told = self.content["applied"]
        return Version(told["base"], told["sequence"], told["digest"], self.content["step"])

    def twin(self) -> FreshRows:
        """The same rows, which are replaced by themselves."""
        made = copy(self)
        made.keep_as(Replaceable(self.directory, {n: {**own} for n, own in self.content["tables"].items()}))
        return made

    def take(self, version: Version, changed: Pairs) -> None:
        """Become those of ``version``, which differ in ``changed`` rows of whole tables; nothing may be
        looked up meanwhile."""
        kept = self.kept
        assert isinstance(kept, Replaceable)
        for name, (ids, rows) in changed.items():
            own = self.content["tables"].get(name)
            if own is not None:
                here = (ids >= own["first"]) & (ids < own["first"] + own["rows"])
                kept.replace(name, ids[here] - own["first"], rows[here])
        told = version_of(version, self.content["plan"])
        self.content = {
            **self.content,
            "version": told,
            "step": version.step,
            "applied": Applied(base=version.base, sequence=version.sequence, digest=version.digest),
        }
        self.taken += 1

    def read(self, directory: Path, trust: Path | None) -> tuple[Version, dict[str, Any]]:
        """The delta in ``directory``, which follows this version: what it leads to, and what it changes
        here."""
        delta = Delta.read(directory, trust)
        self.of.require_next(delta)
        whole = {name: {**own, "rows": own["of"]} for name, own in self.content["tables"].items()}
        named = [name for name in delta.content["tables"] if name in whole]
        read = {name: delta.rows_of({"tables": whole}, name) for name in named}
        return delta.version, {name: (ids.clone(), rows.clone()) for name, (ids, rows) in read.items()}


class ShardFollower:
    """Brings ``first`` rows to the versions that the deltas in ``folder`` lead to.

    ``drop`` and ``answer``: let rows be looked up no more, and from now on. Both are called in the event
    loop.
    """

    def __init__(
        self,
        first: FreshRows,
        folder: Path,
        trust: Path | None,
        drop: Callable[[FreshRows], None],
        answer: Callable[[FreshRows], None],
    ) -> None:
        self.folder, self.trust, self.drop, self.answer = folder, trust, drop, answer
        self._waiting = [first.twin() for _ in range(KEPT - 1)]
        """Rows that nobody looks up yet."""
        self._answering = [first]
        self._steps: list[tuple[Version, dict[str, Any]]] = []
        """The latest deltas, which some of the rows have not taken."""
        self._passed = 0
        """How many there were before these."""
        self._fault = ""

    async def run(self, seconds: float) -> None:
        """Look for deltas every so many ``seconds``, until it is cancelled."""
        while True:
            try:
                while await self.look():
                    pass
            except UserError as fault:
                if str(fault) != self._fault:
                    log.warning("%s; version %s is still the latest", fault, self._latest.content["version"])
                self._fault = str(fault)
            except Exception:
                log.exception("following %s failed; it is tried again", self.folder)
            await asyncio.sleep(seconds)

    @property
    def _latest(self) -> FreshRows:
        return self._answering[-1]

    async def look(self) -> bool:
        """Take the next delta, if it is there; ``UserError`` if it cannot be used."""
        place = self.folder / f"delta-{self._latest.of.sequence + 1:08d}"
        if not place.is_dir():
            return False
        step = await asyncio.to_thread(self._latest.read, place, self.trust)
        self._fault = ""
        self._steps.append(step)
        if self._waiting:
            made = self._waiting.pop()
        else:
            made = self._answering.pop(0)
            self.drop(made)
        await asyncio.to_thread(self._take, made)
        self._answering.append(made)
        self.answer(made)
        gone = min(own.taken for own in (*self._answering, *self._waiting)) - self._passed
        del self._steps[:gone]
        self._passed += gone
        log.info("now serving version %s, of delta %d", made.content["version"], made.of.sequence)
        return True

    def _take(self, rows: FreshRows) -> None:
        for version, changed in self._steps[rows.taken - self._passed :]:
            rows.take(version, changed)
