"""The tasks of a plain step, with all rows in device memory: the loader, the training thread, and other cores
that share the batch.

They follow ``recpipe.pipeline.step``: rows are looked up, the dense part runs forward and back with all
threads or on each core, tables are updated in one thread (beside the dense optimizer, if the back end has
threads for that), and the next batch is read meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from recpipe.backend.sharing import MARGIN
from recpipe.tables.workers import WORTH
from recpipe_perf_model.kernels.models import NO_TIME, Estimate
from recpipe_perf_model.kernels.operators import optimizer_sizes
from recpipe_perf_model.step.amounts import Amounts, added, keeping, together
from recpipe_perf_model.step.step import Step
from recpipe_perf_model.step.walk import Task, walk

MAIN, LOADER, TABLES = "main", "loader", "tables"
Way = Mapping[str, Estimate]
"""The estimates of a step's tasks by name."""


def resident_tasks(step: Step, amounts: Amounts, in_one: bool = False) -> tuple[list[Task], Way]:
    """The step's tasks, and the estimates that they are made of.

    ``in_one``: all groups of tables are looked up by one task and updated by one, also where threads would
    divide them.
    """
    if step.shared is not None:
        return _tasks(step, amounts, step.shared, in_one)
    plain = _tasks(step, amounts, False, in_one)
    if not step.captured.shares:
        return plain
    shared = _tasks(step, amounts, True, in_one)
    first, second = (walk(found[0], amounts.threads).step_seconds for found in (plain, shared))
    return shared if second * MARGIN < first else plain


def _tasks(step: Step, amounts: Amounts, shared: bool, in_one: bool) -> tuple[list[Task], Way]:
    part = step.captured.shares[0] if shared else step.captured.whole
    made = (_shared if shared else _plain)(step, amounts.among(part.touched), in_one)
    estimates: dict[str, Estimate] = {}
    tasks = []
    for task, estimate in made:
        tasks.append(replace(task, busy=estimate.seconds))
        estimates[task.name] = estimate
    return tasks, estimates


Made = list[tuple[Task, Estimate]]


def divided(seconds: Sequence[float], threads: int, ahead: float = 0.0) -> list[list[int]]:
    """Which of several works, in their order, each thread takes: the others from the first on, and this one,
    the last of the result, from the last on once it has worked for ``ahead`` seconds."""
    taken: list[list[int]] = [[] for _ in range(threads)]
    free = [0.0] * (threads - 1) + [ahead]
    left = list(range(len(seconds)))
    while left:
        thread = free.index(min(free))
        work = left.pop(-1 if thread == threads - 1 else 0)
        taken[thread].append(work)
        free[thread] += seconds[work]
    return taken


def _of_groups(
    step: Step, amounts: Amounts, kind: str, in_one: bool, ahead: float = 0.0
) -> tuple[Estimate, list[Estimate]]:
    """The lookups or updates of this thread, and of each of those beside it that has some."""
    groups = step.captured.groups
    each = [amounts.lookups([group], kind) for group in groups]
    whole = together(each) if len(each) > 1 else amounts.lookups(groups, kind)
    several = len(groups) > 1 and not in_one
    if not step.beside or amounts.threads < 2 or whole.seconds < WORTH:
        return whole, []
    if not several:
        return (NO_TIME, [whole]) if ahead else (whole, [])
    *others, own = divided([group.seconds for group in each], amounts.threads, ahead)
    return together([each[n] for n in own]), [together([each[n] for n in some]) for some in others if some]


def _looking_up(step: Step, amounts: Amounts, in_one: bool, more: list[Estimate]) -> Made:
    """This thread's lookups, with what else it does then, and those beside it."""
    own, others = _of_groups(step, amounts, "lookup forward", in_one)
    after = {"read": 1, "loop": 1}
    made: Made = [
        (Task("look up", MAIN, after=after), together([own, amounts.pipeline(step.captured), *more]))
    ]
    for number, other in enumerate(others):
        made.append(
            (Task(_numbered("look up beside", number), _numbered(TABLES, number), after=after), other)
        )
    return made


