"""Hotline as a plugin: a policy for the tables' cache, a splitter for batches, figures for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import (
    Batch,
    Cache,
    CachePolicy,
    Context,
    Contribution,
    Figure,
    Plugin,
    PluginError,
    RowSpace,
    RunFigures,
    Split,
    Splitter,
    micro_batch_step,
)
from recpipe_hotline.policy import Learning, PopularRows

if TYPE_CHECKING:
    from recpipe_perf_model import Facts, Statement


class Hotline(Plugin):
    """Popular rows stay resident; popular samples train while the others' cold rows are fetched (ISCA'24).

    Exact: one update per mini-batch, equal to the run without it up to the order of float sums.
    """

    api = (2, 12)

    def __init__(
        self,
        *,
        learn_batches: int,
        growth: float,
        relearn_every: int,
        sample: float,
        decay: int,
        min_micro_batch: int,
        profile: bool = False,
    ) -> None:
        for name, value, least in (
            ("learn_batches", learn_batches, 1),
            ("relearn_every", relearn_every, 1),
            ("decay", decay, 1),
            ("min_micro_batch", min_micro_batch, 0),
            ("growth", growth, 1.0),
        ):
            if not value >= least:
                raise PluginError(f"plugins.hotline.{name}={value}: must be at least {least}")
        if not 0 < sample <= 1:
            raise PluginError(f"plugins.hotline.sample={sample}: give a share of batches above 0, up to 1")
        self.learning = Learning(learn_batches, growth, relearn_every, sample, decay)
        self.min_micro_batch = min_micro_batch
        self.profile = profile

    def contribute(self, ctx: Context) -> Contribution:
        """The cache of all tables, the splitter, and the report."""
        popular = PopularTables(self.learning, ctx if self.profile else None)
        splitter = PopularFirst(max(self.min_micro_batch, micro_batch_step(ctx.batch_size)))
        return Contribution(
            splitter=splitter,
            cache=[popular],
            report=[lambda run: figures(popular.policies, splitter, run)],
        )

    def costs(self, facts: Facts) -> Statement:
        """State what the performance model needs for a prediction without a run."""
        from recpipe_hotline.costs import statement

        return statement(facts, self.learning, self.min_micro_batch)


class PopularTables(Cache):
    """Makes the policies and keeps them for the report."""

    def __init__(self, learning: Learning, profiled: Context | None = None) -> None:
        self.learning = learning
        self.profiled = profiled
        """The source of the popularity profile; None: start without one."""
        self.policies: list[PopularRows] = []
        """The policy of each group of tables."""

    def policy(self, space: RowSpace) -> CachePolicy:
        """The policy for ``space``."""
        policy = PopularRows(space, self.learning)
        if self.profiled is not None:
            from recpipe.kit import group_rows, load_profile, table_bases

            counts = load_profile(self.profiled).dense(int(table_bases(self.profiled)[-1]))
            policy.counts = counts[group_rows(self.profiled, space.group)]
        self.policies.append(policy)
        return policy


def figures(policies: Sequence[PopularRows], splitter: PopularFirst, run: RunFigures) -> dict[str, Figure]:
    """Hotline's figures: shares of samples and lookups that were popular, traffic, and hidden fetches; where
    another plugin's splitter is used, those of its cache alone.

    Each of ``rows_not_moved`` would have been fetched and written back without resident rows.
    ``speedup_bound`` is (T_fetch + T_pop + T_non) / (max(T_fetch, T_pop) + T_non) with this run's times. It
    bounds what hiding fetches behind popular micro-batches can gain.
    """
    of_cache: dict[str, Figure] = {
        "popular_lookup_share": sum(p.hits for p in policies) / max(1, sum(p.lookups for p in policies)),
        "rows_not_moved": sum(p.rows_kept for p in policies),
        "cold_rows_read": run.io.rows_read,
        "cold_bytes_read": run.io.bytes_read,
        "learnings": max(p.learnings for p in policies),
        "replaced_rows": sum(p.replaced_rows for p in policies),
    }
    if "splitter" not in run.fills:
        return {"verdict": "batches were not cut by Hotline: another splitter was preferred", **of_cache}
    fetch, pop, non = run.io.fetch_seconds, run.before_cold_seconds, run.after_cold_seconds
    hidden = max(0.0, fetch - run.io.wait_seconds)
    serial, overlapped = fetch + pop + non, max(fetch, pop) + non
    return of_cache | {
        "verdict": run.splitting,
        "popular_sample_share": splitter.popular / max(1, splitter.samples),
        "split_batch_share": run.split_batches / max(1, splitter.batches),
        "fetch_hidden_seconds": hidden,
        "fetch_waited_seconds": run.io.wait_seconds,
        "popular_seconds": pop,
        "non_popular_seconds": non,
        "speedup_bound": serial / overlapped if overlapped > 0 else 1.0,
    }


class PopularFirst(Splitter):
    """Puts samples whose rows are all resident first: they train while the others' cold rows are fetched."""

    def __init__(self, min_micro_batch: int) -> None:
        self.min_micro_batch = min_micro_batch
        self.samples = 0
        self.popular = 0
        self.batches = 0

    def split(self, batch: Batch, needs_cold: NDArray[np.bool_]) -> Split:
        """Popular samples, then the others, each in their own order.

        If either would have fewer than ``min_micro_batch`` samples, the batch is not cut: a small matrix
        product costs more than the wait it hides.
        """
        popular = np.flatnonzero(~needs_cold)
        others = np.flatnonzero(needs_cold)
        self.batches += 1
        self.samples += len(needs_cold)
        self.popular += len(popular)
        if min(len(popular), len(others)) < max(1, self.min_micro_batch):
            return Split(np.arange(len(needs_cold)), (len(needs_cold),))
        return Split(np.concatenate((popular, others)), (len(popular), len(needs_cold)))
