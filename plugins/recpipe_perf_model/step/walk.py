"""The time of a training step from its tasks: a walk of their graph on threads that share the cores.

A step is a list of tasks. Each runs in a named place (a thread, a GPU's stream, a network), one after the
other in the order of the list, and waits for tasks of its own step and of earlier ones. Steps follow each
other as in training, so that the loader's work for one batch goes on while the batch before it trains. A
place that is to get ahead only so far waits for a task of as many steps earlier.

After Lin, Feng, Ardestani, Lee, Lundell, Kim, Kejariwal, Owens: "Building a performance model for deep
learning recommendation model training on GPUs" (HiPC 2022), section III, which walks operators on a host
thread and GPU streams. Here threads that are busy share the cores: where more of them are busy than there are
cores, all become slower; a task that all cores work on is as slow as the slowest of its threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from recpipe.errors import UserError

STEPS = 48
"""Steps that are walked. The middle third is counted: at first threads get ahead of each other, and at the
end those that are ahead have nothing left to do."""
SHOWN = 3
"""Steps of the timeline."""
Key = tuple[int, str]
"""A step, and the name of a task of it."""
LEAST = 1e-12
"""Seconds below which a task is over: what additions round is far less."""


@dataclass(frozen=True)
class Task:
    """A part of a step. Times are seconds."""

    name: str
    """Unique in its step."""
    place: str
    """Where it runs: ``main``, ``loader``, ``io``, ``core 1``, ``stream: compute``, ``network`` ..."""
    busy: float = 0.0
    """How long it uses a core, if it has one for itself."""
    waits: float = 0.0
    """How long it then waits for something else: a disk, a message, a GPU's kernel."""
    after: Mapping[str, int] = field(default_factory=dict)
    """Tasks that end before it begins, with how many steps earlier theirs is (0: its own step)."""
    cores: int = 1
    """How many cores it uses while it is busy."""


@dataclass(frozen=True)
class Span:
    """When a task of a step ran, in seconds since the walk's begin."""

    step: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Walked:
    """The result of a walk."""

    step_seconds: float
    critical: Mapping[str, float]
    """Seconds of a step by the task that everything else waited for; they add up to the step."""
    utilisation: Mapping[str, float]
    """By place, the share of the step in which it has a task that is busy or waits."""
    cores_busy: float
    """How many cores are busy, on average."""
    timeline: Sequence[Span]
    """The spans of ``SHOWN`` steps."""


@dataclass
class _Running:
    step: int
    task: Task
    start: float
    because: Key | None
    """The task that this one waited for."""
    busy: float
    waits: float


def walk(tasks: Sequence[Task], cores: float, steps: int = STEPS) -> Walked:
    """Walk ``steps`` steps of ``tasks`` on a machine with ``cores`` cores, from event to event.

    ``UserError`` if tasks wait for each other in a circle or for one that is not there.
    """
    names = [task.name for task in tasks]
    unknown = {name for task in tasks for name in task.after} - set(names)
    if unknown or len(set(names)) < len(tasks):
        raise UserError(f"a step's tasks wait for {sorted(unknown)}, or two have the same name")
    walked = _Walk(tasks, cores, steps)
    walked.begin_ready()
    while walked.running:
        walked.go_on()
        walked.begin_ready()
    if len(walked.ended) < steps * len(tasks):
        left = [name for name in names if (steps - 1, name) not in walked.ended]
        raise UserError(f"a step's tasks wait for each other in a circle: {left}")
    # Steps `first` to `last` count, between the ends of the one before and of the last.
    first, last = steps // 3, 2 * steps // 3
    ends = [max(walked.ended[step, name] for name in names) for step in range(steps)]
    since, until, counted = ends[first - 1], ends[last], last - first + 1
    whole = max(until - since, LEAST)
    inside: dict[str, float] = defaultdict(float)
    for span in walked.spans:
        inside[span.task.place] += max(0.0, min(span.end, until) - max(span.start, since))
    moments, used = zip(*walked.core_seconds, strict=True)
    begun, done = (float(np.interp(moment, moments, used)) for moment in (since, until))
    # From the end of step `last` back along what each task waited for.
    critical: dict[str, float] = defaultdict(float)
    at: Key | None = max(((last, name) for name in names), key=lambda each: walked.ended[each])
    while at is not None and walked.ended[at] > since:
        before = walked.because[at]
        start = walked.ended[before] if before is not None else 0.0
        critical[at[1]] += min(walked.ended[at], until) - max(start, since)
        at = before
    return Walked(
        whole / counted,
        {name: seconds / counted for name, seconds in critical.items()},
        {place: seconds / whole for place, seconds in inside.items()},
        (done - begun) / whole,
        [span for span in walked.spans if last - SHOWN < span.step <= last],
    )


class _Walk:
    """Where a walk has arrived."""

    def __init__(self, tasks: Sequence[Task], cores: float, steps: int) -> None:
        self.cores = cores
        self.queues: dict[str, list[tuple[int, Task]]] = defaultdict(list)
        for step in range(steps):
            for task in tasks:
                self.queues[task.place].append((step, task))
        self.next = dict.fromkeys(self.queues, 0)
        self.last: dict[str, Key | None] = dict.fromkeys(self.queues)
        self.running: dict[str, _Running] = {}
        self.ended: dict[Key, float] = {}
        self.because: dict[Key, Key | None] = {}
        self.spans: list[Span] = []
        self.now = 0.0
        self.core_seconds = [(0.0, 0.0)]
        """Moments, and how many core seconds were used until then."""

    def begin_ready(self) -> None:
        """Begin all tasks that wait for nothing; those that take no time end at once and may free others."""
        ended = -1
        while ended < len(self.ended):
            ended = len(self.ended)
            for place, queue in self.queues.items():
                while place not in self.running and self.next[place] < len(queue):
                    step, task = queue[self.next[place]]
                    waited = [(step - ago, name) for name, ago in task.after.items() if ago <= step]
                    if any(each not in self.ended for each in waited):
                        break
                    before = self.last[place]
                    waited += [before] if before is not None else []
                    because = max(waited, key=lambda each: self.ended[each], default=None)
                    self.next[place] += 1
                    self.running[place] = _Running(step, task, self.now, because, task.busy, task.waits)
                    if task.busy + task.waits <= LEAST:
                        self._end(place)

    def go_on(self) -> None:
        """To the next moment at which a task has been busy, or has waited, for long enough."""
        busy = [each for each in self.running.values() if each.busy > 0]
        asked, rate = sum(each.task.cores for each in busy), 1.0
        if asked > self.cores:
            # Threads that have nothing to do with each other take turns. A task on several cores waits for
            # the slowest of its threads, which shares its core with another one.
            alone = max(each.task.cores for each in busy) == 1
            rate = self.cores / asked if alone else 1 / -(-asked // self.cores)
        ends = [each.busy / rate for each in busy]
        passed = min(ends + [each.waits for each in self.running.values() if each.busy <= 0])
        self.now += passed
        self.core_seconds.append((self.now, self.core_seconds[-1][1] + passed * rate * asked))
        for place, each in list(self.running.items()):
            if each.busy > 0:
                each.busy -= passed * rate
                if each.busy <= LEAST:
                    each.busy = 0.0
            else:
                each.waits -= passed
            if each.busy <= 0 and each.waits <= LEAST:
                self._end(place)

    def _end(self, place: str) -> None:
        done = self.running.pop(place)
        key = (done.step, done.task.name)
        self.ended[key], self.because[key], self.last[place] = self.now, done.because, key
        self.spans.append(Span(done.step, done.task, done.start, self.now))
