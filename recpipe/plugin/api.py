"""What a plugin is: a class whose ``contribute`` returns one ``Contribution``.

This file is the complete list of extension points. Importing it does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    import lightning as L

    from recpipe.data.batch import Batch
    from recpipe.plugin.planner import Planner
    from recpipe.plugin.policy import Cache
    from recpipe.plugin.quantizer import Quantizer
    from recpipe.plugin.skipper import Skipper
    from recpipe.plugin.splitter import Splitter
    from recpipe.report.record import Io
    from recpipe.tables.tiers.placement import Bags

API = (2, 0)
"""Version of this file's contract: a plugin's major must equal it, its minor must not exceed it."""

P = TypeVar("P")


class Invariant(Enum):
    """Facts about training that one plugin may rely on and another may alter; errors quote the values."""

    SAMPLE_ORDER = "samples reach the model in the order the data module yields them"
    SAMPLE_SET = "every epoch trains every sample once, as the data module yields it"
    BATCH_SIZE = "every optimizer step sees exactly data.batch_size samples"
    MODEL = "the model, its loss and its parameters are the recipe's"
    EXACT_GRADIENT = "each update equals that of the run without plugins"
    TABLE_LAYOUT = "tables keep the rows, dtype and FQN that the model gave them"
    ID_SPACE = "sparse ids reach the tables as the data module yields them"


@dataclass(frozen=True)
class TableInfo:
    """One embedding table: ``rows`` x ``dim`` float32 weights."""

    name: str
    rows: int
    dim: int
    pooled: bool = True
    """Whether its rows are summed by bag, or handed out one for each id (``EmbeddingCollection``)."""
    features: tuple[str, ...] = ()
    """Names of the features that look it up; empty where nobody has said."""
    state: int = 0
    """float32 values of optimizer state that each row has."""


@dataclass(frozen=True)
class GroupInfo:
    """Tables whose rows have records of one size: they have one dimension, optimizer and collection."""

    tables: tuple[str, ...]
    record_bytes: int
    """Bytes of one row's record: its weights and its optimizer state."""
    slots: int
    """Rows of theirs that ``tiers.resident_bytes`` holds."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What is known before any memory is taken."""

    tables: Mapping[str, TableInfo]
    device: str
    """As torch spells it: ``cpu``, ``cuda:0``."""
    batch_size: int
    resident_bytes: int
    """Device memory for table rows, optimizer state included (``tiers.resident_bytes``)."""
    groups: Sequence[GroupInfo]
    """The tables in groups, of which each has slots and a cache policy of its own. ``tables`` lists them in
    this order, and so are their rows numbered."""
    lookups: Callable[[Any], Bags]
    """A batch's lookups by the rows' numbers among those of all tables, whatever type the batch has."""
    seed: int
    data_fingerprint: str
    """Equal for equal batches: the key for anything that a plugin caches about the data."""
    steps: int
    """Optimizer steps that the run is expected to take."""
    trainers: int = 1
    """Ranks that train; each takes its share of every batch."""
    cache_dir: Path | None = None
    """Where what is learned about the data is kept between runs (profiles); None: nowhere."""
    epoch_samples: int = 0
    """Training samples of an epoch."""
    held_out: Callable[[int], Iterator[Batch]] = lambda first: iter(())
    """As ``batches``, of the held-out part."""
    batches: Callable[[int], Iterator[Batch]] = lambda first: iter(())
    """``batches(first)``: an epoch's training batches from number ``first`` on, as the data module yields
    them; every call reads anew, and seeks to ``first``."""


# -- data ------------------------------------------------------------------------------------
class EpochOrder(ABC):
    """Which samples make which batch of an epoch, in which order; its plugin alters SAMPLE_ORDER."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch; the same for every epoch."""

    @abstractmethod
    def batches(self, first: int) -> Iterator[Batch]:
        """An epoch's batches from number ``first`` on; asked for in the loader's thread, one batch ahead
        of training. Every sample of the epoch is in one batch, which core checks when the epoch ends."""


StreamWrapper = Callable[["Iterator[Batch]"], "Iterator[Batch]"]
BatchTransform = Callable[["Batch"], "Batch"]


