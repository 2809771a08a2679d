"""Measures a machine once, family by family, and keeps the results; interrupted, it goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import log as log_of
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from recpipe.backend.matmul import float32_products
from recpipe.common.console import log
from recpipe.common.machine import TRIES, undisturbed
from recpipe.common.meter import Meter
from recpipe.errors import UserError, nearest_or_all
from recpipe.profiling.limits import Recheck, Sample, measured
from recpipe_perf_model.bench.caches import measure_caches
from recpipe_perf_model.bench.lookups import least, measure_lookups, measure_rows
from recpipe_perf_model.bench.loops import measure_loops
from recpipe_perf_model.bench.operators import measure_passes, measure_products
from recpipe_perf_model.bench.overheads import measure_overheads
from recpipe_perf_model.bench.ranks import measure_ranks
from recpipe_perf_model.bench.steps import measure_steps
from recpipe_perf_model.bench.tiers import measure_stores, measure_tiers
from recpipe_perf_model.kernels.linear import COLLECTIVE_FAMILY
from recpipe_perf_model.machine import Host, MachineProfile

Measure = Callable[[bool], Iterator[Sample]]
"""Yields the samples of a family; in the quick form, fewer of them if it is given True."""
ROW_BYTES = (16, 64, 256, 1024)
"""Sizes of the rows that are gathered."""


def limits(quick: bool) -> Iterator[Sample]:
    """The CPU's limits: matrix products at their best, streaming, and random rows."""
    yield from measured(ROW_BYTES[1:3] if quick else ROW_BYTES, torch.device("cpu"))


FAMILIES: dict[str, Measure] = {
    "limits": limits,
    "caches": measure_caches,
    "gemm": measure_products,
    "pointwise": measure_passes,
    "overheads": measure_overheads,
    "lookups": partial(least, measure_lookups),
    "loops": measure_loops,
    "tiers": partial(least, measure_tiers),
    "stores": partial(least, measure_stores),
    "steps": measure_steps,
    "rows": partial(least, measure_rows),
    COLLECTIVE_FAMILY: measure_ranks,
}
"""The one set of micro-benchmarks, in the order in which they run."""
SECONDS = {
    "limits": 4.0,
    "caches": 9.0,
    "gemm": 75.0,
    "pointwise": 77.0,
    "overheads": 3.0,
    "lookups": 10.0,
    "loops": 40.0,
    "tiers": 15.0,
    "stores": 30.0,
    "steps": 25.0,
    "rows": 8.0,
    COLLECTIVE_FAMILY: 12.0,
}
"""About how long a family takes in full, for the progress bar."""
REPEATED = ("gemm", "pointwise")
"""Families that are measured in passes until these agree. All others are measured twice, or once more if the
two do not agree."""
ALIKE = 1.15
"""Two measurements of a family agree if their samples' rates differ by at most this factor, in the median."""
CONTRADICTS = 1.5
"""A measured step contradicts the profile if it takes so many times what is predicted, or that many times
less."""
QUICK = 0.25
"""About the share of that time that the quick form takes."""


def calibrate(
    path: Path, quick: bool, only: Iterable[str] | None = None, families: dict[str, Measure] | None = None
) -> MachineProfile:
    """Measure what the profile at ``path`` lacks; it is saved after each family.

    A family that other programs disturbed is measured again, at most ``TRIES`` times. If that does not help
    it is told and not saved, and the next ones are tried once; the returned profile has it, ``disturbed``.
    A profile of another host is refused (``UserError``). One made in the quick form is measured again from
    the start if ``quick`` is not set. ``only``: the families to measure, by default all.
    """
    families = FAMILIES if families is None else families
    wanted = list(families) if only is None else list(only)
    unknown = next((name for name in wanted if name not in families), None)
    if unknown is not None:
        raise UserError(f"no family of micro-benchmarks '{unknown}': {nearest_or_all(unknown, families)}")
    profile = _begun(path, quick, families)
    lacking = [name for name in wanted if name not in profile.samples]
    expected = {name: SECONDS.get(name, 1.0) * (QUICK if quick else 1.0) for name in lacking}
    whole = sum(expected.values())
    done, tries = 0.0, TRIES
    with Meter() as meter, torch.random.fork_rng(devices=[]), float32_products(torch.device("cpu")):
        for name in lacking:

            def once(
                name: str = name, begun: float = perf_counter(), done: float = done
            ) -> tuple[Sample, ...]:
                samples: list[Sample] = []
                for sample in families[name](quick):
                    samples.append(sample)
                    if meter.due:
                        share = (done + min(perf_counter() - begun, expected[name])) / whole
                        meter.show(share, f"measuring {name}: {len(samples)} samples")
                return tuple(samples)

            taken = undisturbed(once, None if name in REPEATED else alike, tries)
            tries = 1 if taken.disturbed else TRIES
            done += expected[name]
            disturbed = {**profile.disturbed, **({name: taken.disturbed} if taken.disturbed else {})}
            samples = {**profile.samples, name: taken.value}
            profile = replace(profile, quick=profile.quick or quick, samples=samples, disturbed=disturbed)
            profile.save(path)
            log.info("measured %s: %d samples", name, len(taken.value))
            if taken.disturbed:
                log.warning("%s is not kept: %s", name, taken.disturbed)
    return profile


