"""A recipe's step with all rows in device memory, as far as it is known before it runs: how long its reading
takes, its tasks, and its prediction.

The tasks follow ``recpipe.pipeline.step``: rows are looked up, the dense part runs forward and back with all
threads or on each core, tables are updated in one thread (beside the dense optimizer, if the back end has
threads for that), and the next batch is read meanwhile.

Parts of a step take longer than in their micro-benchmarks. The family ``steps`` of a machine's profile has
whole steps of probe models with what was captured of them; four factors are chosen so that the probes'
predicted steps are the measured ones, as nearly as factors close to 1 can make them: few probes cannot say
much, so that each factor is held to 1 as by a measurement of its own (``HELD``). What is left in a probe that
the factors have not seen is the error of a predicted step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, hypot
from statistics import fmean
from time import perf_counter

import numpy as np

from recpipe.common.device import one_thread
from recpipe.common.saved import parse_json, typed_as
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError, shown
from recpipe.pipeline.batch import WORTH
from recpipe.tables.inputs import Inputs
from recpipe_perf_model.kernels.linear import Vector
from recpipe_perf_model.kernels.operators import Operator, optimizer_sizes
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.step.amounts import Amounts, Factors
from recpipe_perf_model.step.capture import Captured
from recpipe_perf_model.step.walk import Task, Walked, walk

BATCHES, SECONDS = 65, 1.0
"""Most batches that are read, and most seconds for them; the first does not count, since it opens files. Some
sources read a block of several batches at a time, so that it takes many to know what one costs on average."""
LEAST = 7
"""Batches that are read however long they take."""


@dataclass(frozen=True)
class Estimate:
    """A predicted time and the range in which four fifths of measurements lie."""

    seconds: float
    low: float
    high: float


NO_TIME = Estimate(0.0, 0.0, 0.0)


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
    shared: bool = False
    """Whether cores share the batch."""


def step_text(step: Step) -> str:
    """``step`` as JSON, as a machine's profile keeps it."""
    return json.dumps(asdict(step), separators=(",", ":"))


def parse_step(text: str) -> Step:
    """The step of such a text; ``Damaged`` if it is none."""
    return typed_as(Step, parse_json(text))


def reading(dataset: Dataset, size: int, inputs: Inputs) -> Estimate:
    """Seconds of reading a batch, checking its ids and putting them in order."""
    times: list[float] = []
    with one_thread():
        batches = iter(dataset.batches("train", size))
        while len(times) < (BATCHES if sum(times) < SECONDS else LEAST):
            start = perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            inputs.require_ids(inputs.each(batch))
            times.append(perf_counter() - start)
    counted = times[1:] or times
    if not counted:
        return NO_TIME
    mean = fmean(counted)
    error = float(np.std(counted)) / len(counted) ** 0.5
    return Estimate(mean, max(0.0, mean - error), mean + error)


MAIN, LOADER, TABLES = "main", "loader", "tables"
FAR = 2.0**24
"""Bytes touched between two uses of a gradient or a parameter: most of a step's."""


def resident_tasks(step: Step, amounts: Amounts, in_one: bool = False) -> list[Task]:
    """The step's tasks.

    ``in_one``: all groups of tables are looked up by one task and updated by one, also where threads would
    divide them.
    """
    captured, threads = step.captured, amounts.threads
    amounts = amounts.among((captured.shares[0] if step.shared else captured.whole).touched)
    own, others = _of_groups(step, amounts, "lookup forward", in_one)
    own += amounts.pipeline(captured)
    if step.shared:
        own += amounts.overhead("hand over", len(captured.shares) - 1)
    after = {"read": 1, "loop": 1}
    looked_up = [Task("look up", MAIN, own, after=after, cores=_cores(step, amounts))]
    for number, busy in enumerate(others):
        looked_up.append(
            Task(_numbered("look up beside", number), _numbered(TABLES, number), busy, after=after)
        )
    arrived = {task.name: 0 for task in looked_up}
    if step.shared:
        return [*looked_up, *_shared(step, amounts, arrived), *_ending(step, amounts, in_one)]
    before, forward, to_rows, rest = amounts.stages(captured.whole)
    wake = amounts.overhead("wake") if threads > 1 else 0.0
    return [
        *looked_up,
        Task("forward", MAIN, before + forward + wake, after=arrived, cores=threads),
        Task("backward", MAIN, to_rows + rest, cores=threads),
        *_ending(step, amounts, in_one),
    ]


