"""A model on paper that is served by shards: what each of them is asked for, how many machines that takes,
and how long requests take, by the queueing model that predicts measured runs (``queueing/servers.py``).

A table of more bytes than a shard's equal part is cut by rows, and finer if its pieces find no room. The
pieces go, those with most work first, to where least is asked and room is left. A fleet is one or more cells:
main servers and one set of shards, which they alone ask. There are as many cells, and main servers, as keep
links, shards and main servers below the wanted share of what they can do, if each request were a batch of its
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path

import numpy as np

from recpipe.common.words import readable_bytes
from recpipe.errors import UserError
from recpipe_perf_model.queueing.costs import KIB, MICRO, Asked, Costs, Load
from recpipe_perf_model.queueing.servers import Answered, Servers, simulated
from recpipe_perf_model.scale.machine import GIGA, in_full
from recpipe_perf_model.scale.model import FLOAT, PaperModel, Table
from recpipe_perf_model.scale.reading import Reader

SERVERS = Path(__file__).parent / "servers"
LINE = 64
"""Bytes that are read of memory at least."""
CUTS = (1, 2, 4, 8, 16)
"""How many times finer than by an equal part tables are cut at last, if pieces find no room."""
NOTHING = Asked(0.0, 0.0, 0.0, 0.0)


class NoRoom(UserError):
    """Rows that find no room, although there is enough of it."""


@dataclass(frozen=True)
class Constants:
    """Of a server."""

    cores: float
    dram_gb: float
    reserved_share: float
    """Of the memory that is kept free."""
    core_gflops: float
    """Billions of operations a second that a core reaches in the dense part."""
    idle_watts: float
    full_watts: float
    """With all cores busy."""


@dataclass(frozen=True)
class Server:
    """A kind of machine that main servers and shards run on."""

    name: str
    title: str
    constants: Constants
    sources: Mapping[str, str]

    @property
    def room(self) -> float:
        """Bytes of rows."""
        return self.constants.dram_gb * 2**30 * (1 - self.constants.reserved_share)

    def watts(self, machines: float, busy_cores: float) -> float:
        """Of so many machines, of all of whose cores so many are busy."""
        known = self.constants
        return machines * known.idle_watts + busy_cores / known.cores * (known.full_watts - known.idle_watts)


def server(name: str) -> Server:
    """A server that is shipped, by its name, or one from a yaml file of the same form; ``UserError`` in one
    line names the file and the key."""
    reader = Reader.named("scale.serving.server", name, SERVERS)
    reader.only({"title", "sources", "constants"})
    cited, given = reader.part("sources").values, reader.part("constants")
    known = [field.name for field in fields(Constants)]
    given.only(set(known))
    values, sources = {}, {}
    for key in known:
        values[key], source = given.cited(key)
        sources[key] = in_full(cited, source, given, key)
    constants = Constants(**values)
    if not constants.reserved_share < 1:
        raise given.wrong("reserved_share", "must be below 1")
    if constants.full_watts < constants.idle_watts:
        raise given.wrong("full_watts", "must be at least idle_watts")
    return Server(Path(reader.where).stem, reader.text("title"), constants, sources)


@dataclass(frozen=True)
class Served:
    """How a model is served on paper."""

    model: PaperModel
    server: Server
    known: Costs
    rate: float
    """Requests a second."""
    candidates: int
    shared: float
    """The share of the lookups that the candidates of a request have in common."""
    gbit: float
    delay_us: float
    busy: float
    """The share of what servers and links can do that they are to do at most."""
    threads: int
    """Cores of a main server."""
    p99: float | None = None
    """Seconds that are to be reached."""
    requests: int = 5000
    """That are played."""

    @property
    def samples(self) -> float:
        """That a request looks up for."""
        return self.shared + (1.0 - self.shared) * self.candidates

    @property
    def sample_us(self) -> float:
        """Of the dense part, of one candidate, on all of a main server's cores."""
        dense = self.model.dense
        products = sum(layer.inputs * layer.outputs for layer in (*dense.bottom, *dense.top))
        flops = dense.interaction_flops + 2.0 * products
        return flops / (self.server.constants.core_gflops * GIGA * self.threads) / MICRO

    @property
    def bytes(self) -> float:
        """Of all rows, without an optimizer's state."""
        return sum(self.row_bytes(table) * table.rows for table in self.model.tables)

    def row_bytes(self, table: Table) -> float:
        """Of a row."""
        return table.dim * self.model.row_bytes

    def grown(self, times: float) -> Served:
        """With so many times as many rows."""
        tables = tuple(replace(table, rows=max(1, round(table.rows * times))) for table in self.model.tables)
        return replace(self, model=replace(self.model, tables=tables))


@dataclass(frozen=True)
class Fleet:
    """Machines that serve a model."""

    served: Served
    shards: int
    cells: int
    mains: int
    """Main servers of a cell."""
    main_machines: int
    """Of all cells, as are the numbers below."""
    shard_machines: int
    watts: float
    rate: float
    """Requests a second that could be answered."""
    limit: str
    """What they are limited by."""
    shard_bytes: float
    """Of the fullest shard."""
    answered: Answered

    @property
    def machines(self) -> int:
        """All of them."""
        return self.main_machines + self.shard_machines


