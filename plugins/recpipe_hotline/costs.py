"""What Hotline costs and saves: max(T_fetch, T_popular) + T_rest, for rows that a cache by counts misses."""

from __future__ import annotations

from dataclasses import replace

from recpipe_perf_model import Facts, Phase, Statement, Work

from recpipe.plugin import micro_batch_step
from recpipe_hotline.policy import Learning, PopularRows


def statement(facts: Facts, learning: Learning, min_micro_batch: int) -> Statement:
    """Its popular rows are those that its policy keeps, about those of a cache by counts. Batches are cut
    only where steps are shorter so: the statement that they are not is the alternative."""
    cached = facts.replayed(("hotline", learning), lambda space: PopularRows(space, learning), like="lfu")
    moved, popular = cached.moved, cached.popular
    step = micro_batch_step(facts.batch_size)
    first = int(popular * facts.batch_size) // step * step
    cut = min(first, facts.batch_size - first) >= max(1, min_micro_batch, step)
    whole = Statement(
        why=(
            f"popular rows stay resident, {sum(m.read for m in moved):,.0f} others are read for a batch; "
            f"{popular:.0%} of the samples need none of these and can train while they are read"
        ),
        phases=(Phase(moved=moved),),
        plans="lfu",
        memory=sum(4 * int(facts.share * group.rows) for group in facts.groups),
    )
    if not cut:
        return whole
    lookups = sum(group.lookups for group in facts.groups)
    bags = sum(facts.bags(group) for group in facts.groups)
    order = Work(name="order samples", kind="reorder", at={"lookups": lookups, "bags": bags})
    return replace(whole, early=first / facts.batch_size, works=(order,), instead=whole)