# -- optimizer and report --------------------------------------------------------------------
StepWrapper = Callable[["Batch"], "AbstractContextManager[None]"]
Figure = float | int | str | list[Any]


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What core measured, for a plugin's own figures; seconds are of host time."""

    steps: int
    samples: int
    lookups: int
    io: Io
    """Traffic with the cold tier, with the time of its fetches and the training's waits for them."""
    before_cold_seconds: float
    """In micro-batches that needed no cold row, ..."""
    after_cold_seconds: float
    """... and in those that did; both 0 where no splitter was active."""


Reporter = Callable[[RunFigures], Mapping[str, Figure]]


@dataclass(frozen=True)
class Link(Generic[P]):
    """A part of an ordered chain; ``before`` and ``after`` name plugins (``acme``) or parts (``acme.split``).

    Naming a plugin that is not active orders nothing. Ties keep the order of ``+plugin=[a,b]``.
    """

    part: P
    name: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """Every extension point, in the order data flows. Leave what you do not touch."""

    # data
    order: EpochOrder | None = None
    """Slot: the order of an epoch's samples, instead of the data module's."""
    stream: Sequence[Link[StreamWrapper]] = ()
    """Chain: from one iterator of training batches to another; the first link is next to the data.
    Runs in the loader's thread, on host memory, up to one batch ahead of training; so does ``batch``."""
    batch: Sequence[Link[BatchTransform]] = ()
    """Chain: one training batch in, one out."""
    # tables
    planner: Planner | None = None
    """Slot: the TorchRec planner; shards the tables."""
    cache: Sequence[Cache] = ()
    """Claims: which rows of a table are resident when; one owner for each table."""
    # batches and rows
    splitter: Splitter | None = None
    """Slot: a batch cut into micro-batches that together make one exact update."""
    skipper: Skipper | None = None
    """Slot: samples left out of a batch, rows left out of an update."""
    quantizer: Quantizer | None = None
    """Claims: rows stored, or sent, in fewer bits; one owner for each table's cold rows, for its storage and
    for each collective's codec."""
    # optimizer
    step: Sequence[Link[StepWrapper]] = ()
    """Chain: context managers around one optimizer step, the first link outermost."""
    # metrics and report
    callbacks: Sequence[L.Callback] = ()
    """Fan-out: Lightning callbacks, all are called."""
    report: Sequence[Reporter] = ()
    """Fan-out: figures under ``plugins.<name>`` of report.json, asked for once, at the end of the run."""


class Plugin(ABC):
    """One paper's system. ``__init__`` takes the keys of its yaml as keyword arguments."""

    api: ClassVar[tuple[int, int]] = API
    """The ``API`` that the plugin was written for; write the numbers, do not copy the name."""
    torchrec: ClassVar[str] = ""
    """Versions it works with, such as ``>=1.6,<1.9``; empty: all that recpipe supports."""
    requires: tuple[str, ...] = ()
    """Plugins that must run beside this one. Where knobs decide it, ``__init__`` sets this and the three
    below on the object: conflicts are judged by what each plugin object says."""
    conflicts: tuple[str, ...] | Mapping[str, str] = ()
    """Plugins that this one cannot run with; as a mapping, each with the reason."""
    relies_on: frozenset[Invariant] = frozenset()
    alters: frozenset[Invariant] = frozenset()
    """What a run with this plugin does not keep; one that alters nothing reproduces the run without it."""

    @abstractmethod
    def contribute(self, ctx: Context) -> Contribution:
        """Return this plugin's parts; takes no memory to speak of, starts no work.

        Called once per run. Where plugins claim the cache or the cold rows of some of a group's tables, or
        store tables in fewer bits, all are called once more, with the groups as these claims make them, and
        what they returned first is dropped.
        """


@dataclass(frozen=True)
class Origin:
    """Who a part came from, as shown in conflicts, listings and faults."""

    plugin: str
    distribution: str = "recpipe"
    version: str = "0"

    def __str__(self) -> str:
        return f"{self.plugin} ({self.distribution} {self.version})"
