"""Evaluates a profile of torch's profiler: the phases of each step, and the operators that took longest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from recpipe.common.timing import BACKWARD, PHASES, PREFIX

STEP = f"{PREFIX}step"
"""The range of a whole step in the trace."""
MICROSECONDS = 1e3
"""Microseconds in a millisecond."""
_GRADIENT = "autograd::engine::evaluate_function: "
"""Prefix of the names of events in which autograd runs one operation's backward."""
OPERATORS = 10
"""How many operators are listed."""
OVERHEAD = "overhead"
"""The name of the time that a step takes beyond its phases."""


@dataclass(frozen=True)
class ProfiledStep:
    """One step under the profiler, in milliseconds."""

    ms: float
    phases: Mapping[str, float]
    """Times by name, for those of ``PHASES`` that the step went through."""


@dataclass
class _Range:
    """The range of a phase, in microseconds."""

    phase: str
    start: float
    end: float
    own: float
    """Its time without the phases inside it."""


def profiled_steps(events: Sequence[Any]) -> list[ProfiledStep]:
    """The steps among a profile's ``events``; a phase belongs to the step in which it starts, in its thread.

    ``events``: as from ``torch.profiler.profile.events()``, with ``name``, ``time_range`` (microseconds),
    ``thread``, ``sequence_nr`` and ``device_type``. On a GPU each range occurs a second time, as seen by the
    device.
    """
    on_host = [e for e in events if e.device_type.name == "CPU"]
    steps = sorted((e for e in on_host if e.name == STEP), key=lambda e: e.time_range.start)
    ranges = {
        thread: _ranges(e for e in on_host if e.thread == thread and e.name != STEP)
        for thread in {step.thread for step in steps}
    }
    found = []
    for step in steps:
        start, end = step.time_range.start, step.time_range.end
        phases: dict[str, float] = {}
        for range_ in ranges[step.thread]:
            if start <= range_.start < end:
                phases[range_.phase] = phases.get(range_.phase, 0.0) + range_.own / MICROSECONDS
        found.append(ProfiledStep((end - start) / MICROSECONDS, phases))
    return found


def _ranges(events: Iterable[Any]) -> list[_Range]:
    """One thread's phases: those that the program records, and the backward passes of operations. A backward
    pass belongs to the phase in which its operation ran, which has the same ``sequence_nr``."""
    found: list[_Range] = []
    around: list[_Range] = []
    backward_of: dict[int, str | None] = {}
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        start, end = event.time_range.start, event.time_range.end
        while around and around[-1].end <= start:
            around.pop()
        name = event.name.removeprefix(PREFIX) if event.name.startswith(PREFIX) else None
        if event.name.startswith(_GRADIENT):
            name = backward_of.get(event.sequence_nr)
        elif event.sequence_nr >= 0:
            # Of operations with the same number, the last one is differentiated.
            backward_of[event.sequence_nr] = BACKWARD.get(around[-1].phase) if around else None
        if name in PHASES:
            if around:
                around[-1].own -= min(end, around[-1].end) - start
            found.append(_Range(name, start, end, end - start))
            around.append(found[-1])
    return found


def mean_step(steps: Sequence[ProfiledStep]) -> ProfiledStep:
    """The mean of the steps. With ``OVERHEAD`` the phases add up to the step."""
    names = [name for name in PHASES if any(name in step.phases for step in steps)]
    total = fmean(step.ms for step in steps)
    phases = {name: fmean(step.phases.get(name, 0.0) for step in steps) for name in names}
    return ProfiledStep(total, {**phases, OVERHEAD: total - sum(phases.values())})


def top_operators(profiler: torch.profiler.profile, steps: int) -> list[dict[str, Any]]:
    """The operators with the longest self time: ``name``, and ``ms`` and ``calls`` per step.

    On a GPU the time is the device's. Ranges of recpipe are not counted as operators.
    """
    averages = [a for a in profiler.key_averages() if not a.key.startswith(PREFIX)]
    on_device = any(a.self_device_time_total for a in averages)

    def own_us(average: Any) -> float:
        return float(average.self_device_time_total if on_device else average.self_cpu_time_total)

    averages.sort(key=own_us, reverse=True)
    return [
        {"name": a.key, "ms": own_us(a) / MICROSECONDS / steps, "calls": a.count / steps}
        for a in averages[:OPERATORS]
    ]
