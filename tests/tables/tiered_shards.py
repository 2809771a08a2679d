"""Shards whose rows lie in tiers, in processes of their own, beside tables that are whole."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from recpipe.common.files import RunDir, lock_run_dir
from recpipe.distributed.ranks import Ranks, join_group
from recpipe.plugin.assembly import Assembly
from recpipe.tables.build import Place
from recpipe.tables.config import TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import group_owners
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.own import ShardTiers
from recpipe.tables.sharding.planning import plan_shards
from recpipe.tables.sharding.tables import shard_tables
from tests.ranks import end_process, joined
from tests.tables.samples import CPU
from tests.tables.sharded import (
    SIZE,
    apart,
    assembly,
    batches,
    contents,
    part,
    ranks_of,
    started,
    table_set,
    train,
)

STEPS = 12
TIERS = TierConfig("lru", "host", "10%", None, prefetch=True, sharded=True)


@dataclass(frozen=True)
class Case:
    """``loses``: what rank 0 writes to its cold store is lost."""

    optimizer: str
    types: Mapping[str, str]
    tiers: TierConfig = TIERS
    loses: bool = False

    @property
    def name(self) -> str:
        kinds = " ".join(self.types.values())
        lost = " loses" if self.loses else ""
        return f"{self.optimizer} {kinds} {self.tiers.policy} {self.tiers.store}{lost}"

    def compared(self, ranks: Ranks, run_dir: RunDir, saved: Path) -> dict[str, object]:
        """A case trained, beside whole tables; half of it again from a checkpoint in ``saved``."""
        return compared(self, ranks, run_dir, saved)


class Compared(Protocol):
    """What two processes train."""

    @property
    def name(self) -> str:
        """No other's."""

    def compared(self, ranks: Ranks, run_dir: RunDir, saved: Path) -> dict[str, Any]:
        """What rank 0 tells of it."""


@contextmanager
def tiered(
    case: Case, ranks: Ranks, run_dir: RunDir, parts: Assembly | None = None, saved: Path | None = None
) -> Iterator[ShardedCollection]:
    """The tables of ``case``, as a run makes them, of the rows in ``saved``; they are closed at the end."""
    tables = started(ModelTables.single(table_set(case.optimizer)), saved)
    parts = assembly(case.types) if parts is None else parts
    owners = group_owners(case.tiers, parts, tables)
    join_group(CPU, ranks)
    made, plan = plan_shards(tables, case.tiers, ShardClaims.of(parts), CPU, SIZE, ranks, ranks.world, owners)
    place = Place(case.tiers, CPU, run_dir, ranks, SIZE)
    tiers = ShardTiers(owners, place)
    (collection,) = shard_tables(made, plan, ranks, tiers=tiers, saved=saved)
    with closing(collection):
        yield collection


def step(tables: ShardedCollection, ranks: Ranks, number: int) -> None:
    """Train this rank's share of batch ``number``, the last of which has one sample."""
    sparse = batches(STEPS)[number]
    mine = ranks.shares(0, sparse.stride())[ranks.rank]
    train(tables, part(sparse, mine.start, mine.stop), mine.start, sparse.stride())


def process(rank: int, world: int, folder: str, cases: Sequence[Compared]) -> None:
    """Train every case; rank 0 writes how far each is from whole tables, and what a resumed run makes of a
    checkpoint from the middle."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    with joined(rank, world, str(Path(folder, "meet"))):
        ranks, told = ranks_of(rank, world), {}
        for number, case in enumerate(cases):
            here = Path(folder, f"{number}-{rank}")
            with lock_run_dir(here) as run_dir:
                told[case.name] = case.compared(ranks, run_dir, Path(folder, f"saved-{number}"))
        if rank == 0:
            Path(folder, "told.json").write_text(json.dumps(told))
        dist.barrier()
    end_process()


def compared(case: Case, ranks: Ranks, run_dir: RunDir, saved: Path) -> dict[str, object]:
    """As ``Case.compared``."""
    whole = ResidentCollection(table_set(case.optimizer), CPU)
    for sparse in batches(STEPS):
        train(whole, sparse, 0, sparse.stride())
    with tiered(case, ranks, run_dir) as tables:
        for tiers in tables.tiers if case.loses and ranks.rank == 0 else ():
            tiers.store.scatter = lambda rows, records: None  # type: ignore[method-assign]
        for number in range(STEPS // 2):
            step(tables, ranks, number)
        if ranks.rank == 0:
            saved.mkdir()
        tables.save_tables(saved)
        placement = tables.placement_state()
        everyone: list[object] = [placement]
        dist.broadcast_object_list(everyone)
        for number in range(STEPS // 2, STEPS):
            step(tables, ranks, number)
        found, figures, kinds = contents(tables), tables.tier_figures(), tables.shards
        residents = [tiers.planner.row_of_slot.copy() for tiers in tables.tiers]
    expected = contents(whole)
    assert figures is not None
    case = replace(case, tiers=replace(case.tiers, store="host"))
    with tiered(case, ranks, run_dir, saved=saved) as tables:
        state = copy.deepcopy(everyone[0])
        assert isinstance(state, dict)
        tables.check_placement_state(state)
        placed = tables.load_placement_state(state)
        for number in range(STEPS // 2, STEPS):
            step(tables, ranks, number)
        resumed = contents(tables)
        again = [tiers.planner.row_of_slot for tiers in tables.tiers]
    same = all(np.array_equal(one, other) for one, other in zip(residents, again, strict=True))
    return {
        "kinds": {name: table.sharding for name, table in kinds.items()},
        "difference": {n: max(map(apart, v, expected[n])) for n, v in found.items()},
        "resumed": max(max(map(apart, v, found[n])) for n, v in resumed.items()),
        "placed": placed and same,
        "read": figures.io.rows_read,
        "written": figures.io.rows_written,
        "resident_bytes": figures.resident_bytes,
        "cold_bytes": figures.cold_bytes,
    }
