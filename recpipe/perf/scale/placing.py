"""A plan for tables that are not there: each whole on a GPU, in parts of columns or rows, or on every GPU.

The search begins with whole tables, with all in parts within a host, and with all in parts on every GPU.
Tables go, the most expensive first, to where least is asked; then the one with the most expensive part is cut
in two and all are placed anew, until that brings nothing more. Neo (Mudigere et al., ISCA 2022) and the
planner of NVIDIA's MLPerf submissions (training_results_v3.0, sharding/planner.py) go about it in this way.
The plan with the least seconds for rows and messages is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recpipe.common.words import readable_bytes
from recpipe.errors import UserError
from recpipe.perf.scale.messages import all_reduce, all_to_all
from recpipe.perf.scale.model import FLOAT, Table
from recpipe.perf.scale.tiers import Room, tiered
from recpipe.perf.scale.work import COLUMNS, REPLICATED, ROWS, WHOLE, Load, Training, part_load

LEAST_COLUMNS = 128
"""Fewest columns of a part: TorchRec's own limit."""
ROUNDS, PATIENCE, MOST_PATIENCE = 200, 12, 64
"""Cuts that are tried, and how many in a row without gain end it: so many more than there are tables, since
all may have to be cut before the busiest GPU has less to do, and at most."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Placed:
    """How a table is placed."""

    table: Table
    kind: str
    gpus: tuple[int, ...]
    load: Load
    """Of each of its parts."""


@dataclass(frozen=True)
class Plan:
    """Where all tables are."""

    tables: tuple[Placed, ...]
    read: float
    """Bytes of memory that the busiest GPU moves for its lookups, and for its update."""
    updated: float
    ids: float
    near: float
    far: float
    """Bytes that the GPU that sends most sends; ``Load`` has what they are."""
    reduced: float
    memory: tuple[float, ...]
    """Bytes of rows by GPU."""

    def parts(self, gpu: int) -> list[tuple[Table, Load]]:
        """What a GPU has."""
        return [(p.table, p.load) for p in self.tables if gpu in p.gpus]


def make_plan(training: Training, room: Room) -> Plan:
    """The best plan that is found; ``UserError`` names a table that fits nowhere."""
    tables = training.model.tables
    if training.model.bytes > room.total * training.gpus:
        raise _too_large(training, room)
    small = {t.name: (REPLICATED, training.gpus) for t in _small(training)}
    known: dict[tuple[str, str, int], Load] = {}
    best: Plan | None = None
    for parts in sorted({1, training.host_gpus, training.gpus}):
        kinds = {t.name: _begun(training, t, parts) for t in tables} | small
        found = _improved(training, room, kinds, known)
        if best is None or _seconds(training, found, room) < _seconds(training, best, room):
            best = found
    assert best is not None
    return best


def _begun(training: Training, table: Table, parts: int) -> tuple[str, int]:
    """How a table is cut when the search begins."""
    return (ROWS, parts) if 1 < parts <= table.rows else (WHOLE, 1)


def _improved(
    training: Training,
    room: Room,
    kinds: dict[str, tuple[str, int]],
    known: dict[tuple[str, str, int], Load],
) -> Plan:
    """The best plan on the way from ``kinds``; ``UserError`` if it has none."""
    tables = training.model.tables
    best, least, waited = None, float("inf"), 0
    for _ in range(ROUNDS):
        placed = _Placing(training, room, known).place(tables, kinds)
        if isinstance(placed, Table):
            cut = _finer(training, placed, *kinds[placed.name])
            if cut is None and kinds[placed.name][0] == REPLICATED:
                cut = WHOLE, 1
            if cut is None:
                break
            kinds[placed.name] = cut
            continue
        seconds = _seconds(training, placed, room)
        waited = 0 if seconds < least else waited + 1
        if seconds < least:
            best, least = placed, seconds
        hot = _hottest(training, placed, kinds, room)
        if hot is None or waited >= min(MOST_PATIENCE, PATIENCE + len(tables)):
            break
        kinds[hot[0]] = hot[1]
    if best is None:
        raise _too_large(training, room, table=placed if isinstance(placed, Table) else None)
    return best


def _seconds(training: Training, plan: Plan, room: Room) -> float:
    """``row_seconds`` with what the fullest GPU waits for slower memory."""
    full = int(np.argmax(plan.memory))
    if plan.memory[full] <= room.hbm:
        return row_seconds(training, plan)
    return row_seconds(training, plan) + tiered(training, plan.parts(full), room).seconds


def row_seconds(training: Training, plan: Plan) -> float:
    """The seconds of a step for rows and messages, if nothing ran beside them."""
    memory = (plan.read + plan.updated) / training.memory_rate
    return memory + 2 * all_to_all(training, plan.near, plan.far) + all_reduce(training, plan.reduced)


def _small(training: Training) -> list[Table]:
    """Tables of which less is sent if every GPU has one and their gradients are added up."""
    if training.gpus == 1:
        return []
    # An all-reduce moves a buffer twice; vectors go one way, and their gradients the other.
    sent = training.samples * training.message_bytes
    return [t for t in training.model.tables if FLOAT * t.rows < t.vectors * sent]


def _finer(training: Training, table: Table, kind: str, parts: int) -> tuple[str, int] | None:
    """The next finer way to cut a table; None: there is none."""
    if kind == REPLICATED:
        return None
    cuts_columns = training.model.optimizer != "rowwise_adagrad" and kind in (WHOLE, COLUMNS)
    if cuts_columns and table.dim % (2 * parts) == 0 and table.dim // (2 * parts) >= LEAST_COLUMNS:
        return (COLUMNS, 2 * parts) if 2 * parts <= training.gpus else None
    within, now = training.host_gpus, 1 if kind == COLUMNS else parts
    if now < within:
        return ROWS, min(2 * now, within)
    more = min(2 * now, training.gpus) // within * within
    return (ROWS, more) if more > now and table.rows >= more else None


def _hottest(
    training: Training, plan: Plan, kinds: Mapping[str, tuple[str, int]], room: Room
) -> tuple[str, tuple[str, int]] | None:
    """Which table to cut, and how: that with the most expensive part that can be cut, or with the largest one
    where a GPU's memory is too small for its rows."""
    over = max(plan.memory) > room.hbm
    for each in sorted(plan.tables, key=lambda p: -p.load.memory if over else -cost(training, p.load)):
        finer = _finer(training, each.table, *kinds[each.table.name])
        if finer is not None:
            return each.table.name, finer
    return None


