"""``trainer.publish``: a running training writes deltas of a package, for servers that follow it.

After a step that is due, the training thread copies what has changed since the delta before: the rows of the
tables, most of which were copied in parts after the steps before (``Copies``), the ids that got or lost rows,
the dense part. Another thread encodes and writes them, while training goes on. So a delta is the model after
one step, whole. If the one before is still being written, the next steps' changes are added to the next
one's, and training does not wait. A run that waits for records writes the delta whose time comes meanwhile.

The chain begins with a base: a package that is made of the model that the run starts with, or one that the
user gives. Where there is a chain already, in a run that is resumed for instance, the first delta has
whatever differs between its latest version and the model as it is now, which is compared row by row.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers.apply import BASE
from recpipe.answers.copies import LEAST, MOST, Copies, Pieces, latest, parts_for, turns
from recpipe.answers.delta import PARTIAL, Change, Delta, Version, write_delta
from recpipe.answers.made_base import make_base
from recpipe.answers.manifest import is_package, private_key
from recpipe.answers.published import Published, figures_of_latest, require_readable, table_places
from recpipe.answers.row_types import encode_rows
from recpipe.common.files import LockFile, Taken, unwritable
from recpipe.data.dataset import WaitingStopped
from recpipe.errors import UserError
from recpipe.plugin.tables import row_chunks
from recpipe.setup.training import Training
from recpipe.tables.changes import ChangedIds, ChangedRows, ChangedRowsOf
from recpipe.training.config import PublishConfig
from recpipe.training.evaluation import EvaluationStopped

log = logging.getLogger("recpipe")
LOCK = ".publish.lock"
REMEDY = "choose another directory, trainer.publish.dir=DIRECTORY"
NOTHING, DELTA = 0, -1
"""What there is to do after a step, where it is no copy of a part."""

Left = dict[str, NDArray[np.int64]]
"""By table of the package, ids whose rows have hardly moved and were left out, int64 [n]."""


@dataclass(frozen=True)
class Copied:
    """What has changed by the end of ``step``. ``pieces``: of each group, copies of its rows; ``time``,
    ``since``: when this state was, and that of the delta before."""

    step: int
    time: float
    since: float
    pieces: Pieces
    ids: ChangedRowsOf
    dense: dict[str, torch.Tensor]
    progressive: dict[str, dict[str, float | None]] | None


class Publisher(L.Callback):
    """Writes the deltas of ``training`` as ``config`` says; all trainers have one, and the first one writes.

    ``late`` gets the error of a last delta that could not be written.
    """

    clock = staticmethod(time.monotonic)
    """By which deltas are due, in seconds; nobody sets it."""
    wall = staticmethod(time.time)
    """What deltas say of when they were, in seconds since 1970."""

    def __init__(self, config: PublishConfig, training: Training, late: list[UserError]) -> None:
        assert config.dir is not None, "it is asked for"
        self.config, self.training, self.late = config, training, late
        self.folder = Path(config.dir).expanduser().absolute()
        self.key = None if config.sign is None else private_key(Path(config.sign).expanduser())
        self.leads = training.run.leads
        self.trainers = training.module.trainers
        self.places = table_places(training.model)
        self.changes: list[ChangedRows | None] = []
        self.copies = Copies(training, ())
        self.changed_ids: ChangedIds | None = None
        self.published: Published | None = None
        """What servers have, on the rank that writes."""
        self._shown: dict[str, NDArray[np.float32]] = {}
        """Their weights, if rows that have hardly moved are left out; the thread that writes has it."""
        self.written = 0
        self.rows = 0
        self.longest = 0.0
        """The longest that a step has waited for copies, in seconds."""
        self.waits, self.waited = 0, 0.0
        """How many steps have waited for a copy, and how long, in seconds."""
        self._copying = 0.0
        """Seconds that the copies for the next delta have taken."""
        self._parts = LEAST
        self._step = 0
        """The latest."""
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[tuple[Delta, Left]] | None = None
        self._copied: Copied | None = None
        """What is being written."""
        self._fault: UserError | None = None
        """Why the latest delta could not be written."""
        self._lock: LockFile | None = None
        self._last_step, self._last, self._since = 0, -math.inf, math.nan
        require_readable(training)

    # -- the run -----------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to note changes, with the base at hand."""
        embeddings = self.training.model.embeddings
        self.changes = [
            None if group.tables.optimizer.frozen else ChangedRows(group.tables)
            for group in embeddings.tables.groups
        ]
        self.copies = Copies(self.training, self.changes)
        for tables, changes in zip(embeddings.groups, self.changes, strict=True):
            tables.changes = changes
        if embeddings.growing is not None:
            self.changed_ids = embeddings.growing.changes = ChangedIds()
        base = Path(self.config.base).expanduser() if self.config.base else self.folder / BASE
        if self.leads:
            self._take_folder()
        there = bool(self._agreed(int(self.leads and is_package(base))))
        if not there and self.config.base:
            raise UserError(f"trainer.publish.base={base} is no package: make it with recpipe package")
        if not there:
            make_base(trainer, base, self.training, self.leads)
        if self.leads:
            self.published = Published(base, self.folder)
            self.published.require(self.places, self.training.model)
            self._shown = self.published.shown() if self.config.threshold else {}
        if there:
            self._note_differences()
        self._writer = ThreadPoolExecutor(1, "recpipe-publish") if self.leads else None
        self._last_step, self._last, self._since = trainer.global_step, self.clock(), self.wall()
        self._step = trainer.global_step
        if self.config.every_seconds is not None and self.trainers.size == 1:
            self.training.module.loader.while_waiting = self._wait
        if self.published is not None:
            log.info(
                "publishing to %s from delta %d on, of base %s",
                *(self.folder, self.published.version.sequence + 1, self.published.version.base[:12]),
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Copy what has changed, if it is time and the delta before is written, or a part if it is soon."""
        self._step = step = trainer.global_step
        every = self.config.every_steps
        if every is not None and self._last_step + every - step > 2 * MOST:
            return
        what = self._agreed(self._what(step) if self.leads else NOTHING)
        if what == DELTA:
            self._publish(step)
        elif what:
            started = perf_counter()
            self.copies.make_part(what)
            self._took(perf_counter() - started)

    def _what(self, step: int) -> int:
        """What is to be done after ``step``: ``NOTHING``, a ``DELTA``, or a copy of a part, of so many in the
        first pass."""
        every, seconds = self.config.every_steps, self.config.every_seconds
        steps, passed, parts = step - self._last_step, self.clock() - self._last, self._parts
        if every is not None:
            left: float = every - steps
            parts = min(parts, max(1, every // 2))
        else:
            left = max(0.0, (seconds or 0.0) - passed) * steps / max(passed, 1e-9)
        if left <= 0 and self._idle():
            return DELTA
        return parts if left <= len(turns(parts)) and not self.copies.full else NOTHING

    def _wait(self) -> None:
        """Training waits for records: write a delta whose time has come."""
        due = self.clock() - self._last >= (self.config.every_seconds or 0)
        if due and self._step > self._last_step and self._idle():
            self._publish(self._step)

    def _took(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)
        self.waits, self.waited = self.waits + 1, self.waited + seconds
        self._copying += seconds

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what the last steps have changed."""
        self._finish(trainer.global_step)

    def _finish(self, step: int) -> None:
        """Wait for the delta that is being written, write a last one, and let the directory go."""
        try:
            if self.leads:
                self._idle(wait=True)
            if self._agreed(int(step > self._last_step or self._fault is not None)):
                self._publish(step)
                if self.leads:
                    self._idle(wait=True)
            if self._fault is not None:
                self.late.append(self._fault)
        finally:
            self._close()
        if self.leads:
            log.info(
                "published %d deltas of %s rows to %s; %d steps waited %.1f ms each for a copy, and %.1f ms "
                "for the longest copy",
                *(self.written, f"{self.rows:,}", self.folder, self.waits),
                *(1e3 * self.waited / max(1, self.waits), 1e3 * self.longest),
            )

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """End the thread; a delta that it is writing is whole or not there. Where training ends between two
        steps, write the last one."""
        if isinstance(exception, WaitingStopped | EvaluationStopped):
            self._finish(trainer.global_step)
        else:
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        self.training.module.loader.while_waiting = None
        for tables in self.training.model.embeddings.groups:
            tables.changes = None
        if self.training.model.embeddings.growing is not None:
            self.training.model.embeddings.growing.changes = None
        if self._lock is not None:
            self._lock.remove()
            self._lock.release()
            self._lock = None

    def _take_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = LockFile(self.folder / LOCK)
            for left in self.folder.glob(f"{PARTIAL}*"):
                shutil.rmtree(left, ignore_errors=True)
        except Taken as taken:
            raise UserError(
                f"trainer.publish.dir={self.folder} is written by another run ({taken}): {REMEDY}"
            ) from taken
        except OSError as fault:
            raise unwritable(f"trainer.publish.dir={self.folder}", fault, REMEDY) from fault

    # -- a delta -----------------------------------------------------------------------------

    def _idle(self, wait: bool = False) -> bool:
        """Whether no delta is being written. One that could not be is noted for the next one."""
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        (writing, self._writing), (copied, self._copied) = (self._writing, None), (self._copied, None)
        assert self.published is not None
        assert copied is not None
        try:
            delta, left = writing.result()
        except OSError as fault:
            self._fault = unwritable(self.folder, fault, REMEDY)
            log.warning("%s; what has changed goes into the next delta", self._fault)
            for changes, pieces in zip(self.changes, copied.pieces, strict=True):
                for rows, _ in pieces if changes is not None else ():
                    changes.add(rows)  # type: ignore[union-attr]
            if self.changed_ids is not None:
                self.changed_ids.put_back(copied.ids)
            self._since, self._last = copied.since, -math.inf
            return True
        self._note(left)
        self._fault = None
        self.published.version = delta.version
        self.written += 1
        self.rows += sum(table["rows"] for table in delta.content["tables"].values())
        return True

    def _note(self, rows: Left) -> None:
        """Note these rows once more, which have not been published."""
        for place in self.places:
            if place.name in rows and (changes := self.changes[place.group]) is not None:
                changes.add(rows[place.name] + place.first)

    def _publish(self, step: int) -> None:
        """Copy what has changed; the first trainer begins to write it."""
        started = perf_counter()
        pieces = self.copies.take()
        ids: ChangedRowsOf = {} if self.changed_ids is None else self.changed_ids.taken()
        steps, self._last_step = step - self._last_step, step
        since, before = self._since, self._last
        self._since, self._last = self.wall(), self.clock()
        if self.published is None or self._writer is None:
            return
        dense = self.published.dense_of(self.training.model)
        told = figures_of_latest(self.training.progressive)
        self._copied = Copied(step, self._since, since, pieces, ids, dense, told)
        self._writing = self._writer.submit(self._write, self.published.version, self._copied)
        self._took(perf_counter() - started)
        if steps and math.isfinite(before):
            self._parts = parts_for(self._copying, (self._last - before) / steps)
        self._copying = 0.0

    def _by_table(self, pieces: Pieces) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        """By table of the package, ids int64 [n], ascending, and weights float32 [n, D]."""
        for group, own in enumerate(pieces):
            found = latest(own)
            if found is None:
                continue
            rows, weights = found
            for place in self.places:
                if place.group == group:
                    part = slice(*np.searchsorted(rows, (place.first, place.first + place.rows)))
                    if part.start < part.stop:
                        yield place.name, rows[part] - place.first, weights[part]

    def _write(self, version: Version, copied: Copied) -> tuple[Delta, Left]:
        """Encode the rows and write the delta; in a thread of its own. Which rows were left out is noted by
        the thread that trains."""
        assert self.published is not None
        rows, left, moved_to = {}, Left(), []
        for name, ids, weights in self._by_table(copied.pieces):
            if self._shown:
                moved = np.abs(weights - self._shown[name][ids]).max(1) > self.config.threshold
                left[name], ids, weights = ids[~moved], ids[moved], weights[moved]
            if len(ids):
                kind = self.published.kind(name)
                rows[name] = ids, kind, encode_rows(torch.from_numpy(weights), kind, name, numbers=ids)
                moved_to.append((name, ids, weights))
        counts, told = {name: len(ids) for name, ids in left.items()}, copied.progressive
        change = Change(copied.step, copied.time, copied.since, rows, copied.ids, copied.dense, counts, told)
        delta = write_delta(self.folder, version, change, self.key)
        for name, ids, weights in moved_to if self._shown else ():
            self._shown[name][ids] = weights
        return delta, left

    # -- a chain that is there already ---------------------------------------------------------

    def _note_differences(self) -> None:
        """Note as changed what differs between the chain's latest version and the model. All trainers call
        it."""
        embeddings, of_table = self.training.model.embeddings, {place.table: place for place in self.places}
        differ = 0
        for group, collection, changes in zip(
            embeddings.tables.groups, embeddings.collections, self.changes, strict=True
        ):
            for region in row_chunks(group.tables):
                weights, _ = collection.read(region)
                if self.published is None:
                    continue
                place = of_table[region.table]
                kind = self.published.kind(place.name)
                held = torch.from_numpy(np.ascontiguousarray(weights))
                now = encode_rows(held, kind, place.name, region.start)
                other = self.published.differing(place.name, region.start, now)
                differ += len(other)
                if len(other) and changes is None:
                    raise UserError(
                        f"trainer.publish: table '{region.table}' is frozen and differs from that of "
                        f"{self.published.base}: give a base of this model"
                    )
                if changes is not None:
                    changes.add(other + place.first)
        growing = embeddings.growing
        if self.published is not None and growing is not None and self.changed_ids is not None:
            for name, own in growing.maps.items():
                content = growing.content_of(own)
                self.changed_ids.add(name, *self.published.differing_ids(name, content.records[::2]))
        if differ:
            log.info("%s rows differ from those that were published last", f"{differ:,}")

    def _agreed(self, mine: int) -> int:
        """What the first trainer says; all call it."""
        if self.trainers.size == 1:
            return mine
        return int(self.trainers.gather(np.array([mine]))[0][0])
