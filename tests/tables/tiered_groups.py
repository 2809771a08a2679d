"""Several groups of tables (bags, weighted bags, sequences; their own dimensions and optimizers) sharded over
processes, their rows in tiers, beside the same shards without tiers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.files import RunDir
from recpipe.data.parts import in_order
from recpipe.data.select import between
from recpipe.distributed.ranks import Ranks, join_group
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.quantizer import Quantizer, RecordLayout, RowCodec
from recpipe.tables.build import Place
from recpipe.tables.config import TierConfig
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import group_owners, quantized
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.own import ShardTiers
from recpipe.tables.sharding.planning import plan_shards
from recpipe.tables.sharding.tables import shard_tables
from recpipe.tables.stores.codecs import COLD
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection, TieredRows
from tests.plugin.samples import ACME
from tests.tables.grouped import built, config, contents
from tests.tables.samples import CPU
from tests.tables.sharded import started
from tests.tables.sharded_groups import (
    SIZE,
    Places,
    SkipSmall,
    WeightedModel,
    filter_all,
    look_up,
    model_tables,
    send,
    update,
    weighted_ids,
)

STEPS = 6
MIDDLE = STEPS // 2
"""How many are trained before the evaluation and the checkpoint."""
TIERS = TierConfig("lru", "host", "10%", None, prefetch=True, sharded=True)


@dataclass(frozen=True)
class GroupCase:
    """Sharding types by table."""

    types: Mapping[str, str]
    tiers: TierConfig = TIERS
    one_each: bool = False
    """Whether every bag has one id, so that no sums are parted between the tiers."""
    skips: str = ""
    """Whether rows are left out of updates: ``both`` with tiers and without, or in tiers ``alone``."""
    int8: str = ""
    """Whether cold rows are encoded: ``both`` in shards and in one process, or in shards ``alone``."""

    @property
    def control(self) -> bool:
        """Whether something is to make a difference."""
        return "alone" in (self.skips, self.int8)

    @property
    def name(self) -> str:
        kinds = " ".join(dict.fromkeys(self.types.values()))
        words = (
            "groups",
            kinds,
            self.tiers.policy,
            "one each" if self.one_each else "",
            f"skips {self.skips}" if self.skips else "",
            f"int8 {self.int8}" if self.int8 else "",
        )
        return " ".join(word for word in words if word)

    def compared(self, ranks: Ranks, run_dir: RunDir, saved: Path) -> dict[str, Any]:
        """The case trained, and its second half again from a checkpoint in ``saved``."""
        return _compared(self, ranks, run_dir, saved)


class Int8(Quantizer):
    def cold(self, layout: RecordLayout) -> RowCodec:
        return COLD["int8"](layout)


def assembled(case: GroupCase, tables: ModelTables) -> Assembly:
    plugin = Places(case.types)
    brought = replace(plugin.contribute(None), quantizer=Int8() if case.int8 else None)
    return assemble([(ACME, plugin, brought)], tables.infos(), prefer={})


@contextmanager
def tiered(
    case: GroupCase, ranks: Ranks, run_dir: RunDir, saved: Path | None = None
) -> Iterator[GroupedCollection]:
    """The tables of ``case`` as a run makes them, of the rows in ``saved``; closed at the end."""
    model = WeightedModel()
    plain = started(model_tables(model), saved)
    parts = assembled(case, plain)
    tables = quantized(plain, parts.quantizing)
    owners = group_owners(case.tiers, parts, tables)
    join_group(CPU, ranks)
    made, plan = plan_shards(tables, case.tiers, ShardClaims.of(parts), CPU, SIZE, ranks, ranks.world, owners)
    place = Place(case.tiers, CPU, run_dir, ranks, SIZE)
    whole = shard_tables(made, plan, ranks, model, ShardTiers(owners, place), saved)
    with closing(GroupedCollection(tables, whole)) as grouped:
        yield grouped


def batch(case: GroupCase, step: int) -> KeyedJaggedTensor:
    """The last one has one sample."""
    return weighted_ids(1 if step == STEPS - 1 else SIZE, step, case.one_each)


def train_share(
    grouped: GroupedCollection, case: GroupCase, ranks: Ranks, first: int, stop: int
) -> Iterator[int]:
    """Train this rank's share of batches [first, stop), the ids of each sent while the one before trains;
    after each one its number."""

    def share(step: int) -> tuple[KeyedJaggedTensor, int, int]:
        sparse = batch(case, step)
        mine = ranks.shares(0, sparse.stride())[ranks.rank]
        return between(sparse, mine.start, mine.stop), mine.start, sparse.stride()

    sent = send(grouped, share(first)[0])
    for step in range(first, stop):
        sparse, start, total = share(step)
        found = look_up(grouped, sparse, sent)
        sent = send(grouped, share(step + 1)[0]) if step + 1 < stop else []
        for ids in filter(None, sent):
            ids.send_ids()
        for ids in filter(None, sent):
            ids.fetch_rows()
        update(grouped, sparse, found, start, total, heard=True)
        yield step


def train_all(grouped: GroupedCollection, case: GroupCase, ranks: Ranks, first: int, stop: int) -> None:
    """All of them."""
    for _ in train_share(grouped, case, ranks, first, stop):
        pass


def evaluated(grouped: GroupedCollection) -> torch.Tensor:
    """Rows of a batch that is not trained, as an evaluation looks them up."""
    sparse = weighted_ids(5, 99)
    with torch.no_grad():
        each = zip(grouped.tables.groups, grouped.collections, strict=True)
        return torch.cat([c.lookup(in_order(sparse, g.tables.features)).view(-1) for g, c in each])


def residents(grouped: GroupedCollection) -> list[np.ndarray]:
    """Of all tiers on this rank."""
    return [tiers.planner.row_of_slot.copy() for tiers in tiers_of(grouped)]


def tiers_of(grouped: GroupedCollection) -> list[TieredEmbeddingBagCollection]:
    """Of all shards on this rank."""
    shards = [c for c in grouped.collections if isinstance(c, ShardedCollection)]
    return [tiers for c in shards for tiers in c.tiers]


def watch_plans(grouped: GroupedCollection) -> list[TieredRows]:
    """Every batch that is taken in from now on, in any of them."""
    made: list[TieredRows] = []
    for tiers in tiers_of(grouped):

        def input_dist(
            sparse: KeyedJaggedTensor, takes: Callable[[Any], TieredRows] = tiers.input_dist
        ) -> TieredRows:
            made.append(takes(sparse))
            return made[-1]

        tiers.input_dist = input_dist  # type: ignore[assignment, method-assign]
    return made


def _reference(case: GroupCase, ranks: Ranks, run_dir: RunDir) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """What an evaluation in the middle looks up, and the contents at the end: of the same shards all in
    memory; or of encoded rows of tables that are not sharded, in the same tiers."""
    if case.int8:
        plain = model_tables(WeightedModel())
        parts = assembled(case, plain)
        tables = quantized(plain, parts.quantizing) if case.int8 == "both" else plain
        with closing(built(tables, config(policy=case.tiers.policy), run_dir)) as grouped:
            return _trained(grouped, case, Ranks())
    with tiered(replace(case, tiers=replace(case.tiers, policy="resident")), ranks, run_dir) as grouped:
        if case.skips == "both":
            filter_all(grouped, SkipSmall())
        return _trained(grouped, case, ranks)


def _trained(
    grouped: GroupedCollection, case: GroupCase, ranks: Ranks
) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    for step in train_share(grouped, case, ranks, 0, STEPS):
        if step == MIDDLE - 1:
            seen = evaluated(grouped)
    return seen, contents(grouped)


def save(grouped: GroupedCollection, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The tables, while the next batch is on its way, in ``folder``; their placement, on every rank."""
    if ranks.rank == 0:
        folder.mkdir()
    grouped.save_tables(folder)
    placement: list[Any] = [grouped.placement_state()]
    dist.broadcast_object_list(placement)
    if ranks.rank == 0:
        torch.save(placement[0], folder / "placement.pt")
    return placement[0]  # type: ignore[no-any-return]


