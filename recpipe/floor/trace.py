"""What torch's profiler saw of the steps: the phases of each, and the operators that took longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from recpipe.phases import PHASES, PREFIX

STEP = f"{PREFIX}step"
"""The range of a whole step in the trace."""
MICROSECONDS = 1e3
"""In a millisecond."""
OVERHEAD = "overhead"
"""What a step takes beyond its phases."""


@dataclass(frozen=True)
class ProfiledStep:
    """One step under the profiler, in milliseconds."""

    ms: float
    phases: Mapping[str, float]
    """By name; those of ``PHASES`` that the step went through."""


def profiled_steps(events: Sequence[Any]) -> list[ProfiledStep]:
    """The steps among a profile's ``events``; a phase belongs to the step in which it starts, in its thread.

    ``events``: as of ``torch.profiler.profile.events()``, each with ``name``, ``time_range`` (microseconds),
    ``thread`` and ``device_type``: on a GPU each range is there a second time, as the device saw it.
    """
    ranges = [e for e in events if e.name.startswith(PREFIX) and e.device_type.name == "CPU"]
    found = []
    for step in sorted((e for e in ranges if e.name == STEP), key=lambda e: e.time_range.start):
        start, end = step.time_range.start, step.time_range.end
        phases: dict[str, float] = {}
        for event in ranges:
            name = event.name.removeprefix(PREFIX)
            here = event.thread == step.thread and start <= event.time_range.start < end
            if here and name in PHASES:
                phases[name] = phases.get(name, 0.0) + event.time_range.elapsed_us() / MICROSECONDS
        found.append(ProfiledStep((end - start) / MICROSECONDS, phases))
    return found


def mean_step(steps: Sequence[ProfiledStep]) -> ProfiledStep:
    """The mean of the steps, with ``OVERHEAD`` among the phases: they add up to the step."""
    names = [name for name in PHASES if any(name in step.phases for step in steps)]
    total = fmean(step.ms for step in steps)
    phases = {name: fmean(step.phases.get(name, 0.0) for step in steps) for name in names}
    return ProfiledStep(total, {**phases, OVERHEAD: total - sum(phases.values())})


def top_operators(profiler: torch.profiler.profile, steps: int, count: int = 10) -> list[dict[str, Any]]:
    """The operators with the longest time of their own: ``name``, ``ms`` and ``calls`` per step.

    On a GPU the time is the device's. Ranges of recpipe are no operators.
    """
    averages = [a for a in profiler.key_averages() if not a.key.startswith(PREFIX)]
    on_device = any(a.self_device_time_total for a in averages)

    def own_us(average: Any) -> float:
        return float(average.self_device_time_total if on_device else average.self_cpu_time_total)

    averages.sort(key=own_us, reverse=True)
    return [
        {"name": a.key, "ms": own_us(a) / MICROSECONDS / steps, "calls": a.count / steps}
        for a in averages[:count]
    ]
