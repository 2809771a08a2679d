"""Measured costs of embedding operations on the ranks of a run; recpipe's machine profile keeps them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from recpipe_perf_model import COLLECTIVE_FAMILY, Host, Sample

from recpipe.kit import Damaged


@dataclass(frozen=True)
class LookupSample:
    """``tables`` equal tables in one TBE; bags, lookups and distinct rows are of each table.

    ``forward`` and ``backward`` (which updates the rows) are the ms that a rank is busy with all tables.
    """

    tables: int
    rows: int
    dim: int
    bags: int
    lookups: int
    distinct: float
    forward: float
    backward: float


@dataclass(frozen=True)
class CollectiveSample:
    """One collective over all ranks, each with ``bytes`` of input: elapsed ms, and busy ms."""

    collective: str
    bytes: int
    elapsed: float
    busy: float


@dataclass(frozen=True)
class ExchangeSample:
    """A step of a small sharded collection: busy ms in input dist, forward and backward.

    All lookups are in shards on rank 0, which ``owns`` them; the other ranks only send and receive.
    ``samples`` and ``lookups`` (of each table) are those of one rank; ``columns`` is the number of
    column-wise parts of a table.
    """

    sharding_type: str
    owns: bool
    tables: int
    rows: int
    dim: int
    columns: int
    samples: int
    lookups: int
    input: float
    forward: float
    backward: float


COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
SHARDINGS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel")
"""The measured sharding types, by TorchRec's names."""
_ABOVE_ZERO = (
    *("forward", "backward", "input", "elapsed", "tables", "rows", "dim", "columns", "bytes", "samples"),
    *("world", "local_world", "cores", "threads"),
)
CLOCK_MS = 1e-3
"""What a time is taken for that no pass could measure."""
LOOKUPS, STEPS = "lookups of ranks", "sharded steps of ranks"
"""Families of the machine's profile: benchmarks that all ranks run at once. Collectives are in recpipe's
own."""
Measured = TypeVar("Measured", LookupSample, CollectiveSample, ExchangeSample)


@dataclass(frozen=True)
class Machine:
    """The ranks that measurements are valid for; others measure again."""

    cores: int
    threads: int
    """The number of torch's threads on each rank."""
    world: int
    local_world: int
    backend: str
    optimizer: str

    @classmethod
    def current(cls, group: dist.ProcessGroup, device: torch.device, optimizer: EmbOptimType) -> Machine:
        """This process's ranks."""
        world = group.size()
        return cls(
            cores=Host.current(device).cores,
            threads=torch.get_num_threads(),
            world=world,
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            backend=dist.get_backend(group),
            optimizer=optimizer.value,
        )

    @property
    def at(self) -> dict[str, float | str]:
        """What tells its samples from others in the machine's profile, which has the rest."""
        counts = {"ranks": self.world, "local": self.local_world, "threads": self.threads}
        said: dict[str, float | str] = {name: float(count) for name, count in counts.items()}
        return {**said, "backend": self.backend, "optimizer": self.optimizer}


