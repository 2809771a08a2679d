"""FAE as a plugin: an epoch order, a policy for the tables' cache, a callback, figures for the report."""

from __future__ import annotations

from recpipe.plugin import (
    Context,
    Contribution,
    Figure,
    Invariant,
    Plugin,
    PluginError,
    RunFigures,
)
from recpipe_fae.schedule import Scheduler


class FAE(Plugin):
    """Hot rows stay resident; mini-batches hold only hot samples, or only cold ones (VLDB 2022).

    Each update is exactly that of its mini-batch, but the order of samples differs.
    """

    api = (2, 0)
    alters = frozenset({Invariant.SAMPLE_ORDER})

    def __init__(
        self,
        *,
        sample: float,
        hot: str,
        threshold: float,
        rate: float,
        schedule: bool,
        held_out_samples: int,
    ) -> None:
        for name, value in (("sample", sample), ("threshold", threshold)):
            if not 0 < value <= 1:
                raise PluginError(f"plugins.fae.{name}={value}: give a share above 0, up to 1")
        if hot not in ("top_k", "threshold"):
            raise PluginError(f"plugins.fae.hot={hot} is unknown; choose top_k or threshold")
        if not 1 <= rate <= 100:
            raise PluginError(f"plugins.fae.rate={rate}: give percent from 1 to 100")
        if not held_out_samples >= 1:
            raise PluginError(f"plugins.fae.held_out_samples={held_out_samples}: must be at least 1")
        self.sample, self.threshold = sample, threshold if hot == "threshold" else None
        self.rate, self.schedule, self.held_out_samples = float(rate), schedule, held_out_samples

    def contribute(self, ctx: Context) -> Contribution:
        """The order of the epoch, the cache of all tables, the scheduler's callback, and the report."""
        from recpipe_fae.callback import ShuffleScheduler
        from recpipe_fae.prepare import HotAndCold, HotRule, HotTables, Preparation

        scheduler = Scheduler(self.rate, self.schedule)
        prepared = Preparation(ctx, HotRule(self.sample, self.threshold))

        def figures(run: RunFigures) -> dict[str, Figure]:
            classes = prepared.classes
            hot, cold = classes.samples(True), classes.samples(False)
            return {
                "hot_rows": len(prepared.hot_rows),
                "hot_bytes": prepared.hot_bytes,
                "hot_access_share": classes.hot_lookups / max(1, classes.lookups),
                "hot_input_share": hot / max(1, hot + cold),
                "swaps": scheduler.swaps,
                "rates": list(scheduler.history),
                "held_out_losses": list(scheduler.losses),
                "profile_seconds": prepared.profile_seconds,
                "profile_reused": int(prepared.reused),
                "classification_seconds": prepared.classify_seconds,
            }

        return Contribution(
            order=HotAndCold(prepared, scheduler),
            cache=[HotTables(prepared, scheduler)],
            callbacks=[ShuffleScheduler(ctx, prepared, scheduler, self.held_out_samples)],
            report=[figures],
        )
