"""Whether looking ahead has paid, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from recpipe.kit import milliseconds
from recpipe.plugin import RunFigures
from recpipe_bagpipe.bulk import BulkStore
from recpipe_bagpipe.policy import Lookahead

CALM = 0.05
"""The share of the store's time that is as good as nothing where training waits for it."""


def verdict(run: RunFigures, policies: Sequence[Lookahead], bulks: Sequence[BulkStore], window: float) -> str:
    """What was hidden, and what the window did, of so many batches on average."""
    reading = sum(b.background().read_seconds for b in bulks)
    writing = sum(b.background().write_seconds for b in bulks)
    waited = sum(b.waited for b in bulks)
    rows, groups = sum(b.announced_rows for b in bulks), sum(b.announced for b in bulks)
    if bulks and not rows:
        return "no row had to be read ahead"
    singles = min(policy.singles for policy in policies)
    if all(policy.pace.off for policy in policies) and singles:
        told = f"{singles} of {run.steps} batches read their rows themselves, as with lru"
        pace = policies[0].pace
        times = f"{milliseconds(pace.without)} ms without it, {milliseconds(pace.with_it)} with it"
        return f"looking ahead is off: a batch took {times}; {told}"
    if not bulks:
        return f"rows are in host memory; which of them stay was decided {window:.0f} batches ahead"
    shrunk = [policy.pace.calm_at for policy in policies if policy.pace.shrunk]
    if shrunk and len(shrunk) == len(policies) and waited < CALM * (reading + writing):
        size = max(policy.pace.wanted for policy in policies)
        told = f"from group {shrunk[0]} on less was read ahead, at last {size} batches at a time"
        return f"nothing was waited for: {told}"
    hidden = 1 - min(1.0, waited / max(1e-9, reading + writing))
    moved = f"{reading + writing:.1f} s of reading and writing in bulk"
    return f"{hidden:.0%} of {moved} were hidden behind training; {rows / groups:,.0f} rows a read"
