"""Slipstream's callback in the training loop: takes snapshots and acts on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
from numpy.typing import NDArray

from recpipe.kit import Bags, Batch, Damaged, Mark, RowView, entries, within
from recpipe_slipstream.classifier import InputClassifier, Marks
from recpipe_slipstream.snapshot import Changes, changes, count_touches
from recpipe_slipstream.threshold import SEARCHES, input_scores, stale_share

FILLED = 0.01
"""Hot rows have settled if a batch adds less than this share to them, or if no slot is empty."""


@dataclass(frozen=True)
class Method:
    """The plugin's knobs, with shares converted to batches; see its yaml."""

    drop: float
    window: int
    start: int
    sampled_batches: int
    epoch_batches: int
    stale_lookups: int | None
    min_touches: int
    snapshot_every: int | None
    search: str
    control: str | None


@dataclass
class Totals:
    """Sums over the batches trained so far, also before a resume; seconds are host time."""

    samples: int = 0
    hot: int = 0
    dropped: int = 0
    marked_hot: int = 0
    """How many hot inputs the marks in force have classified."""
    marked_dropped: int = 0
    """How many of them were left out."""
    snapshots: int = 0
    threshold: float = 0.0
    sampled_inputs: int = 0
    sampled_share: float = 0.0
    snapshot_seconds: float = 0.0
    search_seconds: float = 0.0
    classify_seconds: float = 0.0
    freeze_seconds: float = 0.0


