"""``CostsSuite``: tests of what a plugin states of its costs, by the facts of a small made-up run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import ClassVar

import numpy as np

from recpipe.access.misses import SHARES, MissRates, RowSample
from recpipe.plugin.api import Plugin
from recpipe.plugin.bags import IndexBags
from recpipe.plugin.calls import Origin
from recpipe_perf_model.facts.facts import Facts, GroupFacts, Stretch
from recpipe_perf_model.facts.replay import KeptLookups
from recpipe_perf_model.kernels.linear import FEATURES
from recpipe_perf_model.statement import Statement
from recpipe_perf_model.tiers.predict import StatesCosts, costs_of

ROWS, LOOKUPS, BATCHES, SAMPLES = 20_000, 1_024, 24, 256


@cache
def sample_facts() -> Facts:
    """Two groups of tables, skewed ids, a tenth of the rows resident, an ssd store."""
    return Facts(
        batch_size=SAMPLES,
        epoch_samples=SAMPLES * BATCHES,
        steps=1000,
        groups=(_group(0, 16), _group(1, 64)),
        batch_bytes=40_000,
        share=0.1,
        store="ssd",
    )


def _group(seed: int, dim: int) -> GroupFacts:
    random = np.random.default_rng(seed)
    rates = MissRates(
        RowSample(ROWS, np.empty(0, np.int64)), [share * ROWS for share in SHARES], BATCHES // 2
    )
    drawn = [(ROWS * random.random(LOOKUPS) ** 4).astype(np.int64) for _ in range(BATCHES)]
    for rows in drawn:
        rates.add(rows)
    late = np.concatenate(drawn[BATCHES // 2 :])
    places = np.arange(len(late)) // (LOOKUPS // SAMPLES)
    return GroupFacts(
        table_rows=(ROWS // 2, ROWS // 2),
        dim=dim,
        record_bytes=4 * (dim + 1),
        features=LOOKUPS // SAMPLES,
        pooled=True,
        width=dim + 1,
        lookups=LOOKUPS,
        distinct=rates.lru.rows / BATCHES,
        repeated=0.0,
        curves={"lru": rates.lru, "lfu": rates.lfu, "hot": rates.hot},
        windows=rates.windows()[0],
        stretch=Stretch(BATCHES // 2, places, late, (late / ROWS).astype(np.float32)),
        kept=KeptLookups.of(
            [IndexBags(rows, np.arange(LOOKUPS + 1), SAMPLES) for rows in drawn],
            np.array([0, ROWS // 2, ROWS]),
        ),
    )


def wrong_costs(stated: Statement | None) -> Iterator[str]:
    """What no statement can say; nothing for None."""
    if stated is None:
        return
    groups = len(sample_facts().groups)
    if not stated.why:
        yield "its statement has no reason"
    if stated.phases and abs(sum(phase.share for phase in stated.phases) - 1) > 1e-6:
        yield "the shares of its statement's phases do not add up to 1"
    for phase in stated.phases:
        if len(phase.moved) != groups:
            yield "a phase of its statement has not one Moved for each group"
        for moved in phase.moved:
            if min(vars(moved).values()) < 0:
                yield f"its statement moves less than no rows: {moved}"
            if moved.placed + moved.slab < moved.read - 1e-6:
                yield f"its statement reads rows that go nowhere: {moved}"
    if not 0 <= stated.early < 1 or not 0 < stated.kept <= 1 or not 0 < stated.spread <= 1:
        yield "its statement has a share that is not between 0 and 1"
    if stated.ahead < 0 or stated.together < 1 or stated.memory < 0:
        yield "its statement has a number below what is possible"
    if stated.cold_bytes and len(stated.cold_bytes) != groups:
        yield "its statement's cold_bytes are not one for each group"
    for work in stated.works:
        if work.kind not in FEATURES or work.times <= 0:
            yield f"its statement adds work of kind '{work.kind}', which no benchmark measures"
    yield from wrong_costs(stated.instead)


class CostsSuite:
    """Derive a plugin's ``recpipe.testing.PluginSuite`` from it as well, if the plugin states its costs."""

    plugin: ClassVar[str] = ""

    def make(self) -> Plugin:
        """``PluginSuite.make``."""
        raise NotImplementedError("derive from PluginSuite, too")

    def test_states_costs_that_add_up(self) -> None:
        made = [self.make(), self.make()]
        assert isinstance(made[0], StatesCosts), f"plugin '{self.plugin}': it has no method costs(facts)"
        stated, again = (costs_of(Origin(self.plugin), plugin, sample_facts()) for plugin in made)
        assert stated == again, f"plugin '{self.plugin}': costs() says something else when it is asked again"
        for fault in wrong_costs(stated):
            raise AssertionError(f"plugin '{self.plugin}': {fault}. Correct costs(), or leave it out")