def _resumed(
    case: GroupCase, ranks: Ranks, run_dir: RunDir, saved: Path, placement: dict[str, Any]
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Contents, and who is resident, at the end of a run that goes on from ``saved``."""
    with tiered(case, ranks, run_dir, saved) as grouped:
        if case.skips:
            filter_all(grouped, SkipSmall())
        state = copy.deepcopy(placement)
        grouped.check_placement_state(state)
        grouped.load_placement_state(state)
        train_all(grouped, case, ranks, MIDDLE, STEPS)
        return contents(grouped), residents(grouped)


def _compared(case: GroupCase, ranks: Ranks, run_dir: RunDir, saved: Path) -> dict[str, Any]:
    seen, expected = _reference(case, ranks, run_dir)
    with tiered(case, ranks, run_dir) as grouped:
        if case.skips:
            filter_all(grouped, SkipSmall())
        each, plans = tiers_of(grouped), watch_plans(grouped)
        for step in train_share(grouped, case, ranks, 0, STEPS):
            if step == MIDDLE - 1:
                placement = save(grouped, ranks, saved)
                before = grouped.tier_figures()
                mine = evaluated(grouped)
                ahead = [tiers.planner._pending is not None for tiers in each]
                moved = grouped.tier_figures() != before
        found, figures, where = contents(grouped), grouped.tier_figures(), residents(grouped)
        kinds = {n: t.sharding for c in grouped.collections for n, t in c.shards.items()}  # type: ignore[attr-defined]
    again, there = (found, where) if case.control else _resumed(case, ranks, run_dir, saved, placement)
    if ranks.rank == 0:
        np.savez(saved / "contents.npz", **found)
    scale = {n: np.maximum(1, np.abs(v)) for n, v in expected.items()}
    assert figures is not None
    return {
        "kinds": kinds,
        "difference": {n: float((np.abs(v - expected[n]) / scale[n]).max()) for n, v in found.items()},
        "seen": float((mine - seen).abs().max()),
        "moved": moved,
        "placements": len(placement),
        "ahead": sum(ahead) / len(ahead),
        "plans": len(plans) / len(each),
        "resumed": max(float(np.abs(v - found[n]).max()) for n, v in again.items()),
        "placed": all(np.array_equal(one, other) for one, other in zip(where, there, strict=True)),
        "read": figures.io.rows_read,
        "written": figures.io.rows_written,
    }
