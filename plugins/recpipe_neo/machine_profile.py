"""A machine's profile: measured costs of embedding operations, saved as a JSON file for later runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from recpipe.kit import Damaged, entries, parse_json, processor, typed_as
from recpipe.plugin import UserError

SCHEMA = 1


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
Sample = TypeVar("Sample", LookupSample, CollectiveSample, ExchangeSample)


@dataclass(frozen=True)
class Machine:
    """The machine and versions that measurements are valid for; others measure again."""

    processor: str
    cores: int
    threads: int
    """The number of torch's threads on each rank."""
    torch_version: str
    fbgemm_version: str
    torchrec_version: str
    world: int
    local_world: int
    backend: str
    optimizer: str

    @classmethod
    def current(cls, group: dist.ProcessGroup, device: torch.device, optimizer: EmbOptimType) -> Machine:
        """This process's machine."""
        world = group.size()
        return cls(
            processor=torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            torch_version=torch.__version__,
            fbgemm_version=version("fbgemm-gpu"),
            torchrec_version=version("torchrec"),
            world=world,
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            backend=dist.get_backend(group),
            optimizer=optimizer.value,
        )

    def file(self, folder: Path) -> Path:
        """The file of its profile."""
        text = json.dumps(asdict(self), sort_keys=True)
        return folder / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


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
            [
                _least(group, "forward", "backward")
                for group in zip(*(p.lookups for p in passes), strict=True)
            ],
            [
                _least(group, "elapsed", "busy")
                for group in zip(*(p.collectives for p in passes), strict=True)
            ],
            [
                _least(group, "input", "forward", "backward")
                for group in zip(*(p.exchanges for p in passes), strict=True)
            ],
        )

    def text(self) -> str:
        """The profile as JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def parse(cls, text: str, source: str) -> MachineProfile:
        """Parse JSON from ``source``; raises ``UserError`` if it is not a profile."""
        try:
            found = parse_json(text)
            schema = entries({"schema": int}, found)["schema"]
            if schema != SCHEMA:
                raise Damaged(f"schema {schema}, not {SCHEMA}")
            profile = typed_as(cls, {k: v for k, v in found.items() if k != "schema"})
            profile.check()
        except ValueError as fault:
            raise UserError(
                f"{source}: no machine profile ({fault}); delete it, and it is measured again"
            ) from fault
        return profile

    def check(self) -> None:
        """``Damaged`` if a benchmark is missing or a figure is impossible."""
        measured = {s.collective for s in self.collectives}, {s.sharding_type for s in self.exchanges}
        if not self.lookups or measured != (set(COLLECTIVES), set(SHARDINGS)):
            raise Damaged("it lacks a benchmark, or has one that is unknown")
        for sample in (self.machine, *self.lookups, *self.collectives, *self.exchanges):
            for name, value in vars(sample).items():
                if isinstance(value, int | float) and (value < 0 or (name in _ABOVE_ZERO and not value)):
                    raise Damaged(f"a {type(sample).__name__} has {name}={value}")

    def save(self, folder: Path) -> Path:
        """Write it into ``folder`` atomically; raises ``UserError`` if that fails."""
        file = self.machine.file(folder)
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(self.text(), encoding="utf-8")
            draft.replace(file)
        except OSError as fault:
            raise UserError(f"cannot write the machine profile {file}: {fault.strerror}") from fault
        return file


def _least(samples: Sequence[Sample], *times: str) -> Sample:
    """The least of each time that is above zero: a virtual machine's processor clock can stand still."""
    found: dict[str, Any] = {}
    for name in times:
        found[name] = min((t for s in samples if (t := getattr(s, name)) > 0), default=CLOCK_MS)
    return replace(samples[0], **found)