def least_shards(served: Served) -> int:
    """The smallest number of shards that have room for the rows."""
    return max(1, ceil(served.bytes / served.server.room))


def asked(served: Served, shards: int) -> tuple[list[Asked], list[float]]:
    """What a request asks each shard for, and the bytes of each; ``UserError`` if the rows do not fit."""
    room = served.server.room
    if served.bytes > room * shards:
        raise UserError(
            f"{served.model.name} takes {readable_bytes(served.bytes)}, and {shards} shards of "
            f"{readable_bytes(room)} hold {readable_bytes(room * shards)}: at least {least_shards(served)} "
            "shards are needed"
        )
    for finer in CUTS:
        found = _placed(served, shards, min(room, served.bytes / shards) / finer)
        if found is not None:
            return found
    raise NoRoom(
        f"the rows of {served.model.name} find no room on {shards} shards of {readable_bytes(room)}, however "
        "they are cut: give more shards"
    )


def _placed(served: Served, shards: int, limit: float) -> tuple[list[Asked], list[float]] | None:
    """The same with tables cut into pieces of ``limit`` bytes at most; None if some find no room."""
    room, costs = served.server.room * (1 + 1e-9), served.known.costs
    pieces = []
    for table in served.model.tables:
        whole = served.row_bytes(table) * table.rows
        parts = min(table.rows, max(1, ceil(whole / limit)))
        own = _asked(served, table, 1 / parts)
        kib = (own.read + own.answered) / KIB
        pieces += [
            (own.lookups * costs.shard_lookup_us + kib * costs.shard_kib_us, whole / parts, own)
        ] * parts
    # The largest first as long as they take more than half of a part: later they might find no room.
    pieces.sort(key=lambda piece: (-(piece[1] > limit / 2), -piece[0], -piece[1]))
    load, held, found = np.zeros(shards), np.zeros(shards), np.zeros((shards, 4))
    for work, size, own in pieces:
        fits = held + size <= room
        if not fits.any():
            return None
        at = int(np.where(fits, load, np.inf).argmin())
        load[at] += work
        held[at] += size
        found[at] += own
    return [Asked(*each) for each in found.tolist() if each[0]], held.tolist()


def _asked(served: Served, table: Table, share: float) -> Asked:
    """What a request asks for a ``share`` of a table's rows."""
    bags, pooling = served.samples, table.pooling
    lines = ceil(served.row_bytes(table) / LINE) * LINE
    vectors = pooling * share
    if table.pooled:  # a bag is asked for if some of its ids are here
        vectors = 1.0 - (1.0 - share) ** max(1.0, pooling) if pooling >= 1 else pooling * share
    return Asked(
        1.0, bags * pooling * share, bags * pooling * share * lines, bags * vectors * table.dim * FLOAT
    )


def fleet(served: Served, shards: int) -> Fleet:
    """The smallest fleet of so many shards that answers the load, and what requests take there; ``UserError``
    if there is none."""
    own, held = asked(served, shards)
    load = Load(served.rate, served.candidates, served.gbit, served.delay_us)
    one = _servers(served, own, load, 1, 1)
    cores, busy = int(served.server.constants.cores), served.busy
    work = max(shard.work.of(1) for shard in one.shards)
    sent = max(max(shard.asked.of(1), shard.answered.of(1)) for shard in one.shards)
    cells = max(
        1, ceil(served.rate * work / (busy * cores)), ceil(served.rate * sent / (busy * load.link.rate))
    )
    rate = served.rate / cells
    mains = ceil(rate * one.batch_seconds(1) / busy)
    servers = max(1, ceil(rate * work / busy))
    while True:
        made = _servers(served, own, load, mains, min(servers, cores))
        answered = simulated(made, rate, served.requests)
        if served.p99 is None or answered.percentile(99) <= served.p99:
            break
        quiet = simulated(made, rate / 1000, served.requests).percentile(99)
        if quiet > served.p99 or mains > 64 * rate * made.batch_seconds(1):
            raise UserError(
                f"no number of main servers brings p99 to {1e3 * served.p99:,.4g} ms with {shards} shards at "
                f"{served.gbit:g} Gbit/s: with hardly a load it is {1e3 * quiet:,.4g} ms"
            )
        mains, servers = ceil(1.25 * mains), ceil(1.25 * servers)
    traffic = max(sum(s.asked.of(1) for s in made.shards), sum(s.answered.of(1) for s in made.shards))
    main_machines = max(
        ceil(cells * mains * served.threads / cores), ceil(served.rate * traffic / (busy * load.link.rate))
    )
    alone = made.ask.of(1) + len(made.shards) * made.call + made.rest.of(1) * served.threads
    work = served.rate * (alone + sum(shard.work.of(1) for shard in made.shards))
    most, limit = made.capacity()
    return Fleet(
        served,
        shards,
        cells,
        mains,
        main_machines,
        cells * shards,
        served.server.watts(main_machines + cells * shards, work),
        cells * most,
        limit,
        max(held),
        answered,
    )


def _servers(served: Served, own: list[Asked], load: Load, mains: int, servers: int) -> Servers:
    return served.known.costs.servers(own, NOTHING, load, mains, served.sample_us, servers)
