"""A plan for tables that are not there, what a step then asks of each GPU, and which of its rows are in its
memory, its host's and on disks.

A GPU takes ``batch / gpus`` samples. A table lies whole on one GPU, in parts of its rows on several, or on
every GPU (data parallel). Who has a part looks its rows up for the whole batch, adds those of a sample, and
sends each GPU the vectors of its samples. A table's row parts within one host add up their vectors there
before they are sent to other hosts, as TorchRec's table_row_wise and HugeCTR's hierarchical plans do.

Three plans are made: with whole tables, with all in parts within a host, and with all in parts on every GPU.
Tables go, the most expensive first, to where least is asked; one that finds no room is cut finer. The plan
with the least seconds for rows and its messages is kept. Planners in use (Neo: Mudigere et al., ISCA 2022;
NVIDIA's in MLPerf v3.0) cut on until nothing is gained. On paper such a search finds plans that no published
rate has: with it the errors of MLPerf's rates were 20%, without it they are 9% (geometric mean).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from recpipe.common.words import readable_bytes
from recpipe.errors import UserError
from recpipe_perf_model.scale.machine import GIGA, Machine
from recpipe_perf_model.scale.model import FLOAT, ID, PaperModel, Table, covered, distinct

SORT_BITS, PAIR = 8, 12
"""Bits that one pass of a radix sort orders, and bytes of an id with its position: a table's update sorts
its ids, to add up the gradients of a row."""
WHOLE, ROWS, REPLICATED = "table_wise", "row_wise", "data_parallel"


@dataclass(frozen=True)
class Training:
    """How a model is trained on a machine."""

    model: PaperModel
    machine: Machine
    gpus: int
    batch: int
    """Samples of a step, of all GPUs together."""
    precision: str = "bf16"
    """Of the dense part's products: fp32, tf32, fp16 or bf16."""
    message_bytes: int = 4
    """Of a value that is sent between GPUs: rows and their gradients."""
    gradient_bytes: int = 4
    """Of a value of the dense part's gradients."""
    eager: bool = True
    """Whether the host begins every operator; otherwise CUDA graphs do, with activations in the products."""

    @property
    def host_gpus(self) -> int:
        """GPUs of one host that take part."""
        return min(self.gpus, int(self.machine.constants.gpus_per_host))

    @property
    def hosts(self) -> int:
        """Hosts that take part."""
        return ceil(self.gpus / self.host_gpus)

    @property
    def samples(self) -> float:
        """Of a step, on one GPU."""
        return self.batch / self.gpus

    @property
    def memory_rate(self) -> float:
        """Bytes a second that a GPU's kernels reach."""
        return self.machine.constants.hbm_gb_s * self.machine.constants.hbm_share * GIGA

    @property
    def value_bytes(self) -> int:
        """Of an activation."""
        return 2 if self.precision in ("fp16", "bf16") else 4

    def peak(self) -> float:
        """Operations a second of a GPU's products, at best."""
        known = self.machine.constants
        teras = {"fp32": known.tflops_fp32, "tf32": known.tflops_tf32}
        return 1e12 * teras.get(self.precision, known.tflops_half)


@dataclass(frozen=True)
class Load:
    """What a part of a table asks of the GPU that has it, in one step."""

    memory: float = 0.0
    """Bytes of rows with their state."""
    record: float = 0.0
    """Bytes of one of them."""
    lookups: float = 0.0
    distinct: float = 0.0
    read: float = 0.0
    """Bytes of memory that the lookups move."""
    updated: float = 0.0
    """Bytes of memory that the gradients and the update move."""
    ids: float = 0.0
    """Bytes of ids that come from other GPUs."""
    near: float = 0.0
    """Bytes of vectors to GPUs of its host, forward; backward as many come back."""
    far: float = 0.0
    """The same to other hosts."""
    reduced: float = 0.0
    """Bytes of the all-reduce of a data-parallel table's gradients."""


def part_load(training: Training, table: Table, kind: str, parts: int) -> Load:
    """What one of ``parts`` equal parts of a table asks for; for a table on every GPU, what each asks for."""
    model, world, rows = training.model, training.gpus, float(table.rows)
    record, row, pooling = model.record_bytes(table), table.dim * model.row_bytes, table.pooling
    if kind == REPLICATED:
        lookups, whole = training.samples * pooling, table.rows * table.dim * FLOAT
        return Load(
            memory=table.rows * record + whole,
            record=record,
            lookups=lookups,
            distinct=distinct(rows, table.skew, lookups),
            read=lookups * (row + ID) + training.samples * table.vectors * table.dim * training.value_bytes,
            # Gradients are a dense tensor, and the optimizer goes over all rows.
            updated=2 * (lookups * table.dim * FLOAT + whole + table.rows * record),
            reduced=whole if world > 1 else 0.0,
        )
    share = 1 / parts
    lookups, found = training.batch * pooling * share, distinct(rows, table.skew, training.batch * pooling)
    vector = table.dim * training.message_bytes
    passes = ceil(max(1.0, log2(max(2, table.rows))) / SORT_BITS)
    sent = training.batch * table.vectors * vector
    within = min(parts, training.host_gpus) if kind == ROWS and training.hosts > 1 else 1
    spread = sent / within
    return Load(
        memory=table.rows * share * record,
        record=record,
        lookups=lookups,
        distinct=found * share,
        read=lookups * (row + ID) + sent,
        updated=lookups * (vector + 2 * passes * PAIR) + found * share * 2 * record,
        ids=lookups * ID * (world - 1) / world,
        near=sent * (within - 1) / within + spread * (training.host_gpus - 1) / world,
        far=spread * (world - training.host_gpus) / world,
    )


