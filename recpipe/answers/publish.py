"""``trainer.publish``: a running training writes deltas of a package, for servers that follow it.

After a step that is due, the training thread copies what has changed since the delta before: the rows of the
tables, the ids that got or lost rows, the dense part. Another thread encodes and writes them, while training
goes on. So a delta is the model after one step, whole. If the one before is still being written, the next
steps' changes are added to the next one's, and training does not wait.

The chain begins with a base: a package that is made of the model that the run starts with, or one that the
user gives. Where there is a chain already, in a run that is resumed for instance, the first delta has
whatever differs between its latest version and the model as it is now, which is compared row by row.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
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
from recpipe.tables.collection import ReadsRows
from recpipe.training.config import PublishConfig
from recpipe.training.evaluation import EvaluationStopped

log = logging.getLogger("recpipe")
LOCK = ".publish.lock"
REMEDY = "choose another directory, trainer.publish.dir=DIRECTORY"


Left = dict[str, NDArray[np.int64]]
"""By table of the package, ids whose rows have hardly moved and were left out, int64 [n]."""


@dataclass(frozen=True)
class Copied:
    """What has changed by the end of ``step``. ``rows``: by table of the package, ids int64 [n], ascending,
    and weights float32 [n, D]; ``time``, ``since``: when this state was, and that of the delta before."""

    step: int
    time: float
    since: float
    rows: dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]
    ids: ChangedRowsOf
    dense: dict[str, torch.Tensor]
    progressive: dict[str, dict[str, float | None]] | None


class Publisher(L.Callback):
    """Writes the deltas of ``training`` as ``config`` says; all trainers have one, and the first one writes.

    ``late`` gets the error of a last delta that could not be written.
    """

    def __init__(self, config: PublishConfig, training: Training, late: list[UserError]) -> None:
        assert config.dir is not None, "it is asked for"
        self.config, self.training, self.late = config, training, late
        self.folder = Path(config.dir).expanduser().absolute()
        self.key = None if config.sign is None else private_key(Path(config.sign).expanduser())
        self.leads = training.run.leads
        self.trainers = training.module.trainers
        self.places = table_places(training.model)
        self.changes: list[ChangedRows | None] = []
        self.changed_ids: ChangedIds | None = None
        self.published: Published | None = None
        """What servers have, on the rank that writes."""
        self._shown: dict[str, NDArray[np.float32]] = {}
        """Their weights, if rows that have hardly moved are left out; the thread that writes has it."""
        self.written = 0
        self.rows = 0
        self.longest = 0.0
        """The longest that a step has waited for a copy, in seconds."""
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[tuple[Delta, Left]] | None = None
        self._copied: Copied | None = None
        """What is being written."""
        self._fault: UserError | None = None
        """Why the latest delta could not be written."""
        self._lock: LockFile | None = None
        self._last_step, self._last_time = 0, math.nan
        require_readable(training)

    # -- the run -----------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to note changes, with the base at hand."""
        embeddings = self.training.model.embeddings
        self.changes = [
            None if group.tables.optimizer.frozen else ChangedRows(group.tables)
            for group in embeddings.tables.groups
        ]
        for tables, changes in zip(embeddings.groups, self.changes, strict=True):
            tables.changes = changes
        if embeddings.growing is not None:
            self.changed_ids = embeddings.growing.changes = ChangedIds()
        base = Path(self.config.base).expanduser() if self.config.base else self.folder / BASE
        if self.leads:
            self._take_folder()
        there = self._agreed(is_package(base) if self.leads else False)
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
        self._last_step, self._last_time = trainer.global_step, time.time()
        if self.published is not None:
            log.info(
                "publishing to %s from delta %d on, of base %s",
                *(self.folder, self.published.version.sequence + 1, self.published.version.base[:12]),
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Copy what has changed, if it is time and the delta before is written."""
        every, seconds = self.config.every_steps, self.config.every_seconds
        if every is not None:
            due = trainer.global_step - self._last_step >= every
        else:
            due = self.leads and time.time() - self._last_time >= (seconds or 0)
            due = self._agreed(due)
        if due and self._agreed(self.leads and self._idle()):
            self._publish(trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what the last steps have changed."""
        self._finish(trainer.global_step)

    def _finish(self, step: int) -> None:
        """Wait for the delta that is being written, write a last one, and let the directory go."""
        try:
            if self.leads:
                self._idle(wait=True)
            if self._agreed(step > self._last_step or self._fault is not None):
                self._publish(step)
                if self.leads:
                    self._idle(wait=True)
            if self._fault is not None:
                self.late.append(self._fault)
        finally:
            self._close()
        if self.leads:
            log.info(
                "published %d deltas of %s rows to %s; the longest copy took %.1f ms of a step",
                *(self.written, f"{self.rows:,}", self.folder, 1e3 * self.longest),
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
            self._note({name: ids for name, (ids, _) in copied.rows.items()})
            if self.changed_ids is not None:
                self.changed_ids.put_back(copied.ids)
            self._last_time = copied.since
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
        rows = self._copied_rows()
        ids: ChangedRowsOf = {} if self.changed_ids is None else self.changed_ids.taken()
        self._last_step = step
        if self.published is None or self._writer is None:
            return
        since, self._last_time = self._last_time, time.time()
        dense = self.published.dense_of(self.training.model)
        told = figures_of_latest(self.training.progressive)
        self._copied = Copied(step, self._last_time, since, rows, ids, dense, told)
        self._writing = self._writer.submit(self._write, self.published.version, self._copied)
        self.longest = max(self.longest, perf_counter() - started)

    def _copied_rows(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """By table of the package, the rows that have changed since the last time: ids int64 [n], ascending,
        and weights float32 [n, D]. All trainers call it."""
        found: dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        embeddings = self.training.model.embeddings
        for number, changes in enumerate(self.changes):
            if changes is None:
                continue
            rows = changes.taken()
            if self.trainers.size > 1:
                rows = np.unique(np.concatenate(self.trainers.gather(rows)))
            if not len(rows):
                continue
            reader = embeddings.collections[number].offers(ReadsRows)
            assert reader is not None, "it has been checked"
            weights = reader.weights_of(rows)
            for place in self.places:
                if place.group == number:
                    own = slice(*np.searchsorted(rows, (place.first, place.first + place.rows)))
                    if own.start < own.stop:
                        found[place.name] = rows[own] - place.first, weights[own]
        return found

    def _write(self, version: Version, copied: Copied) -> tuple[Delta, Left]:
        """Encode the rows and write the delta; in a thread of its own. Which rows were left out is noted by
        the thread that trains."""
        assert self.published is not None
        rows, left = {}, Left()
        for name, (ids, weights) in copied.rows.items():
            if self._shown:
                moved = np.abs(weights - self._shown[name][ids]).max(1) > self.config.threshold
                left[name], ids, weights = ids[~moved], ids[moved], weights[moved]
            if len(ids):
                kind = self.published.kind(name)
                rows[name] = ids, kind, encode_rows(torch.from_numpy(weights), kind, name, numbers=ids)
        counts, told = {name: len(ids) for name, ids in left.items()}, copied.progressive
        change = Change(copied.step, copied.time, copied.since, rows, copied.ids, copied.dense, counts, told)
        delta = write_delta(self.folder, version, change, self.key)
        for name in rows if self._shown else ():
            ids, weights = copied.rows[name]
            own = np.isin(ids, rows[name][0])
            self._shown[name][ids[own]] = weights[own]
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

    def _agreed(self, mine: bool) -> bool:
        """What the first trainer says; all call it."""
        if self.trainers.size == 1:
            return mine
        return bool(self.trainers.gather(np.array([mine]))[0][0])
