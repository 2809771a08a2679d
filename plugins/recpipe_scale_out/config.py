"""The words of ``recpipe shard``, and of ``recpipe serve SHARD``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

from annotated_types import Interval
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recpipe.common.validation import FilePath, Positive, Text, typed
from recpipe.errors import UserError, did_you_mean, shown

T = TypeVar("T")


@dataclass
class CutConfig:
    """The words of ``recpipe shard``."""

    shards: Annotated[int, Interval(ge=1, le=4096)]
    """How many servers hold the tables."""
    plan: Text = "capacity"
    """Which rows each of them holds: ``capacity``, ``load``, ``net`` or ``latency``, or the plan.json of
    another cut."""
    memory: Text | None = None
    """Most bytes of rows on a shard, ``8GiB``; None: as many as it takes. Larger tables are cut by rows."""
    main: Text | None = None
    """Bytes for what the main server looks up itself: whole tables, and then copies of those rows of the
    others that were looked up most; None: it has none."""
    costs: FilePath | None = None
    """A file of what servers' work takes, as benchmarks/scale_out.py measures it, by which ``plan=latency``
    goes; None: stated constants."""
    split_rows: bool = False
    """Whether tables of more than the mean bytes of a shard are cut by rows, too."""
    overlap: bool | None = None
    """Whether the main server computes what of the dense part needs no rows while the questions to the shards
    are on their way, for which the dense part is compiled in two; None: if that takes at least 0.1 ms of 64
    samples."""
    sign: FilePath | None = None
    """A private Ed25519 key, as a PEM file, by which all parts are signed; None: they are not."""
    overwrite: bool = False
    """Whether what another cut has left in the directory is replaced."""


@dataclass
class ShardConfig:
    """The words of ``recpipe serve SHARD``."""

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine's."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8001
    """Where gRPC is answered; 0: any free one."""
    threads: Positive = 1
    """Threads that look up."""
    message_bytes: Positive = 64 * 2**20
    """Most bytes of a request."""
    trust: FilePath | None = None
    """A public Ed25519 key, as a PEM file: shards are refused unless its owner has signed them."""
    also: FilePath | None = None
    """The same shard of the cut before, which is answered for, too, until all main servers have changed over;
    None: none is."""
    metrics_port: Annotated[int, Interval(ge=0, le=65535)] | None = None
    """Where ``/metrics`` is answered over HTTP; 0: any free one. None: nowhere."""
    traces: bool = False
    """Whether each lookup is exported as a span of OpenTelemetry, in its main server's trace."""
    follow: FilePath | None = None
    """A directory of deltas, whose rows are taken as they come; None: none are."""
    poll_seconds: Annotated[float, Interval(ge=0.01, le=3600)] = 0.5
    """Seconds between two looks into that directory."""
    stop_seconds: Annotated[float, Interval(ge=0, le=3600)] = 10.0
    """Seconds that a stopping server gives the requests that it has."""


def of_words(kind: type[T], words: Sequence[str], command: str, others: Sequence[str] = ()) -> T:
    """``key=value`` words as a ``kind``, checked; ``UserError`` for one that is none of its fields.
    ``others``: what the command takes besides."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    except (OmegaConfBaseException, ValueError) as fault:
        raise UserError(f"recpipe {command} takes key=value, not '{shown(' '.join(words), 100)}'") from fault
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    wrong = next((key for key in values if key not in known), None)
    if wrong is not None:
        known += [key for key in others if key not in known]
        hint = did_you_mean(wrong, known)
        raise UserError(f"recpipe {command} has no {shown(wrong)}; it has {', '.join(known)}.{hint}")
    return typed(kind, values, command)
