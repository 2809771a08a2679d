"""Slipstream as a plugin: a skipper, a callback that tells it what is stale, a hot set, figures."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import HotSet, group_rows, load_profile, table_bases, top_rows
from recpipe.plugin import (
    Batch,
    Cache,
    CachePolicy,
    Context,
    Contribution,
    Figure,
    Invariant,
    Plugin,
    PluginError,
    RowIds,
    RowSpace,
    RowView,
    Skipper,
)
from recpipe_slipstream.callback import StaleInputs, batches_of
from recpipe_slipstream.classifier import SEARCHES, SIZES, STALE
from recpipe_slipstream.verdict import Method, Totals, sentence

if TYPE_CHECKING:
    from recpipe_perf_model import Facts, Statement


class Slipstream(Plugin):
    """Leaves out inputs whose popular rows have stopped changing (2024).

    Not exact: inputs that are left out update neither rows nor the dense part.
    """

    api = (2, 4)
    conflicts: Mapping[str, str] = {
        "het": "het's tables are not tiers, so slipstream finds no resident rows to compare"
    }
    # Records must begin with weights, and ids must be the data module's own: inputs are sampled from there.
    relies_on = frozenset({Invariant.TABLE_LAYOUT, Invariant.ID_SPACE})
    alters = frozenset({Invariant.EXACT_GRADIENT, Invariant.SAMPLE_SET, Invariant.BATCH_SIZE})

    def __init__(
        self,
        *,
        drop: float,
        window: float,
        start: int,
        sample: float,
        stale_lookups: int | None,
        min_touches: int,
        snapshot_every: int | None,
        threshold: str,
        freeze_stale_rows: bool,
        control: str | None,
        skip: str,
    ) -> None:
        for knob, share in (("window", window), ("sample", sample)):
            if not 0 < share <= 1:
                raise _wrong(knob, share, "give a share of an epoch's batches above 0, up to 1")
        if not 0 <= drop < 1:
            raise _wrong("drop", drop, "give a share of hot inputs from 0 (off) to below 1")
        for name, count, least in (
            ("start", start, 0),
            ("min_touches", min_touches, 0),
            ("stale_lookups", stale_lookups, 1),
            ("snapshot_every", snapshot_every, 1),
        ):
            if count is not None and count < least:
                raise _wrong(name, count, f"must be at least {least}")
        if threshold not in SEARCHES:
            raise _wrong("threshold", threshold, f"choose {' or '.join(SEARCHES)}")
        if control not in (None, "random"):
            raise _wrong("control", control, "choose random, or null for Slipstream itself")
        if control and freeze_stale_rows:
            raise _wrong("control", control, "it knows no stale rows to freeze: set one of the two")
        if skip not in ("auto", "always"):
            raise _wrong("skip", skip, "choose auto or always; plugins.slipstream.drop=0 is never")
        self.control, self.tries = control, skip == "auto"
        self.drop, self.window, self.start, self.sample = drop, window, start, sample
        self.stale_lookups, self.min_touches = stale_lookups, min_touches
        self.snapshot_every, self.threshold = snapshot_every, threshold
        self.freeze_stale_rows = freeze_stale_rows
        if drop == 0:
            self.alters = frozenset()

    def contribute(self, ctx: Context) -> Contribution:
        """The skipper with its callback, and a hot set in case no other plugin has one."""
        window, epoch = batches_of(self.window, ctx.epoch_samples, ctx.batch_size)
        hot_set = HotTables(ctx)
        if self.drop == 0:
            return Contribution(cache=[hot_set], report=[lambda run: figures(None)])
        if self.snapshot_every is not None and self.snapshot_every < window + 2:
            raise _wrong(
                "snapshot_every",
                self.snapshot_every,
                f"a window takes {window} batches, so give at least {window + 2}, or lower "
                "plugins.slipstream.window",
            )
        method = Method(
            drop=self.drop,
            window=window,
            start=self.start,
            sampled_batches=batches_of(self.sample, ctx.epoch_samples, ctx.batch_size)[0],
            epoch_batches=epoch,
            stale_lookups=self.stale_lookups,
            min_touches=self.min_touches,
            snapshot_every=self.snapshot_every,
            search=self.threshold,
            control=self.control,
            step=-(-ctx.batch_size // SIZES),
            tries=self.tries,
        )
        tables = ctx.tables.values()
        rows, dim = sum(table.rows for table in tables), max(table.dim for table in tables)
        callback = StaleInputs(method, ctx.batches, ctx.lookups, ctx.seed, rows, dim)
        return Contribution(
            skipper=(Frozen if self.freeze_stale_rows else Stale)(callback),
            cache=[hot_set],
            callbacks=[callback],
            report=[lambda run: figures(callback, self._altered(callback.totals))],
        )

    def _altered(self, totals: Totals) -> str:
        """Which of the invariants this run altered: none if no input was left out, and no row frozen."""
        frozen = self.freeze_stale_rows and totals.marked_batches > 0
        return ", ".join(sorted(i.name for i in self.alters)) if totals.dropped or frozen else "nothing"

    def costs(self, facts: Facts) -> Statement:
        """State what the performance model needs for a prediction without a run."""
        from recpipe_slipstream.costs import statement

        return statement(facts, self.drop)


def _wrong(knob: str, value: object, remedy: str) -> PluginError:
    return PluginError(f"plugins.slipstream.{knob}={value}: {remedy}")


def figures(callback: StaleInputs | None, altered: str = "nothing") -> dict[str, Figure]:
    """What was left out, and the threshold; all 0 if the plugin is off (None)."""
    totals = callback.totals if callback else Totals()
    marks = callback.classifier.marks[-1:] if callback else ()
    verdict = "nothing was left out, as asked for (plugins.slipstream.drop=0)"
    if callback:
        classifier, method = callback.classifier, callback.method
        verdict = sentence(totals, callback.steps, method.drop, classifier.stopped_at)
    return {
        "verdict": verdict,
        "altered": altered,
        "dropped_input_share": totals.dropped / max(1, totals.samples),
        "hot_input_share": totals.hot / totals.classified if totals.classified else totals.offered_share,
        "dropped_share": totals.dropped / max(1, totals.samples),
        "dropped_hot_share": totals.dropped / max(1, totals.hot),
        "dropped_samples": totals.dropped,
        "hot_samples": totals.hot,
        "threshold": totals.threshold,
        "sampled_share": totals.sampled_share,
        "realised_share": totals.marked_dropped / max(1, totals.marked_hot),
        "sampled_inputs": totals.sampled_inputs,
        "hot_rows": sum(len(m.rows) for m in marks),
        "stale_rows": sum(int(m.stale.sum()) for m in marks),
        "snapshots": totals.snapshots,
        "snapshot_seconds": totals.snapshot_seconds,
        "search_seconds": totals.search_seconds,
        "classify_seconds": totals.classify_seconds,
        "freeze_seconds": totals.freeze_seconds,
    }


class HotTables(Cache):
    """Keeps the rows with the most lookups in a sample of the epoch resident, as many as fit; they never
    change."""

    fallback = True

    def __init__(self, context: Context) -> None:
        self.context = context

    def policy(self, space: RowSpace) -> CachePolicy:
        """A fixed hot set for ``space``, from the shared popularity profile."""
        counts = load_profile(self.context).dense(int(table_bases(self.context)[-1]))
        mine = counts[group_rows(self.context, space.group)]
        return HotSet(space, top_rows(mine, space.slots))


class Stale(Skipper):
    """Leaves out the inputs that ``inputs`` classifies as stale."""

    def __init__(self, inputs: StaleInputs) -> None:
        self.inputs = inputs

    def begin(self, view: RowView) -> None:
        """Start, before the first batch is read."""
        self.inputs.start(view)

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        """Which inputs are not stale."""
        return self.inputs.classifier.keep(batch, number)


class Frozen(Stale):
    """The strict variant: a stale row keeps every bit while its mark is in force."""

    def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor | None:
        """Which rows are not stale."""
        start = perf_counter()
        marks = self.inputs.classifier.in_force(self.inputs.done)
        stay = None if marks is None else torch.from_numpy(marks.codes[rows] != STALE)
        self.inputs.totals.freeze_seconds += perf_counter() - start
        return stay