def _shared(step: Step, amounts: Amounts, looked_up: Mapping[str, int]) -> list[Task]:
    """The dense part where cores share the batch; main is one of them. Each copies its gradients of rows to
    those of the whole batch; the others' gradients of parameters are added up."""
    captured, found = step.captured, []
    handed_out = sum(group.handed_out for group in captured.groups)
    for number, part in enumerate(captured.shares):
        before, forward, to_rows, rest = amounts.stages(part)
        copied = part.samples / captured.samples * handed_out
        to_rows += amounts.operator(_pass("copy_", copied, 8.0, 2.0 * part.samples, 16.0 * copied), 1)
        if number == 0:
            found.append(Task("forward", MAIN, before + forward, after=looked_up))
            found.append(Task("backward to rows", MAIN, to_rows))
            found.append(Task("backward", MAIN, rest))
            continue
        place, name = f"core {number}", f"of core {number}"
        found.append(Task(f"forward before rows {name}", place, before, after={"read": 1, "loop": 1}))
        found.append(Task(f"forward {name}", place, forward, after=looked_up))
        found.append(Task(f"backward to rows {name}", place, to_rows))
        found.append(Task(f"backward {name}", place, rest))
    count, values = captured.parameters
    others = range(1, len(captured.shares))
    each = amounts.operator(_pass("add", values / max(1, count), 12.0, 0.0, FAR), 1)
    ends = {f"backward of core {number}": 0 for number in others}
    adding = Task("add up gradients", "core 1", count * len(others) * each, after={**ends, "backward": 0})
    return [*found, adding]


def _pass(name: str, values: float, each: float, runs: float, reuse: float) -> Operator:
    """An operator that moves ``each`` bytes for each of so many float32 values."""
    at = {
        "bytes": each * values,
        "footprint": each * values,
        "elements": values,
        "runs": runs,
        "reuse": reuse,
    }
    return Operator("elementwise", {**at, "dtype": "float32"}, name)


def _ending(step: Step, amounts: Amounts, in_one: bool) -> list[Task]:
    """What follows the backward pass: tables' update, optimizer, Lightning's loop; and the next batch's
    reading."""
    threads, rest = amounts.threads, range(1, len(step.captured.shares) if step.shared else 1)
    # Tables are updated once all cores have the gradients of rows.
    arrived = {"backward": 0, **{f"backward to rows of core {number}": 0 for number in rest}}
    summed = {"add up gradients": 0} if step.shared else {}
    sizes = optimizer_sizes(step.optimizer, *step.captured.parameters)
    optimizer = amounts.optimizer(step.optimizer, sizes, threads)
    update, others = _of_groups(step, amounts, "lookup update", in_one, max(optimizer, 1e-9))
    used = max(1, threads - len(others))
    if others:
        optimizer = amounts.optimizer(step.optimizer, sizes, used if used == threads else 1)
    if used > 1:
        optimizer += amounts.overhead("wake")
    dense = Task("dense optimizer", MAIN, optimizer, after={**arrived, **summed}, cores=used)
    found = [Task("table update", MAIN, update, after=arrived, cores=_cores(step, amounts)), dense]
    if others:
        found = [
            Task(_numbered("table update", number), _numbered(TABLES, number), busy, after=arrived)
            for number, busy in enumerate(others)
        ]
        found.append(dense)
        if update:
            found.append(Task("table update of the last groups", MAIN, update))
    loop = Task("loop", MAIN, amounts.overhead("loop"), after={task.name: 0 for task in found})
    begins = "forward" if step.reading.seconds > update + sum(others) + optimizer else "backward"
    return [*found, loop, Task("read", LOADER, step.reading.seconds, after={begins: 0})]


def _of_groups(
    step: Step, amounts: Amounts, kind: str, in_one: bool, ahead: float = 0.0
) -> tuple[float, list[float]]:
    """The lookups or updates of this thread, and of each of those beside it that has some."""
    each = [amounts.lookups([group], kind, 1 if step.shared else None) for group in step.captured.groups]
    whole = sum(each)
    if not step.beside or amounts.threads < 2 or whole < WORTH:
        return whole, []
    if len(each) < 2 or in_one:
        return (0.0, [whole]) if ahead else (whole, [])
    *others, own = divided(each, amounts.threads, ahead)
    return sum(each[n] for n in own), [sum(each[n] for n in some) for some in others if some]


def _cores(step: Step, amounts: Amounts) -> int:
    """How many cores lookups and updates in the main thread take."""
    loops = not step.shared and any(group.by_loops for group in step.captured.groups)
    return amounts.threads if loops else 1


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


def _numbered(name: str, number: int) -> str:
    return f"{name} {number}" if number else name


FOUR_FIFTHS = 1.48
"""Standard deviations within which four fifths of measurements lie, if five residuals tell the deviation
(Student's t): the nine probes but for four factors."""


@dataclass(frozen=True)
class Prediction:
    """A step as it is expected to run."""

    step: Estimate
    """Seconds of a step."""
    walked: Walked
    tasks: Mapping[str, float]
    """By name, each task's seconds on a core of its own."""
    notes: tuple[str, ...] = ()
    """What the prediction is not sure about, in sentences."""


