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
    because: tuple[int, str] | None
    """The task, with its step, that this one waited for."""
    busy: float = field(init=False)
    waits: float = field(init=False)

    def __post_init__(self) -> None:
        self.busy, self.waits = self.task.busy, self.task.waits


def walk(tasks: Sequence[Task], cores: float, steps: int = STEPS) -> Walked:
    """Walk ``steps`` steps of ``tasks`` on a machine with ``cores`` cores.

    ``UserError`` if tasks wait for each other in a circle or for one that is not there.
    """
    return _Walk(tasks, cores, steps).run()


class _Walk:
    def __init__(self, tasks: Sequence[Task], cores: float, steps: int) -> None:
        self.tasks, self.cores, self.steps = tasks, cores, steps
        self.names = [task.name for task in tasks]
        unknown = {name for task in tasks for name in task.after} - set(self.names)
        if unknown or len(set(self.names)) < len(tasks):
            raise UserError(f"a step's tasks wait for {sorted(unknown)}, or two have the same name")
        self.queues: dict[str, list[tuple[int, Task]]] = defaultdict(list)
        for step in range(steps):
            for task in tasks:
                self.queues[task.place].append((step, task))
        self.next = dict.fromkeys(self.queues, 0)
        self.last: dict[str, tuple[int, str] | None] = dict.fromkeys(self.queues)
        self.ended: dict[tuple[int, str], float] = {}
        self.because: dict[tuple[int, str], tuple[int, str] | None] = {}
        self.spans: list[Span] = []
        self.running: dict[str, _Running] = {}
        self.now = 0.0
        self.core_seconds = [(0.0, 0.0)]
        """Moments, and how many core seconds were used until then."""

    def run(self) -> Walked:
        """Go from event to event until all steps are done."""
        self._begin_ready()
        while self.running:
            self._go_on()
            self._begin_ready()
        if len(self.ended) < self.steps * len(self.tasks):
            left = [name for name in self.names if (self.steps - 1, name) not in self.ended]
            raise UserError(f"a step's tasks wait for each other in a circle: {left}")
        return self._result()

    def _begin_ready(self) -> None:
        """Begin all tasks that wait for nothing; those that take no time end at once and may free others."""
        ended = -1
        while ended < len(self.ended):
            ended = len(self.ended)
            for place in self.queues:
                self._begin_next(place)

    def _begin_next(self, place: str) -> None:
        queue = self.queues[place]
        while place not in self.running and self.next[place] < len(queue):
            step, task = queue[self.next[place]]
            waited = [(step - ago, name) for name, ago in task.after.items() if ago <= step]
            if any(each not in self.ended for each in waited):
                return
            before = self.last[place]
            waited += [before] if before is not None else []
            because = max(waited, key=lambda each: self.ended[each], default=None)
            self.next[place] += 1
            self.running[place] = _Running(step, task, self.now, because)
            if task.busy + task.waits <= LEAST:
                self._end(place)

    def _go_on(self) -> None:
        """To the next moment at which a task has been busy, or has waited, for long enough."""
        busy = [each for each in self.running.values() if each.busy > 0]
        asked = sum(each.task.cores for each in busy)
        rate = self._rate(asked, max((each.task.cores for each in busy), default=1))
        ends = [each.busy / rate for each in busy]
        ends += [each.waits for each in self.running.values() if each.busy <= 0]
        passed = min(ends)
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

    def _rate(self, asked: int, widest: int) -> float:
        """How fast busy tasks go on that ask for so many cores, of which one task asks for ``widest``.

        Threads that have nothing to do with each other take turns. A task on several cores waits for the
        slowest of its threads, which shares its core with another one.
        """
        if asked <= self.cores:
            return 1.0
        return self.cores / asked if widest == 1 else 1 / -(-asked // self.cores)

    def _end(self, place: str) -> None:
        done = self.running.pop(place)
        key = (done.step, done.task.name)
        self.ended[key], self.because[key], self.last[place] = self.now, done.because, key
        self.spans.append(Span(done.step, done.task, done.start, self.now))

    def _result(self) -> Walked:
        """Of the steps ``first`` to ``last``, between the ends of the one before and of the last."""
        first, last = self.steps // 3, 2 * self.steps // 3
        ends = [max(self.ended[step, name] for name in self.names) for step in range(self.steps)]
        since, until, counted = ends[first - 1], ends[last], last - first + 1
        whole = max(until - since, LEAST)
        inside: dict[str, float] = defaultdict(float)
        for span in self.spans:
            inside[span.task.place] += max(0.0, min(span.end, until) - max(span.start, since))
        critical = self._critical(since, until, last)
        return Walked(
            whole / counted,
            {name: seconds / counted for name, seconds in critical.items()},
            {place: seconds / whole for place, seconds in inside.items()},
            (self._core_seconds_at(until) - self._core_seconds_at(since)) / whole,
            [span for span in self.spans if last - SHOWN < span.step <= last],
        )

    def _core_seconds_at(self, moment: float) -> float:
        moments, amounts = zip(*self.core_seconds, strict=True)
        return float(np.interp(moment, moments, amounts))

    def _critical(self, since: float, until: float, last: int) -> dict[str, float]:
        """Seconds between both moments on the path back from the end of step ``last``, by task."""
        at: tuple[int, str] | None = max(
            ((last, name) for name in self.names), key=lambda each: self.ended[each]
        )
        found: dict[str, float] = defaultdict(float)
        while at is not None and self.ended[at] > since:
            before = self.because[at]
            begun = self.ended[before] if before is not None else 0.0
            found[at[1]] += min(self.ended[at], until) - max(begun, since)
            at = before
        return dict(found)