@dataclass(frozen=True)
class MachineProfile:
    """All measurements of one machine."""

    machine: Machine
    lookups: list[LookupSample]
    collectives: list[CollectiveSample]
    exchanges: list[ExchangeSample]

    @classmethod
    def least(cls, passes: Sequence[MachineProfile]) -> MachineProfile:
        """The least times of each sample in several passes of the same benchmarks."""
        first = passes[0]
        return cls(
            first.machine,
            _least([p.lookups for p in passes], "forward", "backward"),
            _least([p.collectives for p in passes], "elapsed", "busy"),
            _least([p.exchanges for p in passes], "input", "forward", "backward"),
        )

    def check(self) -> None:
        """``Damaged`` if a benchmark is missing or a figure is impossible."""
        measured = {s.collective for s in self.collectives}, {s.sharding_type for s in self.exchanges}
        if not self.lookups or measured != (set(COLLECTIVES), set(SHARDINGS)):
            raise Damaged("it lacks a benchmark, or has one that is unknown")
        for sample in (self.machine, *self.lookups, *self.collectives, *self.exchanges):
            for name, value in vars(sample).items():
                if isinstance(value, int | float) and (value < 0 or (name in _ABOVE_ZERO and not value)):
                    raise Damaged(f"a {type(sample).__name__} has {name}={value}")

    def families(self) -> dict[str, list[Sample]]:
        """Its measurements as those of recpipe's machine profile, by family."""
        at = self.machine.at
        found: dict[str, list[Sample]] = {COLLECTIVE_FAMILY: [], LOOKUPS: [], STEPS: []}
        for sample in self.collectives:
            sizes = {"bytes": float(sample.bytes), "ranks": at["ranks"], "threads": at["threads"]}
            times = {sample.collective: sample.elapsed, f"{sample.collective} busy": sample.busy}
            found[COLLECTIVE_FAMILY] += [Sample(k, sizes, ms / 1e3) for k, ms in times.items()]
        for family, samples, phases in (
            (LOOKUPS, self.lookups, ("forward", "backward")),
            (STEPS, self.exchanges, ("input", "forward", "backward")),
        ):
            for each in samples:
                sizes = {k: v if isinstance(v, str) else float(v) for k, v in vars(each).items()}
                times = {phase: float(sizes.pop(phase)) for phase in phases}
                for phase, ms in times.items():
                    found[family].append(Sample(f"{family}: {phase}", {**sizes, **at}, ms / 1e3))
        return found

    @classmethod
    def of(cls, families: Mapping[str, Sequence[Sample]], machine: Machine) -> MachineProfile | None:
        """What ``families`` of the machine's profile have for ``machine``; None if that is not all."""
        lookups, steps = (
            _joined(families.get(name, ()), machine.at, phases) for name, phases in ((LOOKUPS, 2), (STEPS, 3))
        )
        try:
            found = cls(
                machine,
                [LookupSample(**_typed(LookupSample, each)) for each in lookups],
                known_collectives(families, machine.world, machine.threads),
                [ExchangeSample(**_typed(ExchangeSample, each)) for each in steps],
            )
            found.check()
        except (Damaged, TypeError):
            return None
        return found


def machines(host: Host, families: Mapping[str, Sequence[Sample]]) -> list[Machine]:
    """The ranks on ``host`` that ``families`` of its profile have steps of, the last measured first."""
    found = []
    for sample in families.get(STEPS, ()):
        at = sample.at
        found.append(
            Machine(
                host.cores,
                int(at["threads"]),
                int(at["ranks"]),
                int(at["local"]),
                str(at["backend"]),
                str(at["optimizer"]),
            )
        )
    return list(dict.fromkeys(reversed(found)))


def known_collectives(
    families: Mapping[str, Sequence[Sample]], ranks: int, threads: int
) -> list[CollectiveSample]:
    """The collectives between so many ranks that the machine's profile has."""
    wanted = {"ranks": float(ranks), "threads": float(threads)}
    times: dict[tuple[str, int], float] = {}
    for sample in families.get(COLLECTIVE_FAMILY, ()):
        if wanted.items() <= sample.at.items() and "bytes" in sample.at:
            times[sample.kind, int(sample.at["bytes"])] = 1e3 * sample.seconds
    return [
        CollectiveSample(kind, size, elapsed, times[f"{kind} busy", size])
        for (kind, size), elapsed in times.items()
        if (f"{kind} busy", size) in times
    ]


def _joined(
    samples: Sequence[Sample], at: Mapping[str, float | str], phases: int
) -> list[dict[str, float | str]]:
    """The sizes and the times of samples at ``at``, ``phases`` of which are of one run."""
    own = [sample for sample in samples if at.items() <= sample.at.items()]
    found = []
    for first in range(0, len(own) - phases + 1, phases):
        sizes = {name: value for name, value in own[first].at.items() if name not in at}
        for sample in own[first : first + phases]:
            sizes[sample.kind.rpartition(": ")[2]] = 1e3 * sample.seconds
        found.append(sizes)
    return found


def _typed(kind: type[Any], sizes: Mapping[str, float | str]) -> dict[str, Any]:
    """``sizes`` as the fields of ``kind`` have them."""
    made = {"int": int, "bool": bool, "float": float, "str": str}
    known = {field.name: str(field.type) for field in fields(kind)}
    return {name: made[known.get(name, "str")](value) for name, value in sizes.items()}


def _least(passes: Sequence[Sequence[Measured]], *times: str) -> list[Measured]:
    """Each sample with the least of its times in all passes that is above zero: a virtual machine's processor
    clock can stand still."""
    made = []
    for samples in zip(*passes, strict=True):
        found: dict[str, Any] = {}
        for name in times:
            found[name] = min((t for s in samples if (t := getattr(s, name)) > 0), default=CLOCK_MS)
        made.append(replace(samples[0], **found))
    return made
