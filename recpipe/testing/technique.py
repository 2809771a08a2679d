"""Whether a plugin's technique took place in a run; otherwise the suite has compared a run with itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from recpipe.plugin.api import Contribution, Invariant
from recpipe.testing.runs import Trained
from recpipe.testing.samples import Epoch, faults
from recpipe.testing.updates import furthest, same_samples

REMEDY = "the technique did not take place; give the suite knobs or overrides with which it does"
_OF_SAMPLES = (Invariant.SAMPLE_SET, Invariant.SAMPLE_ORDER, Invariant.BATCH_SIZE, Invariant.ID_SPACE)


def idle(plugin: str, parts: Contribution, mine: Trained, pins: bool) -> Iterator[str]:
    """Parts of the plugin that did nothing in the run, each with a remedy."""
    steps = mine.record.steps
    tiers = mine.report["recipe"]["tiers"]
    words = " ".join(f"tiers.{key}={tiers[key]}" for key in ("policy", "resident_bytes"))
    run = f"{len(steps)} batches under {words}"
    if parts.splitter is not None and not any(len(step.bounds) > 1 for step in steps):
        yield (
            f"its splitter cut none of {run}; it can where some samples of a batch need cold rows and others "
            'do not: try overrides = ("tiers.policy=lfu", "tiers.resident_bytes=60%"), or a smaller budget '
            "where too few samples need cold rows"
        )
    groups = mine.report["assembly"]["tiers"]["groups"]
    owned = [number for number, group in enumerate(groups) if group["cache"] == plugin]
    moves = [step.moves[number] for step in steps if step.moves for number in owned]
    tiered = [each for each in moves if each is not None]
    if not tiered:
        return
    if not any(len(each["placed"]) for each in tiered):
        yield f"its cache placed no row in {run}; set knobs with which it decides within so few batches"
    elif not pins and not any((each["evicted"] >= 0).any() for each in tiered):
        yield (
            f"its cache evicted no row in {run}; set a smaller budget, "
            'overrides = ("tiers.resident_bytes=10%",), or pins = True where it never evicts'
        )


def kept(mine: Trained, plain: Trained, epoch: Epoch, alters: Collection[Invariant]) -> Iterator[Invariant]:
    """Invariants that the plugin declares to alter although the run kept them."""
    for invariant in _OF_SAMPLES:
        others = set(alters) - {invariant}
        if invariant in alters and not any(
            found is invariant for found, _ in faults(mine.record, epoch, others)
        ):
            yield invariant
    if Invariant.EXACT_GRADIENT in alters and same_samples(mine, plain):
        apart = furthest(mine, plain, 0.0)
        if not apart.most:
            yield Invariant.EXACT_GRADIENT
