"""What torch's profiler saw of the steps: the phases of each, and the operators that took longest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from recpipe.common.phases import BACKWARD, PHASES, PREFIX

STEP = f"{PREFIX}step"
"""The range of a whole step in the trace."""
MICROSECONDS = 1e3
"""In a millisecond."""
_GRADIENT = "autograd::engine::evaluate_function: "
"""Of the names of events in which autograd runs one operation's backward."""
OVERHEAD = "overhead"
"""What a step takes beyond its phases."""


@dataclass(frozen=True)
class ProfiledStep:
    """One step under the profiler, in milliseconds."""

    ms: float
    phases: Mapping[str, float]
    """By name; those of ``PHASES`` that the step went through."""


@dataclass
class _Range:
    """Of a phase, in microseconds."""

    phase: str
    start: float
    end: float
    own: float
    """Without the phases inside of it."""


def profiled_steps(events: Sequence[Any]) -> list[ProfiledStep]:
    """The steps among a profile's ``events``; a phase belongs to the step in which it starts, in its thread.

    ``events``: as of ``torch.profiler.profile.events()``, each with ``name``, ``time_range`` (microseconds),
    ``thread``, ``sequence_nr`` and ``device_type``: on a GPU each range is there a second time, as the device
    saw it.
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
    """One thread's phases: those that the program tells, and each operation's backward pass, which belongs
    to the phase in which the operation ran: they have one number (``sequence_nr``)."""
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
            # The last operation of a number is the one to be differentiated.
            backward_of[event.sequence_nr] = BACKWARD.get(around[-1].phase) if around else None
        if name in PHASES:
            if around:
                around[-1].own -= min(end, around[-1].end) - start
            found.append(_Range(name, start, end, end - start))
            around.append(found[-1])
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