def predict_resident(step: Step, amounts: Amounts) -> Prediction:
    """The plain step, all rows in device memory; its range is that of probes which the factors have not
    seen."""
    tasks = resident_tasks(step, amounts)
    walked = walk(tasks, amounts.threads)
    seconds, error = walked.step_seconds, exp(FOUR_FIFTHS * amounts.factors.error)
    captured, notes = step.captured, []
    if captured.whole.unknown:
        names = ", ".join(captured.whole.unknown)
        notes.append(f"operators without a model of their own count as passes over their bytes: {names}")
    if captured.late:
        notes.append(f"{captured.late:,} ids that the model makes itself are not in the time of lookups")
    unused = sum(table.lookups == 0 for group in captured.groups for table in group.tables)
    if unused:
        notes.append(f"{unused} tables are not looked up in the batch that was captured")
    whole = Estimate(seconds, seconds / error, seconds * error)
    return Prediction(whole, walked, {task.name: task.busy for task in tasks}, tuple(notes))


FAMILY = "steps"
NAMES = ("python", "kernels", "shared", "tables")
"""The factors, in the order of ``Factors``'s fields."""
HELD = np.array([0.7, 0.1, 0.7, 0.1])
"""How far the logarithm of each of these factors is likely to be from 0, as a standard deviation. Operators
and lookups are timed as a step runs them, so that little is left. Python in a step finds colder caches than
in a loop of its own, and waits for other threads, by amounts that differ from machine to machine."""
NOISE = 0.06
"""The standard deviation of the logarithm of a measured step around what factors can explain."""
LEAST_ERROR = 0.03
"""Probes that fit by luck promise no more than this."""
DRIFT = 0.08
"""The standard deviation of the logarithm of a step's time from one run to the next, on a machine with other
tenants; probes that are measured within seconds do not show it."""
ROUNDS = 3
NUDGE = 0.05
WALKED = 12
"""Steps of a probe that are walked."""


def step_amounts(profile: MachineProfile) -> Amounts:
    """The times of what steps are made of on a machine, with its factors; ``UserError`` if steps were never
    measured there."""
    if FAMILY not in profile.samples:
        raise UserError(
            f"the machine profile has no samples of {FAMILY}: run recpipe perf calibrate, which measures "
            "only what is missing"
        )
    amounts = Amounts(profile)
    return amounts.corrected(fitted_factors(profile, amounts))


def fitted_factors(profile: MachineProfile, amounts: Amounts) -> Factors:
    """Fit the factors to the probes of ``profile``, if there are some; ``amounts``: the machine's, without
    factors."""
    samples = profile.samples[FAMILY]
    try:
        steps = [parse_step(str(sample.at["step"])) for sample in samples]
    except (KeyError, ValueError) as fault:
        raise UserError(
            f"the machine profile's samples of {FAMILY} are damaged ({shown(fault, 100)}): delete the file, "
            "and recpipe perf calibrate makes a new one"
        ) from fault
    if not steps:
        return Factors()
    measured = np.log([sample.seconds for sample in samples])
    shift = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        base = _logarithms(steps, amounts, shift)
        nudged = [_logarithms(steps, amounts, shift + NUDGE * along) for along in np.eye(len(NAMES))]
        slopes = (np.array(nudged) - base).T / NUDGE
        wanted = measured - base + slopes @ shift
        # The factors that come nearest to what is wanted of each probe, and what is left of a probe that is
        # left out.
        precision = slopes.T @ slopes / NOISE**2 + np.diag(HELD**-2.0)
        solution = np.linalg.solve(precision, slopes.T / NOISE**2)
        shift = solution @ wanted
        left = (wanted - slopes @ shift) / (1 - np.einsum("np,pn->n", slopes, solution))
    error = hypot(max(LEAST_ERROR, float(np.sqrt(np.mean(left**2)))), DRIFT)
    return replace(Factors(*np.exp(shift).tolist()), error=error)


def _logarithms(steps: Sequence[Step], amounts: Amounts, shift: Vector) -> Vector:
    """The logarithms of predicted seconds [n], with factors whose logarithms are ``shift`` [4]."""
    corrected = amounts.corrected(Factors(*np.exp(shift).tolist()))
    walks = (walk(resident_tasks(step, corrected), amounts.threads, WALKED) for step in steps)
    return np.log([walked.step_seconds for walked in walks])


def told(factors: Factors) -> str:
    """The factors in a line, with the error that is left."""
    values = ", ".join(f"{name} {getattr(factors, name):.2f}" for name in NAMES)
    return f"steps over micro-benchmarks    {values}; an error of {factors.error:.0%} is left"
