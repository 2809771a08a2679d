"""Measures a machine once, family by family, and keeps the results; interrupted, it goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import torch

from recpipe.backend.matmul import float32_products
from recpipe.common.console import Meter, log
from recpipe.errors import UserError, nearest_or_all
from recpipe.perf.bench import (
    collectives,
    copies,
    gemm,
    limits,
    lookups,
    overheads,
    pointwise,
    rows,
    steps,
    stores,
    tiers,
)
from recpipe.perf.bench import ranks as bench_ranks
from recpipe.perf.machine.profile import Host, MachineProfile, Sample

Measure = Callable[[bool], Iterator[Sample]]
"""Yields the samples of a family; in the quick form, fewer of them if it is given True."""

FAMILIES: dict[str, Measure] = {
    "limits": limits.measure,
    "gemm": gemm.measure,
    "pointwise": pointwise.measure,
    "overheads": overheads.measure,
    "lookups": lookups.measure,
    "tiers": tiers.measure,
    "stores": stores.measure,
    "copies": copies.measure,
    "steps": steps.measure,
    "rows": rows.measure,
    "collectives": bench_ranks.measure,
}
"""The one set of micro-benchmarks, in the order in which they run."""
SECONDS = {
    "limits": 4.0,
    "gemm": 75.0,
    "pointwise": 77.0,
    "overheads": 3.0,
    "lookups": 10.0,
    "tiers": 15.0,
    "stores": 30.0,
    "copies": 1.0,
    "steps": 25.0,
    "rows": 8.0,
    "collectives": 12.0,
}
"""About how long a family takes in full, for the progress bar."""
QUICK = 0.25
"""About the share of that time that the quick form takes."""


def calibrate(
    path: Path, quick: bool, only: Iterable[str] | None = None, families: dict[str, Measure] | None = None
) -> MachineProfile:
    """Measure what the profile at ``path`` lacks; it is saved after each family.

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
    done = 0.0
    with Meter() as meter, torch.random.fork_rng(devices=[]), float32_products(torch.device("cpu")):
        for name in lacking:
            samples: list[Sample] = []
            begun = perf_counter()
            for sample in families[name](quick):
                samples.append(sample)
                if meter.due:
                    share = (done + min(perf_counter() - begun, expected[name])) / whole
                    meter.show(share, f"measuring {name}: {len(samples)} samples")
            done += expected[name]
            profile = replace(
                profile,
                quick=profile.quick or quick,
                samples={**profile.samples, name: tuple(samples)},
            )
            profile.save(path)
            log.info("measured %s: %d samples", name, len(samples))
    return profile


def with_ranks(path: Path, ranks: int, quick: bool) -> MachineProfile:
    """The profile at ``path`` with messages between so many processes, which are started for that, beside
    those of other numbers; it is saved. ``UserError`` if they cannot be measured."""
    found = tuple(bench_ranks.measure(quick, ranks))
    if not found:
        raise UserError(f"messages between {ranks} ranks cannot be measured here: the log says why")
    profile = _begun(path, quick, FAMILIES)
    others = tuple(s for s in profile.samples.get(collectives.FAMILY, ()) if s.at["ranks"] != ranks)
    samples = {**profile.samples, collectives.FAMILY: (*others, *found)}
    profile = replace(profile, quick=profile.quick or quick, samples=samples)
    profile.save(path)
    return profile


def _begun(path: Path, quick: bool, families: Collection[str]) -> MachineProfile:
    """The profile at ``path``, without ``families`` that were measured in the quick form if that is not asked
    for; or an empty one."""
    host = Host.current()
    fresh = MachineProfile(host, datetime.now(UTC).isoformat(timespec="seconds"), False)
    if not path.exists():
        return fresh
    found = MachineProfile.of_host(host, path)
    if not found.quick or quick:
        return found
    others = {name: samples for name, samples in found.samples.items() if name not in families}
    return replace(fresh, samples=others)  # what plugins measured stays