def _numbered(name: str, number: int) -> str:
    return f"{name} {number}" if number else name


def _plain(step: Step, amounts: Amounts, in_one: bool) -> Made:
    captured, threads = step.captured, amounts.threads
    stages = amounts.stages(captured.whole)
    forward, backward = together([stages.before, stages.forward]), together([stages.to_rows, stages.rest])
    if threads > 1:
        forward = together([forward, amounts.overhead("wake")])
    made = _looking_up(step, amounts, in_one, [])
    looked_up = {task.name: 0 for task, _ in made}
    made += [
        (Task("forward", MAIN, cores=threads, after=looked_up), forward),
        (Task("backward", MAIN, cores=threads), backward),
    ]
    return made + _ending(step, amounts, "backward", [], in_one)


def _shared(step: Step, amounts: Amounts, in_one: bool) -> Made:
    captured = step.captured
    parts = [amounts.stages(part) for part in captured.shares]
    keeps = [amounts.operator(keeping(captured, part), 1) for part in captured.shares]
    made = _looking_up(step, amounts, in_one, [amounts.overhead("hand over", len(parts) - 1)])
    looked_up = {task.name: 0 for task, _ in made}
    own, rows = parts[0], []
    made.append((Task("forward", MAIN, after=looked_up), together([own.before, own.forward])))
    made.append((Task("backward to rows", MAIN), together([own.to_rows, keeps[0]])))
    made.append((Task("backward", MAIN), own.rest))
    for number, (part, keep) in enumerate(zip(parts[1:], keeps[1:], strict=True), 1):
        place, name = f"core {number}", f"of core {number}"
        made.append((Task(f"forward before rows {name}", place, after={"read": 1, "loop": 1}), part.before))
        made.append((Task(f"forward {name}", place, after=looked_up), part.forward))
        rows.append(f"backward to rows {name}")
        made.append((Task(rows[-1], place), together([part.to_rows, keep])))
        made.append((Task(f"backward {name}", place), part.rest))
    count, values = captured.parameters
    adding = together([amounts.operator(added(values / max(1, count)), 1).times(count * (len(parts) - 1))])
    ends = {f"backward of core {number}": 0 for number in range(1, len(parts))}
    made.append((Task("add up gradients", "core 1", after={**ends, "backward": 0}), adding))
    return made + _ending(step, amounts, "backward", rows, in_one)


def _ending(step: Step, amounts: Amounts, backward: str, rows: list[str], in_one: bool) -> Made:
    """What follows the backward pass: tables' update, optimizer, Lightning's loop; and the next batch's
    reading. ``rows``: the tasks of other cores that must have ended before the tables are updated."""
    threads = amounts.threads
    arrived = {backward: 0, **dict.fromkeys(rows, 0)}
    summed = {"add up gradients": 0} if rows else {}
    sizes = optimizer_sizes(step.optimizer, *step.captured.parameters)
    optimizer = amounts.optimizer(step.optimizer, sizes, threads)
    update, others = _of_groups(step, amounts, "lookup update", in_one, max(optimizer.seconds, 1e-9))
    used = max(1, threads - len(others))
    if others:
        optimizer = amounts.optimizer(step.optimizer, sizes, used if used == threads else 1)
    if used > 1:
        optimizer = together([optimizer, amounts.overhead("wake")])
    dense = Task("dense optimizer", MAIN, after={**arrived, **summed}, cores=used), optimizer
    own = Task("table update", MAIN, after=arrived), update
    made: Made = [own, dense]
    if others:
        made = [
            (Task(_numbered("table update", number), _numbered(TABLES, number), after=arrived), other)
            for number, other in enumerate(others)
        ]
        made.append(dense)
        if update.seconds:
            made.append((Task("table update of the last groups", MAIN), update))
    ended = {task.name: 0 for task, _ in made}
    made.append((Task("loop", MAIN, after=ended), amounts.overhead("loop")))
    rest = update.seconds + sum(other.seconds for other in others) + optimizer.seconds
    begins = "forward" if step.reading.seconds > rest else backward
    made.append((Task("read", LOADER, after={begins: 0}), step.reading))
    return made