class StaleInputs(L.Callback):
    """Opens windows, compares their snapshots, finds the threshold and marks rows.

    ``batches(i)`` reads the epoch's batches from number i on; ``lookups`` returns a batch's rows, numbered
    over all tables. All decisions depend on batch numbers, so that several trainers and a resumed run decide
    alike.
    """

    def __init__(
        self,
        method: Method,
        batches: Callable[[int], Iterator[Batch]],
        lookups: Callable[[Batch], Bags],
        seed: int,
        rows: int,
        dim: int,
    ) -> None:
        self.method = method
        self.batches = batches
        self.seed = seed
        self.rows, self.dim = rows, dim
        """The number of rows of all tables."""
        self.classifier = InputClassifier(
            method.stale_lookups, lookups, seed if method.control == "random" else None
        )
        self.view: RowView | None = None
        self.totals = Totals()
        self.done = 0
        """How many batches have been trained."""
        self.next_window: int | None = method.start
        """The first batch at which the next window may begin; None: there will be no further window."""
        self.before: Mark | None = None
        """The snapshot S0 of the open window."""
        self.touches: NDArray[np.int64] = np.empty(0, np.int64)
        """How many lookups each of S0's rows had in the window."""
        self._resident = 0
        """How many rows were in slots after the last trained batch."""
        self._gained = 0
        """How many of them that batch has added."""

    # -- Lightning's hooks -------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and do the work that is due before the next one."""
        self.after_batch()

    def start(self, view: RowView) -> None:
        """Start, or continue after ``done`` batches, with the rows in ``view``."""
        self.view, self._resident = view, view.resident_count

    def after_batch(self) -> None:
        """Handle a batch that has been trained."""
        view = self.view
        assert view is not None, "training has begun"
        before, self._resident = self._resident, view.resident_count
        self._gained = self._resident - before
        seen = self.classifier.trained(self.done)
        self._count(seen.samples, seen.hot, seen.dropped, seen.seconds)
        if self.before is not None:
            count_touches(self.touches, self.before.rows, seen.rows)
        self.done += 1
        self._advance(view)

    def _count(self, samples: int, hot: int, dropped: int, seconds: float) -> None:
        totals = self.totals
        totals.samples += samples
        totals.hot += hot
        totals.dropped += dropped
        totals.marked_hot += hot
        totals.marked_dropped += dropped
        totals.classify_seconds += seconds

    # -- blocks ------------------------------------------------------------------------------

    def _advance(self, view: RowView) -> None:
        """Open, begin or end a window before batch ``done``."""
        window = self.classifier.window
        start = perf_counter()
        if window is None:
            # Batch ``done`` may have been classified already, so that a window begins one batch later.
            first = self.done + 1
            if self.next_window is None or first + 1 < self.next_window:
                return
            if self._settled(view) and first >= self.next_window:
                self.classifier.window = (first, first + self.method.window)
        elif self.done == window[0]:
            self.before = view.mark()
            self.touches = np.zeros(len(self.before.rows), np.int64)
        elif self.done == window[1]:
            self._mark(view, window)
        else:
            return
        self.totals.snapshot_seconds += perf_counter() - start

    def _settled(self, view: RowView) -> bool:
        """Whether hot rows have settled in their slots; a window before that would see few of them."""
        resident = self._resident
        full = resident == view.slots
        return resident > 0 and (full or self._gained < FILLED * resident)

    def _mark(self, view: RowView, window: tuple[int, int]) -> None:
        """End the window: take the second snapshot, find the threshold, mark rows."""
        assert self.before is not None
        before = self.before
        moved = changes(before.rows, view.moved(before), self.touches, self.method.min_touches)
        self.before, self.classifier.window = None, None
        every = self.method.snapshot_every
        self.next_window = None if every is None else window[0] + every
        if not len(moved.rows):
            # The hot set was replaced meanwhile, for example when another plugin's phase ended: try again.
            self.next_window = self.done
            return
        start = perf_counter()
        totals, scores = self.totals, self._sampled_scores(moved, window[1])
        totals.threshold = SEARCHES[self.method.search](scores, self.method.drop)
        totals.sampled_inputs = len(scores)
        totals.sampled_share = stale_share(scores, totals.threshold)
        totals.snapshots += 1
        totals.marked_hot = totals.marked_dropped = 0
        stale = moved.stale(totals.threshold)
        marks = Marks(self.done + 1, moved.rows, stale, self.rows)
        self.classifier.marks = (*self.classifier.marks[-1:], marks)
        seconds = perf_counter() - start
        totals.search_seconds += seconds
        totals.snapshot_seconds -= seconds

    def _sampled_scores(self, moved: Changes, end: int) -> NDArray[np.float32]:
        """Scores of the hot inputs in batches chosen at random from the rest of the epoch."""
        rest = np.arange(end % self.method.epoch_batches, self.method.epoch_batches)
        rng = np.random.default_rng((self.seed, self.totals.snapshots))
        chosen = np.sort(rng.choice(rest, min(self.method.sampled_batches, len(rest)), replace=False))
        scores = [np.empty(0, np.float32)]
        for number in chosen.tolist():
            batch = next(self.batches(number))
            scores.append(input_scores(moved, self.classifier.lookups(batch), self.method.stale_lookups))
        return np.concatenate(scores)

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as of the last trained batch."""
        before = self.before
        return {
            "done": self.done,
            "next_window": self.next_window,
            "window": self.classifier.window,
            "before": None if before is None else {"rows": before.rows, "weights": before.weights},
            "touches": self.touches.copy(),
            "marks": [
                {"first": m.first, "rows": m.rows, "stale": m.stale, "total_rows": m.total_rows}
                for m in self.classifier.marks
            ],
            "totals": vars(self.totals).copy(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if the state cannot be a result of ``state_dict()``."""
        found = entries(_STATE, state)
        within(found, "done", 0)
        before = found["before"]
        if before is not None:
            self._check_rows(before.rows)
            within(found, "touches", 0, size=len(before.rows))
            if before.weights.shape != (len(before.rows), self.dim):
                raise Damaged(f"before.weights is {before.weights.shape}")
        for marks in found["marks"]:
            told = entries(_MARKS, marks, "marks")
            self._check_rows(told["rows"])
            if told["total_rows"] != self.rows or told["stale"].shape != told["rows"].shape:
                raise Damaged(f"marks are of {told['total_rows']} rows, not {self.rows}")

    def _check_rows(self, rows: NDArray[np.int64]) -> None:
        within({"rows": rows}, "rows", 0, self.rows)
        if rows.ndim != 1 or (np.diff(rows) <= 0).any():
            raise Damaged("rows are not in order")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``'s result; knobs may differ, and the new ones count from here on."""
        self.done = state_dict["done"]
        self.next_window = state_dict["next_window"]
        window = state_dict["window"]
        self.classifier.window = None if window is None else (window[0], window[1])
        before = state_dict["before"]
        self.before = None if before is None else Mark(**before)
        self.touches = state_dict["touches"]
        self.classifier.marks = tuple(Marks(**marks) for marks in state_dict["marks"])
        self.totals = Totals(**state_dict["totals"])


_STATE = {
    "done": int,
    "next_window": int | None,
    "window": tuple[int, int] | None,
    "before": Mark | None,
    "touches": NDArray[np.int64],
    "marks": list[Any],
    "totals": Totals,
}
_MARKS = {"first": int, "rows": NDArray[np.int64], "stale": NDArray[np.bool_], "total_rows": int}
"""The entries in a checkpoint, and their types."""


def batches_of(share: float, samples: int, batch_size: int) -> tuple[int, int]:
    """The number of batches in a ``share`` of an epoch of ``samples`` (at least 1), and in the whole
    epoch."""
    epoch = max(1, ceil(samples / batch_size))
    return max(1, round(share * epoch)), epoch