def all_to_all(training: Training, near: float, far: float) -> float:
    """The seconds of an all-to-all in which the GPU that sends most sends ``near`` bytes within its host and
    ``far`` to other hosts; both go at the same time."""
    if training.gpus == 1:
        return 0.0
    curves = training.machine.curves
    within = curves["alltoall"].seconds(near)
    return max(within, curves["network"].seconds(far) if training.hosts > 1 else 0.0)


def all_reduce(training: Training, count: float) -> float:
    """The seconds to add up a buffer of ``count`` bytes of every GPU: within hosts, and for a share of it on
    each GPU between hosts."""
    if training.gpus == 1 or count <= 0:
        return 0.0
    curves, hosts, within = training.machine.curves, training.hosts, training.host_gpus
    near = curves["allreduce"].seconds(count) if within > 1 else 0.0
    far = 2 * count * (hosts - 1) / hosts / within
    return near + (curves["network"].seconds(far) if hosts > 1 else 0.0)


Cut = tuple[str, int]
"""How a table is placed, and in how many parts."""


@dataclass(frozen=True)
class Room:
    """Bytes for rows that a GPU has in its memory, and as its share of its host's memory and disks."""

    hbm: float
    dram: float
    ssd: float

    @property
    def total(self) -> float:
        """In all tiers."""
        return self.hbm + self.dram + self.ssd


@dataclass(frozen=True)
class Placed:
    """How a table is placed; ``load`` is that of each of its parts."""

    table: Table
    kind: str
    gpus: tuple[int, ...]
    load: Load


@dataclass(frozen=True)
class Plan:
    """Where all tables are. Bytes are those of the GPU that moves or sends most in a step, as in ``Load``."""

    tables: tuple[Placed, ...]
    read: float
    updated: float
    ids: float
    near: float
    far: float
    reduced: float
    memory: tuple[float, ...]
    """Bytes of rows by GPU."""

    def parts(self, gpu: int) -> list[tuple[Table, Load]]:
        """What a GPU has."""
        return [(p.table, p.load) for p in self.tables if gpu in p.gpus]

    def row_seconds(self, training: Training) -> float:
        """The seconds of a step for rows and messages, if nothing ran beside them."""
        memory = (self.read + self.updated) / training.memory_rate
        return memory + 2 * all_to_all(training, self.near, self.far) + all_reduce(training, self.reduced)


def make_plan(training: Training, room: Room) -> Plan:
    """The best of three plans; ``UserError`` names a table that fits nowhere."""
    tables, world = training.model.tables, training.gpus
    if training.model.bytes > room.total * world:
        raise _too_large(training, room)
    # An all-reduce moves a buffer twice; vectors go one way, and their gradients the other.
    sent = training.samples * training.message_bytes
    small = {t.name for t in tables if world > 1 and FLOAT * t.rows < t.vectors * sent}
    plans: list[Plan] = []
    misfit: Table | None = None
    for parts in sorted({1, training.host_gpus, world}):
        cuts: dict[str, Cut] = {
            t.name: (REPLICATED, world)
            if t.name in small
            else (ROWS, parts)
            if 1 < parts <= t.rows
            else (WHOLE, 1)
            for t in tables
        }
        while isinstance(placed := _placed(training, room, cuts), Table):
            finer = _finer(training, placed, *cuts[placed.name])
            if finer is None:
                misfit = placed
                break
            cuts[placed.name] = finer
        else:
            plans.append(placed)
    if not plans:
        raise _too_large(training, room, misfit)
    seconds = []
    for plan in plans:
        full = plan.parts(int(np.argmax(plan.memory)))
        seconds.append(plan.row_seconds(training) + tiered(training, full, room).seconds)
    return plans[int(np.argmin(seconds))]


def _finer(training: Training, table: Table, kind: str, parts: int) -> Cut | None:
    """The next finer way to cut a table that finds no room; None: there is none."""
    if kind == REPLICATED:
        return WHOLE, 1
    within = training.host_gpus
    more = min(2 * parts, within)
    if parts >= within:
        more = min(2 * parts, training.gpus) // within * within
    return (ROWS, more) if parts < more <= table.rows else None