def cost(training: Training, load: Load) -> float:
    """The seconds of a part on its GPU, messages at the rates of long ones."""
    curves = training.machine.curves
    seconds = (load.read + load.updated) / training.memory_rate + 2 * load.near / curves["alltoall"].rate
    return seconds + (2 * load.far / curves["network"].rate if training.hosts > 1 else 0.0)


class _Placing:
    """One attempt: blocks of parts, the most expensive first, to the least busy GPUs of one host each."""

    def __init__(self, training: Training, room: Room, known: dict[tuple[str, str, int], Load]) -> None:
        self.training, self.room, self.known = training, room, known
        self.width = training.host_gpus
        shape = training.hosts, self.width
        self.busy = np.zeros(shape)
        self.memory = np.zeros(shape)
        self.sums = {key: np.zeros(shape) for key in ("read", "updated", "ids", "near", "far")}
        self.reduced = 0.0

    def place(self, tables: Sequence[Table], kinds: Mapping[str, tuple[str, int]]) -> Plan | Table:
        """The plan, or a table that found no room."""
        loads = {t.name: self._load(t, *kinds[t.name]) for t in tables}
        first = sorted(
            tables,
            key=lambda t: (kinds[t.name][0] != REPLICATED, -cost(self.training, loads[t.name])),
        )
        placed = []
        for table in first:
            kind, parts = kinds[table.name]
            gpus = self._put(loads[table.name], kind, parts)
            if gpus is None:
                return table
            placed.append(Placed(table, kind, gpus, loads[table.name]))
        most = {key: float(values.max()) for key, values in self.sums.items()}
        return Plan(tuple(placed), **most, reduced=self.reduced, memory=tuple(self.memory.ravel().tolist()))

    def _load(self, table: Table, kind: str, parts: int) -> Load:
        key = table.name, kind, parts
        if key not in self.known:
            self.known[key] = part_load(self.training, table, kind, parts)
        return self.known[key]

    def _put(self, load: Load, kind: str, parts: int) -> tuple[int, ...] | None:
        if kind == REPLICATED:
            if (self.memory + load.memory).max() > self.room.total:
                return None
            self._add(load, np.ones_like(self.busy, dtype=bool))
            self.reduced += load.reduced
            return tuple(range(self.training.gpus))
        found: list[int] = []
        block = min(parts, self.width)
        taken = np.zeros(self.training.hosts, dtype=bool)
        for _ in range(parts // block):
            free = np.where(self.memory + load.memory <= self.room.total, self.busy, np.inf)
            order = np.argsort(free, axis=1, kind="stable")
            worst = np.where(taken, np.inf, np.take_along_axis(free, order, 1)[:, block - 1])
            host = int(worst.argmin())
            if not np.isfinite(worst[host]):
                return None
            chosen = np.zeros_like(self.busy, dtype=bool)
            chosen[host, order[host, :block]] = True
            self._add(load, chosen)
            taken[host] = True
            found += [host * self.width + int(gpu) for gpu in order[host, :block]]
        return tuple(sorted(found))

    def _add(self, load: Load, where: npt.NDArray[np.bool_]) -> None:
        self.busy[where] += cost(self.training, load)
        self.memory[where] += load.memory
        for key, values in self.sums.items():
            values[where] += getattr(load, key)


def _too_large(training: Training, room: Room, table: Table | None = None) -> UserError:
    """The error for tables without room: the largest of them, and what would fit."""
    model, gpus, whole = training.model, training.gpus, training.model.bytes
    table = table or max(model.tables, key=lambda t: t.rows * model.record_bytes(t))
    needs, record = table.rows * model.record_bytes(table), model.record_bytes(table)
    enough = int(np.ceil(whole / max(1.0, room.total)))
    fits = int((room.total * gpus - (whole - needs)) / record)
    also = f" (or it would with at most {fits:,} rows)" if fits > 0 else ""
    return UserError(
        f"table '{table.name}' ({table.rows:,} rows x {table.dim}, {readable_bytes(needs)} with the state "
        f"of {model.optimizer}) does not fit on {gpus} GPUs of {training.machine.name}, which have "
        f"{readable_bytes(room.total * gpus)} for {readable_bytes(whole)} of rows; all would fit on "
        f"{enough:,} GPUs{also}; a slower memory: scale.tiers"
    )
