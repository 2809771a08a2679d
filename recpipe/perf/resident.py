"""The tasks of a plain step, with all rows in device memory: the loader, the training thread, and other cores
that share the batch.

They follow ``recpipe.pipeline.step``: rows are looked up, the dense part runs forward and back with all
threads or on each core, tables are updated in one thread (beside the dense optimizer, if the back end has
threads for that), and the next batch is read meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from recpipe.backend.sharing import MARGIN
from recpipe.perf.amounts import Amounts, added, keeping, together
from recpipe.perf.bench.overheads import optimizer_sizes
from recpipe.perf.capture import Captured
from recpipe.perf.models import NO_TIME, Estimate
from recpipe.perf.walk import Task, walk
from recpipe.tables.beside import WORTH

MAIN, LOADER, TABLES = "main", "loader", "tables"


@dataclass(frozen=True)
class Step:
    """A recipe's step, as far as it is known before it runs."""

    captured: Captured
    optimizer: str = "Adagrad"
    """The dense part's, by torch's name."""
    reading: Estimate = NO_TIME
    """How long a batch's reading takes."""
    beside: bool = False
    """Whether tables are updated beside the dense optimizer (``trainer.backend`` other than plain, with
    several threads)."""
    shared: bool | None = None
    """Whether cores share the batch; None: where that is predicted to be so much faster that a run would
    choose it."""


Way = Mapping[str, Estimate]
"""The estimates of a step's tasks by name."""


def resident_tasks(step: Step, amounts: Amounts) -> tuple[list[Task], Way]:
    """The step's tasks, and the estimates that they are made of."""
    if step.shared is not None:
        return _tasks(step, amounts, step.shared)
    plain = _tasks(step, amounts, False)
    if not step.captured.shares:
        return plain
    shared = _tasks(step, amounts, True)
    first, second = (walk(found[0], amounts.threads).step_seconds for found in (plain, shared))
    return shared if second * MARGIN < first else plain


def _tasks(step: Step, amounts: Amounts, shared: bool) -> tuple[list[Task], Way]:
    made = (_shared if shared else _plain)(step, amounts)
    estimates: dict[str, Estimate] = {}
    tasks = []
    for task, estimate in made:
        tasks.append(replace(task, busy=estimate.seconds))
        estimates[task.name] = estimate
    return tasks, estimates


Made = list[tuple[Task, Estimate]]


def _plain(step: Step, amounts: Amounts) -> Made:
    captured, threads = step.captured, amounts.threads
    stages = amounts.stages(captured.whole)
    forward, backward = together([stages.before, stages.forward]), together([stages.to_rows, stages.rest])
    looked_up = together([amounts.lookups(captured.groups, "lookup forward"), amounts.pipeline(captured)])
    if threads > 1:
        forward = together([forward, amounts.overhead("wake")])
    made: Made = [
        (Task("look up", MAIN, after={"read": 1}), looked_up),
        (Task("forward", MAIN, cores=threads), forward),
        (Task("backward", MAIN, cores=threads), backward),
    ]
    return made + _ending(step, amounts, "backward", [])


def _shared(step: Step, amounts: Amounts) -> Made:
    captured = step.captured
    parts = [amounts.stages(part) for part in captured.shares]
    keeps = [amounts.operator(keeping(captured, part), 1) for part in captured.shares]
    looked_up = together(
        [
            amounts.lookups(captured.groups, "lookup forward"),
            amounts.pipeline(captured),
            amounts.overhead("hand over", len(parts) - 1),
        ]
    )
    made: Made = [(Task("look up", MAIN, after={"read": 1, "loop": 1}), looked_up)]
    own, rows = parts[0], []
    made.append((Task("forward", MAIN), together([own.before, own.forward])))
    made.append((Task("backward to rows", MAIN), together([own.to_rows, keeps[0]])))
    made.append((Task("backward", MAIN), own.rest))
    for number, (part, keep) in enumerate(zip(parts[1:], keeps[1:], strict=True), 1):
        place, name = f"core {number}", f"of core {number}"
        made.append((Task(f"forward before rows {name}", place, after={"read": 1, "loop": 1}), part.before))
        made.append((Task(f"forward {name}", place, after={"look up": 0}), part.forward))
        rows.append(f"backward to rows {name}")
        made.append((Task(rows[-1], place), together([part.to_rows, keep])))
        made.append((Task(f"backward {name}", place), part.rest))
    count, values = captured.parameters
    adding = together([amounts.operator(added(values / max(1, count)), 1).times(count * (len(parts) - 1))])
    ends = {f"backward of core {number}": 0 for number in range(1, len(parts))}
    made.append((Task("add up gradients", "core 1", after={**ends, "backward": 0}), adding))
    return made + _ending(step, amounts, "backward", rows)


def _ending(step: Step, amounts: Amounts, backward: str, rows: list[str]) -> Made:
    """What follows the backward pass: tables' update, optimizer, Lightning's loop; and the next batch's
    reading. ``rows``: the tasks of other cores that must have ended before the tables are updated."""
    captured, threads = step.captured, amounts.threads
    update = amounts.lookups(captured.groups, "lookup update")
    beside = step.beside and threads > 1 and update.seconds >= WORTH
    arrived = {backward: 0, **dict.fromkeys(rows, 0)}
    summed = {"add up gradients": 0} if rows else {}
    sizes = optimizer_sizes(step.optimizer, *captured.parameters)
    used = max(1, threads - 1) if beside else threads
    optimizer = amounts.optimizer(step.optimizer, sizes, used if used == threads else 1)
    if used > 1:
        optimizer = together([optimizer, amounts.overhead("wake")])
    made: Made = [(Task("table update", TABLES if beside else MAIN, after=arrived), update)]
    made.append((Task("dense optimizer", MAIN, after={**arrived, **summed}, cores=used), optimizer))
    made.append((Task("loop", MAIN, after={"table update": 0}), amounts.overhead("loop")))
    rest = update.seconds + optimizer.seconds
    begins = "forward" if step.reading.seconds > rest else backward
    made.append((Task("read", LOADER, after={begins: 0}), step.reading))
    return made