def alike(one: Sequence[Sample], other: Sequence[Sample]) -> bool:
    """Whether two measurements of a family agree, in what both have measured."""
    before, after = _rates(one), _rates(other)
    apart = [abs(log_of(after[what] / rate)) for what, rate in before.items() if what in after]
    return not apart or median(apart) <= log_of(ALIKE)


def _rates(samples: Sequence[Sample]) -> dict[tuple[object, ...], float]:
    """Amounts per second, by what was run with which sizes."""
    rates: dict[tuple[object, ...], float] = {}
    for sample in samples:
        sizes = dict(sample.at)
        amount = float(sizes.pop("amount", 1.0))
        rates[sample.kind, *sorted(sizes.items())] = amount / sample.seconds
    return rates


def contradicts(predicted: float, measured: float, disturbed: bool) -> bool:
    """Whether a step's ``measured`` seconds contradict the profile by which they were ``predicted``. One that
    was ``disturbed`` only does if it is too short."""
    return predicted > CONTRADICTS * measured or (not disturbed and measured > CONTRADICTS * predicted)


def recheck(path: Path, families: dict[str, Measure] | None = None) -> Recheck | None:
    """Measure the limits of the profile at ``path`` again, which a measured step contradicts; None if there
    is no profile.

    Where they are others now, the profile is stale: all that it has is measured again in the quick form.
    """
    if not path.exists():
        return None
    families = FAMILIES if families is None else families
    kept = MachineProfile.load(path)
    log.info("a measured step contradicts this machine's profile: measuring its limits again")
    taken = undisturbed(lambda: tuple(families["limits"](True)), alike)
    if taken.disturbed:
        return Recheck(f"this machine's limits cannot be measured again now: {taken.disturbed}", False)
    if alike(kept.samples.get("limits", ()), taken.value):
        words = "this machine's limits, measured again, are those of its profile: the prediction is off"
        return Recheck(words, True)
    others = {name: samples for name, samples in kept.samples.items() if name not in families}
    made = datetime.now(UTC).isoformat(timespec="seconds")
    replace(kept, samples=others, made=made, quick=False).save(path)
    found = calibrate(path, True, [name for name in families if name in kept.samples], families)
    words = f"the profile of {kept.made} was stale, its limits are others now; it was measured again"
    if found.disturbed:
        words += f", in part while {next(iter(found.disturbed.values()))}"
    return Recheck(words, True)


def measured_again(
    path: Path, only: Collection[str], families: dict[str, Measure] | None = None
) -> MachineProfile:
    """The profile at ``path`` with the families ``only`` measured again, as closely as before. It is saved,
    unless other programs disturbed that: the file then keeps what it had."""
    kept = MachineProfile.load(path)
    others = {name: samples for name, samples in kept.samples.items() if name not in only}
    replace(kept, samples=others).save(path)
    found = calibrate(path, kept.quick, only, families)
    if found.disturbed:
        kept.save(path)
    return found


def with_ranks(path: Path, ranks: int, quick: bool) -> MachineProfile:
    """The profile at ``path`` with messages between so many processes, which are started for that, beside
    those of other numbers; it is saved. ``UserError`` if they cannot be measured."""
    taken = undisturbed(lambda: tuple(measure_ranks(quick, ranks)), alike)
    found = taken.value
    if not found:
        raise UserError(f"messages between {ranks} ranks cannot be measured here: the log says why")
    profile = _begun(path, quick, FAMILIES).joined({COLLECTIVE_FAMILY: found}, {"ranks": float(ranks)})
    profile = replace(profile, quick=profile.quick or quick)
    if taken.disturbed:
        log.warning("messages between %d ranks are not kept: %s", ranks, taken.disturbed)
        return replace(profile, disturbed={**profile.disturbed, COLLECTIVE_FAMILY: taken.disturbed})
    profile.save(path)
    return profile


def _begun(path: Path, quick: bool, families: Collection[str]) -> MachineProfile:
    """The profile at ``path``, without ``families`` that were measured in the quick form if that is not asked
    for; or an empty one."""
    host = Host.current()
    fresh = MachineProfile(host, datetime.now(UTC).isoformat(timespec="seconds"), False)
    if not path.exists():
        return fresh
    found = MachineProfile.load(path, host)
    if not found.quick or quick:
        return found
    others = {name: samples for name, samples in found.samples.items() if name not in families}
    return replace(fresh, samples=others)  # what plugins measured stays
