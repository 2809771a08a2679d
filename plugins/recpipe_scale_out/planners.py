"""Plans of shards, in the slot that training's planners have: capacity, load, nets, and least latency.

Each planner gives a ``ShardingPlanner`` of TorchRec for a topology in which a rank is a shard. The tables of
a package may be of fewer than 32 bits, which TorchRec's own cost models do not know; these go by the
package's facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch.distributed as dist
from recpipe_perf_model import Asked, Costs, simulated
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingPlanner,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.common.words import readable_bytes
from recpipe.errors import UserError
from recpipe.plugin import Planner
from recpipe.private_api import EnumerableShardingSpec, ShardMetadata, module_name
from recpipe_scale_out.facts import TableFacts

Facts = Mapping[str, TableFacts]


@dataclass(frozen=True)
class Piece:
    """Rows of a table that are on one shard."""

    table: str
    row: int
    rows: int
    nbytes: int
    weight: float
    """What is to be balanced."""


def lightest_first(pieces: Sequence[Piece], shards: Sequence[int], room: list[int]) -> list[int]:
    """One of ``shards`` for each piece: the heaviest come first, and each goes to the shard with the least
    weight that has room for it (longest processing time first, Graham, 1969); if a large one then finds no
    room, the largest come first. ``room``: bytes that each shard has left, which become fewer. ``UserError``
    if one has room nowhere."""
    before = list(room)
    try:
        return _in_order(pieces, shards, room, lambda piece: (-piece.weight, -piece.nbytes))
    except UserError:
        room[:] = before
        return _in_order(pieces, shards, room, lambda piece: (-piece.nbytes, -piece.weight))


def _in_order(
    pieces: Sequence[Piece],
    shards: Sequence[int],
    room: list[int],
    order: Callable[[Piece], tuple[float, float]],
) -> list[int]:
    load, taken = dict.fromkeys(shards, 0.0), dict.fromkeys(shards, 0)
    places = [0] * len(pieces)
    for at in sorted(range(len(pieces)), key=lambda at: order(pieces[at])):
        piece = pieces[at]
        fit = [shard for shard in shards if piece.nbytes <= room[shard]]
        if not fit:
            raise UserError(
                f"rows {piece.row} to {piece.row + piece.rows} of table '{piece.table}' take "
                f"{readable_bytes(piece.nbytes)}, and no shard has so much left: give more shards, or memory="
            )
        shard = min(fit, key=lambda shard: (load[shard], taken[shard], shard))
        places[at] = shard
        load[shard] += piece.weight
        taken[shard] += piece.nbytes
        room[shard] -= piece.nbytes
    return places


class Balanced(Planner):
    """Whole tables on ranks by ``lightest_first``; those of more than ``limit`` bytes are cut by rows before,
    into parts of one size. Capacity: their weight is their bytes."""

    def __init__(self, facts: Facts, limit: int | None = None) -> None:
        self.facts = {module_name(name): own for name, own in facts.items()}
        self.limit = limit

    def make(self, topology: Topology, constraints: Mapping[str, ParameterConstraints]) -> ShardingPlanner:
        """See ``Planner``; ``constraints`` are TorchRec's limits of kernels and types, which no shard has."""
        return _Planner(topology, self.placed)

    def weight(self, table: TableFacts, row: int, rows: int) -> float:
        """What is balanced, of some rows."""
        return float(rows * table.row_bytes)

    def pieces(self, tables: Sequence[str]) -> list[Piece]:
        """The tables, cut where they are too large."""
        found = []
        for name in tables:
            own = self.facts[name]
            count = 1 if self.limit is None else min(own.info.rows, max(1, -(-own.nbytes // self.limit)))
            each = -(-own.info.rows // count)
            for row in range(0, own.info.rows, each):
                rows = min(each, own.info.rows - row)
                found.append(Piece(name, row, rows, rows * own.row_bytes, self.weight(own, row, rows)))
        return found

    def placed(self, tables: Sequence[str], room: list[int]) -> list[tuple[Piece, int]]:
        """The pieces of ``tables`` and the shard of each; ``room``: bytes that each shard has."""
        pieces = self.pieces(tables)
        return list(zip(pieces, lightest_first(pieces, range(len(room)), room), strict=True))


class LoadBalanced(Balanced):
    """As much to read for a sample on each shard: measured lookups times bytes, and of a table that is cut
    the lookups of each part, where they were counted."""

    def weight(self, table: TableFacts, row: int, rows: int) -> float:
        """Bytes read for a sample."""
        return table.load(row, rows)


class NetSpecific(Balanced):
    """The tables of one net together, so that it waits for its own shards alone: shards are given to nets by
    their bytes, at least one to each, and then balanced by capacity. With more nets than shards, nets are
    whole."""

    def placed(self, tables: Sequence[str], room: list[int]) -> list[tuple[Piece, int]]:
        """See ``Balanced``."""
        nets: dict[int, list[Piece]] = {}
        for piece in self.pieces(tables):
            nets.setdefault(self.facts[piece.table].net, []).append(piece)
        sizes = {net: sum(piece.nbytes for piece in own) for net, own in nets.items()}
        found = []
        if len(nets) > len(room):
            whole = [Piece(f"net {net}", 0, 1, size, float(size)) for net, size in sizes.items()]
            places = lightest_first(whole, range(len(room)), room)
            for own, place in zip(nets.values(), places, strict=True):
                found += [(piece, place) for piece in own]
            return found
        begin = 0
        for net, count in _seats(sizes, len(room)).items():
            shards = range(begin, begin + count)
            found += zip(nets[net], lightest_first(nets[net], shards, room), strict=True)
            begin += count
        return found


def _seats(sizes: Mapping[int, int], shards: int) -> dict[int, int]:
    """How many of ``shards`` each net gets, at least one: the next one always goes to the net with the most
    bytes on each of those it has."""
    seats = dict.fromkeys(sizes, 1)
    for _ in range(shards - len(sizes)):
        seats[max(sizes, key=lambda net: (sizes[net] / seats[net], -net))] += 1
    return seats


PLAYED, COUNTS = 1000, 12
"""Requests of which a plan's p99 is predicted, and how many numbers of shards are tried at most."""


class LeastLatency(Balanced):
    """The least p99 that the queueing model of ``recpipe_perf_model`` predicts, by what servers' work takes.

    Of the shards as many get rows as that asks for, by their memory or by the time of the slowest one, which
    each further call has to pay for. Predicted work is balanced among one, two and more shards; these plans
    and those of the other planners are played with the same requests. Of two that are predicted alike, that
    with fewer shards counts.
    """

    def __init__(self, facts: Facts, limit: int | None = None, known: Costs | None = None) -> None:
        super().__init__(facts, limit)
        self.known = known or Costs()

    def asked(self, piece: Piece) -> Asked:
        """What a request asks for some rows."""
        table, load = self.facts[piece.table], self.known.load
        share, features = table.share(piece.row, piece.rows), table.info.features
        each = fmean([1 if name in load.shared else load.samples for name in features] or [load.samples])
        lookups = table.lookups or 0.0
        bags = len(features) or 1
        vectors = lookups * share
        if table.info.pooled:  # a bag is asked for if some of its ids are here
            vectors = bags * (1.0 - (1.0 - share) ** max(1.0, lookups / bags))
        read = table.load(piece.row, piece.rows)
        sums = 4 * table.info.dim * vectors
        return Asked(len(features), each * lookups * share, each * read, each * sums)

    def weight(self, table: TableFacts, row: int, rows: int) -> float:
        """Predicted seconds of a request at a shard, and of its lookups at the main server."""
        costs = self.known.costs
        asked = self.asked(Piece(module_name(table.info.name), row, rows, 0, 0.0))
        work = costs.shard(asked).work.of(1) - costs.shard(Asked(0, 0, 0, 0)).work.of(1)
        return work + 1e-6 * costs.lookup_us * asked.lookups

    def p99(self, pieces: Sequence[Piece], places: Sequence[int]) -> float:
        """Predicted seconds of these pieces on the shards of ``places``."""
        of_shard: dict[int, list[Asked]] = {}
        for piece, place in zip(pieces, places, strict=True):
            of_shard.setdefault(place, []).append(self.asked(piece))
        asked = [Asked(*map(sum, zip(*own, strict=True))) for own in of_shard.values()]
        servers = self.known.costs.servers(asked, Asked(0, 0, 0, 0), self.known.load)
        # Where it is too much for any plan, the best one is that which comes closest.
        rate = min(self.known.load.rate, 0.9 * servers.capacity()[0])
        over = self.known.load.rate / rate
        return over * simulated(servers, rate, PLAYED).percentile(99)

    def placed(self, tables: Sequence[str], room: list[int]) -> list[tuple[Piece, int]]:
        """See ``Balanced``."""
        pieces = self.pieces(tables)
        found: dict[tuple[int, ...], None] = {}
        why: UserError | None = None
        for plan in self._plans(tables, pieces, room):
            try:
                found[_numbered(plan())] = None
            except UserError as fault:
                why = fault
        if not found:
            assert why is not None
            raise why
        times = {places: self.p99(pieces, places) for places in found}
        least = min(times.values()) * ALIKE
        best = min((places for places, time in times.items() if time <= least), key=lambda own: len({*own}))
        return list(zip(pieces, best, strict=True))

    def _plans(
        self, tables: Sequence[str], pieces: Sequence[Piece], room: Sequence[int]
    ) -> Iterator[Callable[[], list[int]]]:
        """What makes a place of each piece, or raises ``UserError``."""
        for count in _counts(len(room)):
            yield partial(lightest_first, pieces, range(count), [*room])
        facts = {own.info.name: own for own in self.facts.values()}
        for kind in (Balanced, LoadBalanced, NetSpecific):
            yield partial(_of_other, kind(facts, self.limit), tables, pieces, [*room])


def _of_other(
    planner: Balanced, tables: Sequence[str], pieces: Sequence[Piece], room: list[int]
) -> list[int]:
    """Where another planner puts these pieces."""
    own = {(piece.table, piece.row): place for piece, place in planner.placed(tables, room)}
    return [own[piece.table, piece.row] for piece in pieces]


def _numbered(places: Sequence[int]) -> tuple[int, ...]:
    """The same with shards numbered as they come: shards are alike, so that plans which differ in no more are
    one."""
    of = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(of[place] for place in places)


ALIKE = 1.01
"""How many times as long as another's a predicted time is that counts as the same."""


def _counts(shards: int) -> list[int]:
    """The numbers of shards that are tried: all of a few, and of many ones that grow alike."""
    return sorted(
        {round(shards ** (at / (COUNTS - 1))) for at in range(COUNTS)} | {*range(1, min(shards, 8) + 1)}
    )


class _Planner(ShardingPlanner):  # type: ignore[misc]
    """TorchRec's plan of what ``placed`` says: whole tables, or rows of them, on ranks."""

    def __init__(
        self,
        topology: Topology,
        placed: Callable[[Sequence[str], list[int]], list[tuple[Piece, int]]],
    ) -> None:
        self.topology, self.placed = topology, placed

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """See TorchRec."""
        dims: dict[str, dict[str, int]] = {}
        for path, own in module.named_modules():
            if isinstance(own, EmbeddingBagCollection):
                dims[path] = {c.name: c.embedding_dim for c in own.embedding_bag_configs()}
            elif isinstance(own, EmbeddingCollection):
                dims[path] = {c.name: c.embedding_dim for c in own.embedding_configs()}
        names = [name for tables in dims.values() for name in tables]
        room = [device.storage.ddr for device in self.topology.devices]
        of_table: dict[str, list[tuple[Piece, int]]] = {}
        for piece, rank in self.placed(names, room):
            of_table.setdefault(piece.table, []).append((piece, rank))
        return ShardingPlan(
            {
                path: EmbeddingModuleShardingPlan(
                    {name: _sharding(of_table[name], dim) for name, dim in tables.items()}
                )
                for path, tables in dims.items()
            }
        )

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The same on every rank."""
        return self.plan(module, sharders)


def _sharding(pieces: Sequence[tuple[Piece, int]], dim: int) -> ParameterSharding:
    own: list[Any] = [
        ShardMetadata([piece.row, 0], [piece.rows, dim], f"rank:{rank}/cpu") for piece, rank in pieces
    ]
    return ParameterSharding(
        sharding_type="table_wise" if len(pieces) == 1 else "row_wise",
        compute_kernel="quant",
        ranks=[rank for _, rank in pieces],
        sharding_spec=EnumerableShardingSpec(own),
    )


LATENCY = "latency"
PLANS: Mapping[str, type[Balanced]] = {
    "capacity": Balanced,
    "load": LoadBalanced,
    "net": NetSpecific,
    LATENCY: LeastLatency,
}
