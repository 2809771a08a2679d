"""What a plugin is: a class whose ``contribute`` returns one ``Contribution``.

This file is the complete list of extension points. Importing it does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from recpipe.plugin.errors import PluginError

if TYPE_CHECKING:
    from pathlib import Path

    import lightning as L
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.distributed.types import CommOp, ModuleSharder, QuantizedCommCodec, ShardingPlanner

    from recpipe.data.batch import Batch
    from recpipe.plugin.quantizer import Quantizer
    from recpipe.plugin.skipper import Skipper
    from recpipe.report.record import Io
    from recpipe.tables.collection import TableCollection
    from recpipe.tables.stores.base import ColdStore
    from recpipe.tables.tiers.parts import TierParts
    from recpipe.tables.tiers.placement import Bags
    from recpipe.tables.tiers.policies import CachePolicy, RowSpace

API = (1, 3)
"""Version of this file's contract: a plugin's major must equal it, its minor must not exceed it."""

P = TypeVar("P")
Aspect = Literal["placement", "kernel", "cache", "precision", "update"]
"""What can be owned of a table: where it lives, which kernel looks it up, which of its rows are
resident when, how its values are stored, and how its rows are updated."""
Direction = Literal["forward", "backward"]


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

    @property
    def record_bytes(self) -> int:
        """Bytes of one row's record, for plugins of API (1, 0) to (1, 2), which know one size: use
        ``groups``.

        Raises ``PluginError`` where the tables' records have several sizes.
        """
        sizes = sorted({group.record_bytes for group in self.groups})
        if len(sizes) != 1:
            raise PluginError(
                f"the plugin asks for the size of a row's record (Context.record_bytes, of API (1, 2) and "
                f"before), and this model's tables have records of {', '.join(map(str, sizes))} bytes: its "
                "author must ask Context.groups, of API (1, 3); until then drop the plugin, or train a model "
                "whose tables have one dimension and optimizer"
            )
        return sizes[0]


# -- data ------------------------------------------------------------------------------------
class EpochOrder(ABC):
    """Which samples make which batch of an epoch, in which order; its plugin alters SAMPLE_ORDER."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch; the same for every epoch."""

    @abstractmethod
    def batches(self, first: int) -> Iterator[Batch]:
        """An epoch's batches from number ``first`` on; asked for in the loader's thread, one batch ahead
        of training. Every sample of the epoch is in one batch."""


StreamWrapper = Callable[["Iterator[Batch]"], "Iterator[Batch]"]
BatchTransform = Callable[["Batch"], "Batch"]


@dataclass(frozen=True)
class Split:
    """A batch cut into micro-batches: samples in ``order``, ``bounds`` where each micro-batch ends.

    ``order`` is a permutation of 0 .. B - 1 (int64 [B]); ``bounds`` grows and its last entry is B:
    ``(n_popular, B)`` makes two micro-batches, the first one of samples ``order[:n_popular]``. Core rounds
    all bounds but the last down to multiples of ``micro_batch_step``: samples above train with the next one.
    """

    order: NDArray[np.int64]
    bounds: tuple[int, ...]


def micro_batch_step(batch_size: int) -> int:
    """Samples that micro-batches of a ``batch_size`` come in multiples of: a sixteenth of it, rounded up.

    Matrix kernels are made, and kept, for each size of their inputs. With any size at all they grew to as
    much memory as the rest of a small model's run.
    """
    return -(-batch_size // 16)


BatchSplitter = Callable[["Batch", "NDArray[np.bool_]"], Split]
"""``splitter(batch, needs_cold)``: the mask [B] says which samples look up a row that is not resident."""

# -- sharding and embedding modules ----------------------------------------------------------
PlannerFactory = Callable[["Topology", "Mapping[str, ParameterConstraints]"], "ShardingPlanner"]


class TablePolicy:
    """How the claimed tables are stored and found; override the method of each aspect you claim."""

    def constrain(self, name: str, table: TableInfo) -> ParameterConstraints | None:
        """Limits for TorchRec's planner (aspects ``placement`` and ``kernel``); None: no limits."""
        return None

    def rewrite(self, module: nn.Module, tables: Sequence[str]) -> nn.Module:
        """The embedding module with ``tables`` changed (aspects ``precision`` and ``update``): a
        ``WrappedCollection`` around ``module``, or another ``TableCollection`` that can do what ``module``
        can. Called once for all tables of the policy."""
        return module

    def data_type(self, name: str) -> str | None:
        """The type that stores a table (``fp32``, ``fp16``, ``bf16``; aspect ``precision``); other than
        ``fp32`` shards the tables. None: float32."""
        return None

    def cache(self, space: RowSpace) -> CachePolicy:
        """Which rows are resident when (aspect ``cache``)."""
        raise PluginError(
            f"{type(self).__name__} claims 'cache' but brings no cache(); override it or drop the aspect"
        )

    def store(self, store: ColdStore) -> ColdStore:
        """The cold store as the policy wants to reach it (aspect ``cache``): itself, or one around it."""
        return store

    def collection(self, parts: TierParts) -> TableCollection | None:
        """Tables of the policy's own making instead of tiers under ``cache()``; None: tiers.

        Called on every rank. Its ``forward`` gets this trainer's share of each batch, and its backward
        makes the update, as a fused optimizer does (aspect ``cache``).
        """
        return None


@dataclass(frozen=True)
class TableClaim:
    """``policy`` owns ``aspects`` of every table whose name matches ``glob``."""

    glob: str
    aspects: frozenset[Aspect]
    policy: TablePolicy
    fallback: bool = False
    """Gives way to any other plugin's claim instead of conflicting with it."""


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
    splitter: BatchSplitter | None = None
    """Slot: a batch cut into micro-batches that together make one exact update."""
    skipper: Skipper | None = None
    """Slot: samples left out of a batch, rows left out of an update."""
    # sharding and embedding modules
    quantizer: Quantizer | None = None
    """Claims: rows stored, or sent, in fewer bits; one owner for each aspect of each table."""
    tables: Sequence[TableClaim] = ()
    """Claims: one owner for each aspect of each table."""
    planner: PlannerFactory | None = None
    """Slot: the TorchRec planner."""
    sharders: Mapping[type[nn.Module], ModuleSharder[Any]] = field(default_factory=dict)
    """Keyed: TorchRec's sharder of ``EmbeddingBagCollection``; it is given the run's fused optimizer,
    kernel and codecs."""
    codecs: Mapping[tuple[CommOp, Direction], QuantizedCommCodec[Any]] = field(default_factory=dict)
    """Keyed: one codec for each collective and direction."""
    device_bytes: int = 0
    """Sum: device memory that the plugin keeps for itself; taken from ``tiers.resident_bytes``."""
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
        """Return this plugin's parts; called once per run, takes no memory to speak of, starts no work."""


@dataclass(frozen=True)
class Origin:
    """Who a part came from, as shown in conflicts, listings and faults."""

    plugin: str
    distribution: str = "recpipe"
    version: str = "0"

    def __str__(self) -> str:
        return f"{self.plugin} ({self.distribution} {self.version})"
