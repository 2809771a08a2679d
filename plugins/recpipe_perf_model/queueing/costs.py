"""What servers' work takes, by what a request asks for: constants of one core, measured or stated.

``benchmarks/scale_out.py --costs FILE`` measures them and writes such a file:
``{"format": "recpipe service costs", "source": "...", "costs": {...}, "load": {...}}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import with_config
from typing_extensions import TypedDict

from recpipe.common.saved import read_json
from recpipe.common.validation import STRICT, fitted
from recpipe.errors import UserError
from recpipe_perf_model.queueing.servers import Line, Link, Servers, Shard

FORMAT: Literal["recpipe service costs"] = "recpipe service costs"
MICRO, KIB = 1e-6, 1024.0
ID_BYTES = 4
"""Of an id in a question."""
QUESTION_BYTES, LOOKUP_BYTES = 250, 8
"""Of a question without lookups (names, shapes, HTTP/2 frames), and of one lookup in it: its number and how
many bags it asks for."""


class Asked(NamedTuple):
    """What a request asks one shard for."""

    lookups: float
    """Lookups of tables in a question, whatever number of requests it is for."""
    ids: float
    read: float
    """Bytes of rows."""
    answered: float
    """Bytes of sums."""


@dataclass(frozen=True)
class ServiceCosts:
    """Microseconds of one core."""

    batch_us: float
    """A main server: putting a batch together, and what else it does once for it."""
    request_us: float
    """A main server: each request of a batch, without its candidates."""
    sample_us: float
    """A main server: the dense part, of one sample."""
    call_us: float
    """A main server: a question to a shard."""
    lookup_us: float
    """A main server: a lookup in a question, and where its sums belong."""
    answer_kib_us: float
    """A main server: a KiB of sums."""
    own_kib_us: float
    """A main server: a KiB of its own rows and of their sums."""
    shard_call_us: float
    """A shard: reading a question and writing an answer."""
    shard_lookup_us: float
    """A shard: a lookup in a question."""
    shard_kib_us: float
    """A shard: a KiB of rows and of sums."""
    wire_us: float
    """A question and its answer besides: sockets, and threads that wake."""
    front_us: float
    """A request besides: its connection to the main server."""
    main_factors: tuple[float, ...] = (1.0,)
    """How many times as long as usual work took: quantiles."""
    shard_factors: tuple[float, ...] = (1.0,)

    def shard(self, asked: Asked, servers: int = 1) -> Shard:
        """A shard that is asked for so much."""
        kib = (asked.read + asked.answered) / KIB
        first = self.shard_call_us + asked.lookups * self.shard_lookup_us
        return Shard(
            Line(MICRO * first, MICRO * kib * self.shard_kib_us),
            Line(QUESTION_BYTES + LOOKUP_BYTES * asked.lookups, ID_BYTES * asked.ids),
            Line(QUESTION_BYTES, asked.answered),
            MICRO * self.wire_us,
            servers,
        )

    def servers(
        self,
        asked: Sequence[Asked],
        own: Asked,
        load: Load,
        mains: int = 1,
        sample_us: float | None = None,
        shard_servers: int = 1,
    ) -> Servers:
        """Main servers that ask such shards, and look up their ``own`` rows meanwhile. ``sample_us``: of the
        dense part of a model other than the measured one."""
        lookups = sum(shard.lookups for shard in asked)
        dense = load.samples * (self.sample_us if sample_us is None else sample_us)
        came = sum(shard.answered for shard in asked) / KIB
        beside = Line()
        if own.lookups:
            kib = (own.read + own.answered) / KIB
            beside = Line(MICRO * own.lookups * self.shard_lookup_us, MICRO * kib * self.own_kib_us)
        return Servers(
            ask=Line(MICRO * (self.batch_us + lookups * self.lookup_us), MICRO * self.request_us),
            rest=Line(0.0, MICRO * (dense + came * self.answer_kib_us)),
            call=MICRO * self.call_us,
            beside=beside,
            front=MICRO * self.front_us,
            shards=tuple(self.shard(each, shard_servers) for each in asked),
            link=load.link,
            mains=mains,
            most=max(1, load.batch // load.samples),
            cores=load.cores,
            main_factors=self.main_factors,
            shard_factors=self.shard_factors,
        )


@dataclass(frozen=True)
class Load:
    """What comes, and by which way shards are asked."""

    rate: float = 100.0
    """Requests a second."""
    samples: int = 64
    """Of a request."""
    gbit: float = 10.0
    """Of each server's link, in each direction."""
    delay_us: float = 100.0
    """In one direction."""
    batch: int = 1024
    """Samples of a batch at most."""
    cores: int | None = None
    """Of the one machine that all servers share; None: each has a core of its own."""
    shared: tuple[str, ...] = ()
    """Features that the candidates of a request share: they are asked for once a request."""

    @property
    def link(self) -> Link:
        """Of a server."""
        return Link(self.gbit * 1e9 / 8, self.delay_us * MICRO)


STATED = ServiceCosts(
    batch_us=450.0,
    request_us=100.0,
    sample_us=8.0,
    call_us=200.0,
    lookup_us=15.0,
    answer_kib_us=1.0,
    own_kib_us=0.5,
    shard_call_us=300.0,
    shard_lookup_us=15.0,
    shard_kib_us=0.5,
    wire_us=250.0,
    front_us=300.0,
)
"""Where none were measured: rounded, of a busy machine of two cores."""


@with_config(STRICT)
class Content(TypedDict):
    """A file of costs."""

    format: Literal["recpipe service costs"]
    source: str
    costs: ServiceCosts
    load: Load


@dataclass(frozen=True)
class Costs:
    """Constants, where they come from, and the load that they were measured under."""

    costs: ServiceCosts = STATED
    load: Load = field(default_factory=Load)
    source: str = "stated"

    @classmethod
    def read(cls, file: Path) -> Costs:
        """Those in ``file``; ``UserError`` in one line if it has none."""
        try:
            content: Content = fitted(Content, read_json(file), str(file))
        except (OSError, ValueError) as fault:
            raise UserError(
                f"{file} has no service costs ({fault}): benchmarks/scale_out.py --costs FILE measures them"
            ) from fault
        return cls(content["costs"], content["load"], content["source"])

    def content(self) -> dict[str, Any]:
        """What a file of them has."""
        costs, load = (
            {key: [*value] if isinstance(value, tuple) else value for key, value in asdict(own).items()}
            for own in (self.costs, self.load)
        )
        return {"format": FORMAT, "source": self.source, "costs": costs, "load": load}
