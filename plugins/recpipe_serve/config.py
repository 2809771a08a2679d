"""The words of ``recpipe serve``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recpipe.common.validation import FilePath, Positive, Text, one_of, typed
from recpipe.errors import UserError, did_you_mean, shown

Seconds = Annotated[float, Interval(ge=0, le=3600)]

Limit = Annotated[float, Gt(0), Interval(le=86400)]


@dataclass
class ServeConfig:
    """The words of ``recpipe serve``."""

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine's."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """0: any free one."""
    grpc_port: Annotated[int, Interval(ge=0, le=65535)] | None = None
    """Where the same is answered over gRPC; 0: any free one. None: it is not."""
    name: Text | None = None
    """The model's name in addresses; None: the package's directory, without its ending."""
    model_control: bool = False
    """Whether clients may load and unload the models of a repository."""
    workers: Annotated[int, Interval(ge=1, le=1024)] = 1
    """Processes that answer; they share the tables' memory."""
    threads: Positive = 1
    """Threads of a process that score a batch."""
    batch: Positive = 1024
    """Most samples that are scored together."""
    wait_ms: Annotated[float, Ge(0)] = 0.0
    """Milliseconds that a batch which is not full waits for more requests."""
    queue: Positive = 256
    """Most requests that wait in a process; others get 503."""
    deadline_ms: Annotated[float, Ge(1)] = 1000.0
    """Milliseconds after which a request that still waits gets 504."""
    shed: bool = True
    """Whether a request is refused at once (503) that those before it would keep waiting beyond its deadline,
    by what samples have taken lately. It would be answered 504 anyway, and its client knows sooner."""
    priorities: Annotated[int, Interval(ge=1, le=1000)] = 1
    """Levels of priority: a request's parameter ``priority`` is 1, the first to be scored, to this one, which
    those have that name none."""
    body_bytes: Positive = 16 * 2**20
    """Most bytes of a request; larger ones get 413."""
    body_seconds: Limit = 10.0
    """Seconds in which a request's body must have come; later ones get 408."""
    header_bytes: Annotated[int, Interval(ge=1024, le=16 * 2**20)] = 65536
    """Most bytes of a request's line and headers; larger ones get 431."""
    header_fields: Positive = 100
    """Most headers of a request; more get 431."""
    header_seconds: Limit = 10.0
    """Seconds in which a request's header must have come; later ones get 408."""
    idle_seconds: Limit = 75.0
    """Seconds that a connection may wait for its next request, and an answer for its reader. Longer than a
    proxy in front keeps its connections (60 s is usual), or it will find them closed."""
    connections: Positive = 1024
    """Most connections of a process. One that waits for a request is closed for a new one."""
    address_connections: Positive = 512
    """Most connections of a process with one address, a proxy's for instance."""
    samples: Positive = 4096
    """Most samples of a request."""
    tune: Text | None = None
    """A bound on a percentile of the latency, ``p95<25ms``: ``workers``, ``threads``, ``batch`` and
    ``wait_ms`` are those by which most requests are answered within it, measured before the package is
    served. ``workers`` above 1 is the most of them. None: they are as they are said."""
    trust: FilePath | None = None
    """A public Ed25519 key, as a PEM file: packages are refused unless its owner has signed them."""
    shards: Text | None = None
    """Addresses of the shards that hold the package's tables, ``HOST:PORT,HOST:PORT``, in their order;
    replicas of a shard are separated by ``|``. None: the package has its tables."""
    shards_ms: Annotated[float, Gt(0)] = 500.0
    """Milliseconds in which all shards have to answer a batch."""
    shards_hedge_ms: Annotated[float, Gt(0)] | None = None
    """Milliseconds without an answer after which another replica is asked, too; None: only after an error."""
    shards_lost: Annotated[str, one_of("error", "default_row")] = "error"
    """What a request gets that needs rows of a shard which does not answer: 503, or scores in which the mean
    row of their table stands for each of them, and which say so."""
    shards_wait: Seconds = 30.0
    """Seconds that a starting server waits for its shards."""
    shards_wire: Annotated[str, one_of("FP32", "FP16", "INT8")] = "FP32"
    """The type in which sums of rows are sent; INT8: with a scale and a bias for each sum."""
    follow: FilePath | None = None
    """A directory of deltas, which are taken as they come; None: none are."""
    poll_seconds: Annotated[float, Interval(ge=0.01, le=3600)] = 0.5
    """Seconds between two looks into that directory."""
    versions: Annotated[int, Interval(ge=2, le=10_000)] = 8
    """Most versions that are kept for going back."""
    rollback: bool = False
    """Whether clients may say which of them answers."""
    gate_ne: Annotated[float, Ge(0)] | None = None
    """By which share NE may be above that of the version that answers, on the latest labelled requests and in
    training's own figures; None: by any."""
    gate_calibration: Annotated[float, Ge(0)] | None = None
    """How far from 1 a delta's calibration on the latest labelled requests may be."""
    gate_drift: Annotated[float, Gt(0)] | None = None
    """The most population stability index of a delta's scores of the latest requests, to those answered."""
    gate_samples: Positive = 1000
    """With fewer samples, scored or labelled, a delta is not judged by them."""
    gate_window: Positive = 10_000
    """The latest samples by which deltas are judged."""
    learn: bool = False
    """Whether a package's effects learn labelled events that are posted."""
    token: FilePath | None = None
    """A file with the token that those who post events must have."""
    learnt: FilePath | None = None
    """A directory where what was learnt is kept over restarts; None: it goes with the process."""
    learn_store: Annotated[str, one_of("host", "ssd")] = "host"
    """Where coefficients are while they learn: in memory, or in files in ``learnt`` (a temporary folder
    without it)."""
    learn_seconds: Seconds = 60.0
    """Seconds from one time that it is written to the next one."""
    access_log: FilePath | None = None
    """A file to which a line of JSON is written for each request; ``-``: standard output. None: none is."""
    traces: bool = False
    """Whether each request is exported as a span of OpenTelemetry, as its environment variables say."""
    store: Text | None = None
    """Where values of features are that raw rows leave out: the address of a Redis server
    (``redis://...``), or a parquet file. None: rows have all of them."""
    store_key: Text = "user"
    """The column by whose value they are found."""
    store_prefix: str = "user:"
    """What stands before it in Redis."""
    store_ms: Annotated[float, Gt(0), Interval(le=60_000)] = 20.0
    """Milliseconds that a request waits for them; defaults stand for what has not come by then."""
    store_seconds: Seconds = 60.0
    """Seconds that they are kept; 0: they are asked for each time."""
    store_kept: Positive = 100_000
    """Most keys whose values are kept."""
    stop_seconds: Seconds = 10.0
    """Seconds that a stopping server gives the requests that it has."""
    window: Annotated[int, Interval(ge=1000, le=10**8)] = 10_000
    """The latest samples of a process over which the monitor computes its figures."""
    kept: Annotated[int, Interval(ge=1000, le=10**9)] = 1_000_000
    """Samples of requests with an id, in a process, whose scores are kept until their labels come."""
    drift: Annotated[float, Gt(0)] = 0.2
    """The population stability index above which the monitor says that scores or ids are off."""


def serve_config(words: Sequence[str]) -> ServeConfig:
    """``key=value`` words, checked; ``UserError`` for one that is none."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    except (OmegaConfBaseException, ValueError) as fault:
        raise UserError(f"recpipe serve takes key=value, not '{shown(' '.join(words), 100)}'") from fault
    known = [field.name for field in fields(ServeConfig)]
    wrong = next((key for key in values if key not in known), None)
    if wrong is not None:
        hint = did_you_mean(wrong, known)
        raise UserError(f"recpipe serve has no {shown(wrong)}; it has {', '.join(known)}.{hint}")
    return typed(ServeConfig, values, "serve")
