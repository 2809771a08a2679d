"""Slipstream's callback in the training loop: takes snapshots and acts on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
from numpy.typing import NDArray

from recpipe.kit import Damaged, entries, within
from recpipe.plugin import Bags, Batch, Mark, RowView
from recpipe_slipstream.classifier import (
    SEARCHES,
    InputClassifier,
    Marks,
    changes,
    classify,
    count_touches,
    input_scores,
    stale_share,
)
from recpipe_slipstream.verdict import LEAST, SHORTER, TRIAL, Method, Steps, Totals

FILLED = 0.01
"""Hot rows have settled if a batch adds less than this share to them, or if no slot is empty."""


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
            method.stale_lookups, lookups, method.step, seed if method.control == "random" else None
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
        self.steps = Steps()

    # -- Lightning's hooks -------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Count the batch, and do the work that is due before the next one. All trainers use the times that
        the first one has measured."""

        def agreed(value: float) -> float:
            return float(pl_module.trainers.gather(np.array([value]))[0][0])

        self.after_batch(agreed)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step in which an evaluation happens is not timed."""
        self.steps.pause()

    def start(self, view: RowView) -> None:
        """Start, or continue after ``done`` batches, with the rows in ``view``."""
        self.view, self._resident = view, view.resident_count

    def after_batch(self, agreed: Callable[[float], float] = float) -> None:
        """Handle a batch that has been trained; ``agreed`` chooses one value for all trainers."""
        view = self.view
        assert view is not None, "training has begun"
        before, self._resident = self._resident, view.resident_count
        self._gained = self._resident - before
        seen = self.classifier.trained(self.done)
        marked = self.classifier.in_force(self.done) is not None
        self.steps.end(marked)
        totals = self.totals
        totals.samples += seen.samples
        totals.hot += seen.hot
        totals.dropped += seen.dropped
        totals.marked_hot += seen.hot
        totals.marked_dropped += seen.dropped
        totals.classified += seen.samples * marked
        totals.marked_batches += marked
        totals.classify_seconds += seen.seconds
        if self.before is not None:
            count_touches(self.touches, self.before.rows, seen.rows)
        self.done += 1
        times = self.steps.medians if self.method.tries and totals.marked_batches == TRIAL else None
        if times is not None and agreed(times[1] / times[0]) >= SHORTER:
            # Steps under marks have not become shorter. Batch ``done`` may have been classified already.
            self.classifier.stopped_at = self.done + 1
            self.next_window = None
        self._advance(view)

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
            # A window before hot rows have settled in their slots would see few of them.
            resident = self._resident
            settled = resident > 0 and (resident == view.slots or self._gained < FILLED * resident)
            if settled and first >= self.next_window:
                if self.method.tries and not self._offers(view):
                    self.next_window = self._next(first)
                else:
                    self.classifier.window = (first, first + self.method.window)
        elif self.done == window[0]:
            self.before = view.mark()
            self.touches = np.zeros(len(self.before.rows), np.int64)
        elif self.done == window[1]:
            self._mark(view, window)
        else:
            return
        self.totals.snapshot_seconds += perf_counter() - start
        self.steps.pause()

    def _next(self, first: int) -> int | None:
        """When the window after the one that began with batch ``first`` may begin."""
        every = self.method.snapshot_every
        return None if every is None else first + every

    def _offers(self, view: RowView) -> bool:
        """Whether enough inputs are hot now for something to be had."""
        rows = view.resident()
        resident = Marks(0, rows, np.zeros(len(rows), bool), self.rows)
        hot = [classify(resident, bags, None)[0] for bags in self._sampled(self.done)]
        self.totals.offered_share = float(np.concatenate(hot).mean()) if hot else 0.0
        enough = self.method.drop * self.totals.offered_share >= LEAST
        self.totals.refused = "" if enough else "hot"
        return enough

    def _mark(self, view: RowView, window: tuple[int, int]) -> None:
        """End the window: take the second snapshot, find the threshold, mark rows."""
        assert self.before is not None
        before = self.before
        moved = changes(before.rows, view.moved(before), self.touches, self.method.min_touches)
        self.before, self.classifier.window = None, None
        self.next_window = self._next(window[0])
        if not len(moved.rows):
            # The hot set was replaced meanwhile, for example when another plugin's phase ended: try again.
            self.next_window = self.done
            return
        start = perf_counter()
        totals, inputs = self.totals, 0
        of_batches = [np.empty(0, np.float32)]
        for bags in self._sampled(window[1]):
            of_batches.append(input_scores(moved, bags, self.method.stale_lookups))
            inputs += bags.batch_size
        scores = np.concatenate(of_batches)
        totals.threshold = SEARCHES[self.method.search](scores, self.method.drop)
        totals.sampled_inputs = len(scores)
        totals.sampled_share = stale_share(scores, totals.threshold)
        totals.snapshots += 1
        totals.offered_share = len(scores) / max(1, inputs)
        enough = totals.sampled_share * totals.offered_share >= LEAST
        totals.refused = "" if enough or not self.method.tries else "stale"
        totals.marked_hot = totals.marked_dropped = 0
        if not totals.refused:
            stale = moved.stale(totals.threshold)
            marks = Marks(self.done + 1, moved.rows, stale, self.rows)
            self.classifier.marks = (*self.classifier.marks[-1:], marks)
        seconds = perf_counter() - start
        totals.search_seconds += seconds
        totals.snapshot_seconds -= seconds

    def _sampled(self, end: int) -> Iterator[Bags]:
        """Batches chosen at random from the rest of the epoch after batch ``end``."""
        rest = np.arange(end % self.method.epoch_batches, self.method.epoch_batches)
        rng = np.random.default_rng((self.seed, self.totals.snapshots))
        chosen = np.sort(rng.choice(rest, min(self.method.sampled_batches, len(rest)), replace=False))
        for number in chosen.tolist():
            yield self.classifier.lookups(next(self.batches(number)))

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as of the last trained batch."""
        before = self.before
        return {
            "done": self.done,
            "next_window": self.next_window,
            "window": self.classifier.window,
            "stopped_at": self.classifier.stopped_at,
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
        self.classifier.stopped_at = state_dict["stopped_at"]
        self.before = None if before is None else Mark(**before)
        self.touches = state_dict["touches"]
        self.classifier.marks = tuple(Marks(**marks) for marks in state_dict["marks"])
        self.totals = Totals(**state_dict["totals"])


_STATE = {
    "done": int,
    "next_window": int | None,
    "window": tuple[int, int] | None,
    "stopped_at": int | None,
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
