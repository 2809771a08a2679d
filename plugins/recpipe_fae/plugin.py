"""FAE as a plugin: an epoch order, a policy for the tables' cache, a callback, figures for the report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from recpipe.plugin import Context, Contribution, Figure, Invariant, Plugin, PluginError
from recpipe_fae.schedule import Scheduler

if TYPE_CHECKING:
    from recpipe_perf_model import Facts, Statement

    from recpipe_fae.callback import ShuffleScheduler
    from recpipe_fae.estimate import Steps
    from recpipe_fae.prepare import Preparation


class FAE(Plugin):
    """Hot rows stay resident; mini-batches hold only hot samples, or only cold ones (VLDB 2022).

    Each update is exactly that of its mini-batch, but the order of samples differs. With ``phases=never``
    the hot rows are a plain cache, and nothing is altered.
    """

    api = (2, 8)
    alters = frozenset({Invariant.SAMPLE_ORDER})

    def __init__(
        self,
        *,
        sample: float,
        hot: str,
        threshold: float,
        phases: str,
        rate: float,
        schedule: bool,
        loss_samples: int,
        held_out_samples: int | None,
    ) -> None:
        for name, value in (("sample", sample), ("threshold", threshold)):
            if not 0 < value <= 1:
                raise PluginError(f"plugins.fae.{name}={value}: give a share above 0, up to 1")
        if hot not in ("top_k", "threshold"):
            raise PluginError(f"plugins.fae.hot={hot} is unknown; choose top_k or threshold")
        if phases not in ("auto", "always", "never"):
            raise PluginError(f"plugins.fae.phases={phases} is unknown; choose auto, always or never")
        if not 1 <= rate <= 100:
            raise PluginError(f"plugins.fae.rate={rate}: give percent from 1 to 100")
        if not loss_samples >= 1:
            raise PluginError(f"plugins.fae.loss_samples={loss_samples}: must be at least 1")
        if held_out_samples is not None:
            raise PluginError(
                f"plugins.fae.held_out_samples={held_out_samples}: the held-out part is for evaluation alone "
                "now, and the scheduler reads the loss of training samples; set plugins.fae.loss_samples"
            )
        self.sample, self.threshold = sample, threshold if hot == "threshold" else None
        self.phases, self.rate, self.schedule = phases, float(rate), schedule
        self.loss_samples = loss_samples if schedule else None
        if phases == "never":
            self.alters = frozenset()

    def contribute(self, ctx: Context) -> Contribution:
        """The order of the epoch, the cache of all tables, the scheduler's callback, and the report."""
        from recpipe_fae.callback import ShuffleScheduler
        from recpipe_fae.prepare import HotAndCold, HotTables, Preparation

        scheduler = Scheduler(self.rate, self.schedule, self.phases == "auto")
        prepared = Preparation(
            ctx,
            sample=self.sample,
            threshold=self.threshold,
            phases=self.phases,
            loss_samples=self.loss_samples,
        )
        tables = [HotTables(prepared, scheduler)]
        if self.phases == "never":
            return Contribution(cache=tables, report=[lambda run: figures(prepared, scheduler, None)])
        callback = ShuffleScheduler(ctx, prepared, scheduler)
        return Contribution(
            order=HotAndCold(prepared, scheduler),
            cache=tables,
            callbacks=[callback],
            report=[lambda run: figures(prepared, scheduler, callback, "order" in run.fills)],
        )

    def costs(self, facts: Facts) -> Statement:
        """State what the performance model needs for a prediction without a run."""
        from recpipe_fae.costs import statement

        return statement(facts, self.phases, self.sample, self.threshold)


def figures(
    prepared: Preparation, scheduler: Scheduler, callback: ShuffleScheduler | None, orders: bool = True
) -> dict[str, Figure]:
    """The hot set, the scheduler's decisions, the times before training, and the verdict.

    ``orders``: whether its order is the run's. Shares are of all inputs if these were classified, else of the
    estimate's stretch.
    """
    from recpipe_fae.estimate import sentence

    estimate, separates = prepared.estimate, prepared.separates and orders
    if separates:
        classes = prepared.classes
        hot, cold = classes.samples(True), classes.samples(False)
        estimate = replace(
            estimate,
            hot_input_share=hot / max(1, hot + cold),
            hot_access_share=classes.hot_lookups / max(1, classes.lookups),
        )
    steps: Steps = callback.steps if callback is not None else ((), (), ())
    stopped = scheduler.plain_from is not None
    verdict = sentence(prepared.phases, separates, stopped, steps, estimate)
    if callback is not None and not orders:
        verdict = "mini-batches were not separated by FAE: another order was preferred"
    return {
        "verdict": verdict,
        "altered": "SAMPLE_ORDER" if separates else "nothing",
        "hot_rows": len(prepared.hot_rows),
        "hot_bytes": prepared.hot_bytes,
        "hot_access_share": estimate.hot_access_share,
        "hot_input_share": estimate.hot_input_share,
        "separated_fetch_share": estimate.fetch_share,
        "phases": int(separates and not stopped),
        "swaps": scheduler.swaps,
        "rates": list(scheduler.history),
        "slice_losses": list(scheduler.losses),
        "held_out_losses": list(scheduler.losses),
        "profile_seconds": prepared.profile_seconds,
        "profile_reused": int(prepared.reused),
        "estimate_seconds": prepared.estimate_seconds,
        "classification_seconds": prepared.classify_seconds,
    }
