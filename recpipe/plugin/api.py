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

from recpipe.plugin.context import Context, RunFigures

if TYPE_CHECKING:
    import lightning as L

    from recpipe.plugin.batch import Batch
    from recpipe.plugin.planner import Planner
    from recpipe.plugin.policy import Cache
    from recpipe.plugin.quantizer import Quantizer
    from recpipe.plugin.skipper import Skipper
    from recpipe.plugin.splitter import Splitter

API = (2, 13)
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


# -- data ------------------------------------------------------------------------------------
class EpochOrder(ABC):
    """The order of an epoch's samples and how they are cut into batches; its plugin alters SAMPLE_ORDER."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches in an epoch, the same for every epoch."""

    @abstractmethod
    def batches(self, first: int) -> Iterator[Batch]:
        """An epoch's batches from number ``first`` on; called and drawn from in the loader's thread, one
        batch ahead of training. Every sample of the epoch must be in exactly one batch; core checks this when
        the epoch ends."""

    def is_datas_own(self) -> bool:
        """Whether this is the data module's order after all; core then reads the data as without it.

        Asked once, when the run is built and the data can be read. If so, nothing else is called.
        """
        return False


StreamWrapper = Callable[["Iterator[Batch]"], "Iterator[Batch]"]
BatchTransform = Callable[["Batch"], "Batch"]


# -- optimizer and report --------------------------------------------------------------------
StepWrapper = Callable[["Batch"], "AbstractContextManager[None]"]
Figure = float | int | str | list[Any]
Reporter = Callable[[RunFigures], Mapping[str, Figure]]


@dataclass(frozen=True)
class Link(Generic[P]):
    """A part of an ordered chain; ``before`` and ``after`` name plugins (``acme``) or parts (``acme.split``).

    Names of plugins that are not active have no effect. Ties keep the order of ``+plugin=[a,b]``.
    """

    part: P
    name: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """Every extension point, in the order in which data flows. Set only those that the plugin uses."""

    # data
    order: EpochOrder | None = None
    """Slot: the order of an epoch's samples; it replaces the data module's."""
    stream: Sequence[Link[StreamWrapper]] = ()
    """Chain: from one iterator of training batches to another; the first link gets the data module's. Like
    ``batch``, it runs in the loader's thread, on host memory, up to one batch ahead of training."""
    batch: Sequence[Link[BatchTransform]] = ()
    """Chain: one training batch in, one out."""
    # tables
    planner: Planner | None = None
    """Slot: the TorchRec planner; shards the tables."""
    cache: Sequence[Cache] = ()
    """Claims: which rows of a table are resident at what time; one owner for each table."""
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
    """Fan-out: Lightning callbacks; all of them are called."""
    report: Sequence[Reporter] = ()
    """Fan-out: figures under ``plugins.<name>`` of report.json, asked for once, at the end of the run."""


class Plugin(ABC):
    """One paper's system. ``__init__`` takes the keys of its yaml as keyword arguments."""

    api: ClassVar[tuple[int, int]] = API
    """The ``API`` that the plugin was written for; write the numbers, do not copy the name."""
    torchrec: ClassVar[str] = ""
    """TorchRec versions it works with, such as ``>=1.6,<1.9``; empty: all that recpipe supports."""
    requires: tuple[str, ...] = ()
    """Plugins that must run beside this one. If this or one of the three below depends on knobs, set it on
    the object in ``__init__``: conflicts are judged by the plugin objects."""
    conflicts: tuple[str, ...] | Mapping[str, str] = ()
    """Plugins that this one cannot run with; a mapping gives the reason for each."""
    relies_on: frozenset[Invariant] = frozenset()
    alters: frozenset[Invariant] = frozenset()
    """The invariants that a run with this plugin breaks. A plugin that alters nothing must reproduce the run
    without it."""
    takes_rows: bool = False
    """Whether its stream may be given batches in which the ids of tables that grow (``rows: dynamic``) are
    rows already; it then relies on nothing that such tables alter, and hands on each batch, in order."""

    @abstractmethod
    def contribute(self, ctx: Context) -> Contribution:
        """Return this plugin's parts. It must not allocate much memory or start any work.

        Called once per run. If a plugin claims the cache or the cold rows of only some of a group's tables,
        or stores tables in fewer bits, the groups change: then every plugin is called once more with the new
        groups, and its first contribution is dropped.
        """