def _placed(training: Training, room: Room, cuts: Mapping[str, Cut]) -> Plan | Table:
    """Place the parts, the most expensive first, on the least busy GPUs, each block of them on one host; or a
    table that found no room."""
    hosts, within = training.hosts, training.host_gpus
    busy, memory = np.zeros((hosts, within)), np.zeros((hosts, within))
    sums = {key: np.zeros((hosts, within)) for key in ("read", "updated", "ids", "near", "far")}
    loads = {t.name: part_load(training, t, *cuts[t.name]) for t in training.model.tables}
    curves, cost = training.machine.curves, {}
    for name, load in loads.items():  # messages at the rates of long ones
        seconds = (load.read + load.updated) / training.memory_rate + 2 * load.near / curves["alltoall"].rate
        cost[name] = seconds + (2 * load.far / curves["network"].rate if hosts > 1 else 0.0)
    found, reduced = [], 0.0
    for table in sorted(training.model.tables, key=lambda t: (cuts[t.name][0] != REPLICATED, -cost[t.name])):
        (kind, parts), load = cuts[table.name], loads[table.name]
        taken = np.zeros((hosts, within), dtype=bool)
        if kind == REPLICATED:
            taken[:] = True
            reduced += load.reduced
            if (memory + load.memory).max() > room.total:
                return table
        block = min(parts, within)
        for _ in range(0 if kind == REPLICATED else parts // block):
            free = np.where(memory + load.memory <= room.total, busy, np.inf)
            order = np.argsort(free, axis=1, kind="stable")[:, :block]
            worst = np.where(taken.any(axis=1), np.inf, np.take_along_axis(free, order, 1)[:, -1])
            host = int(worst.argmin())
            if not np.isfinite(worst[host]):
                return table
            taken[host, order[host]] = True
        busy[taken] += cost[table.name]
        memory[taken] += load.memory
        for key, values in sums.items():
            values[taken] += getattr(load, key)
        found.append(Placed(table, kind, tuple(np.flatnonzero(taken).tolist()), load))
    most = {key: float(values.max()) for key, values in sums.items()}
    return Plan(tuple(found), **most, reduced=reduced, memory=tuple(memory.ravel().tolist()))


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


@dataclass(frozen=True)
class Tiered:
    """Bytes of a GPU's rows by tier, and the seconds of a step that its rows from slower ones take."""

    hbm: float
    dram: float
    ssd: float
    seconds: float
    missed: float
    """The share of its lookups' distinct rows that are not in GPU memory."""


def tiered(training: Training, parts: Sequence[tuple[Table, Load]], room: Room) -> Tiered:
    """Where the rows of the ``parts`` of one GPU are.

    Whole parts go to GPU memory first, those with the most lookups for their bytes; what is left of it keeps
    the most popular rows of the other parts, of each the same share; the host's memory does so for what still
    remains, and the rest is on disks. Rows are moved while the step before trains.
    """
    whole = sum(load.memory for _, load in parts)
    if whole <= room.hbm:
        return Tiered(whole, 0.0, 0.0, 0.0, 0.0)
    left = room.hbm
    rest: list[tuple[Table, Load]] = []
    for table, load in sorted(parts, key=lambda part: -part[1].lookups / max(1.0, part[1].memory)):
        if not rest and load.memory <= left:
            left -= load.memory
        else:
            rest.append((table, load))
    below = sum(load.memory for _, load in rest)
    kept, hosted = left / below, min(1.0, (left + room.dram) / below)

    def missed(table: Table, share: float) -> float:
        """The share of a batch's distinct rows that are not among such a share of the most popular rows."""
        lookups = training.batch * table.pooling
        popular = lookups * covered(table.rows, table.skew, share)
        known = distinct(max(1.0, share * table.rows), table.skew, popular)
        every = distinct(float(table.rows), table.skew, lookups)
        return 1 - min(every, known) / max(every, 1e-12)

    slow = [load.distinct * missed(table, kept) for table, load in rest]
    moved = sum(2 * rows * load.record for rows, (_, load) in zip(slow, rest, strict=True))
    disk = sum(load.distinct * missed(table, hosted) for table, load in rest) if hosted < 1 else 0.0
    known = training.machine.constants
    bus = min(known.pcie_gb_s * known.pcie_share, known.dram_gb_s / training.host_gpus) * GIGA
    # A row from a disk is read, and written back as a block.
    seconds = moved / bus + 2 * disk / (known.ssd_reads_s / training.host_gpus)
    dram = below * (hosted - kept)
    share = sum(slow) / max(1.0, sum(load.distinct for _, load in parts))
    return Tiered(room.hbm, dram, max(0.0, below - left - dram), seconds, share)
