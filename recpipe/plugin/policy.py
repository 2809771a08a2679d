"""Cache policies: which rows are resident at what time.

A policy sees each batch once, in order, before it is trained, and answers with a ``Placement``. It moves no
rows and never has to undo anything: core carries placements out, keeps a journal of them, and knows which
rows are resident.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import ALONE, Spread
from recpipe.plugin.bags import RowIds, Slots
from recpipe.plugin.residents import Residents

if TYPE_CHECKING:
    from recpipe.plugin.collection import TableCollection, TierParts
    from recpipe.plugin.context import GroupInfo
    from recpipe.plugin.store import ColdStore


@dataclass(frozen=True)
class RowSpace:
    """What a policy is told: how the rows of its group of tables are numbered, and how many can be
    resident."""

    bases: RowIds
    """Number of each table's row 0, and of the row after the last: int64 [T + 1]."""
    slots: int
    """How many rows ``tiers.resident_bytes`` holds."""
    group: int = 0
    """Number of the group of tables (``Context.groups``)."""
    spread: Spread = field(default=ALONE, repr=False, compare=False)
    """The threads among which a pass over all of a batch's lookups is shared."""
    residents: Residents = field(init=False, repr=False, compare=False)
    """Which rows are resident now."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "residents", Residents(self.rows, self.slots))

    @property
    def rows(self) -> int:
        """The number of rows of all tables together."""
        return int(self.bases[-1])


@dataclass(frozen=True)
class Placement:
    """From this batch on, ``slots[i]`` holds ``rows[i]``; the row that was there before goes to the cold
    store."""

    slots: Slots
    """Distinct slots, int32 [P]."""
    rows: RowIds
    """Distinct rows that are not resident, int64 [P]."""
    freed: Slots = field(default_factory=lambda: np.empty(0, np.int32))
    """Slots that are emptied: their rows go to the cold store. None of them is in ``slots``."""


NOTHING = Placement(np.empty(0, np.int32), np.empty(0, np.int64))


class CachePolicy(ABC):
    """Decides the placements for one group of tables.

    All calls come from one thread, one batch ahead of training. Decisions must depend on the calls and the
    seed alone, because every rank that trains must make the same ones. Core checks each placement when it is
    given, and a wrong one ends the run with the plugin's name.

    A complete example, random replacement::

        class Random(CachePolicy):
            def __init__(self, space: RowSpace) -> None:
                super().__init__(space)
                self.random = np.random.default_rng(0)

            def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
                free = np.ones(self.space.slots, bool)
                free[hits] = False  # a row that the batch looks up stays
                slots = self.random.permutation(np.flatnonzero(free))[: len(misses)]
                return Placement(slots.astype(np.int32), misses[: len(slots)])

            def state_dict(self) -> dict[str, Any]:
                return {"random": json.dumps(self.random.bit_generator.state)}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.random.bit_generator.state = json.loads(state["random"])
    """

    each_once: bool = False
    """Whether it may be told each row and slot that a batch looks up once, with ``times`` beside them, as a
    GPU finds them; otherwise it is told them as often as the batch looks them up. A subclass that overrides
    ``migrate`` or ``admit`` says it anew."""
    times: NDArray[np.int32] | None = None
    """How often the batch looks up each of ``migrate``'s and ``admit``'s rows, if they are distinct and
    sorted; None if they have repeats. Set before each batch's calls; always None without ``each_once``."""

    def __init__(self, space: RowSpace) -> None:
        self.space = space

    def migrate(self, rows: RowIds) -> Placement:
        """Called first, with all rows that the batch looks up (int64 [L], with repeats or ``each_once``).

        Rows that this placement removes count as cold in this batch.
        """
        return NOTHING

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Called second: ``hits`` are the slots looked up (int32 [H], with repeats or ``each_once``),
        ``misses`` the distinct rows that are not resident (int64 [U]); ``looked_up`` as for ``migrate``.

        The placement's rows must be among ``misses``, and its slots neither among ``hits`` nor among those of
        ``migrate``'s placement. Rows of ``misses`` that are not admitted pass through the slab for this batch
        alone.
        """
        return NOTHING

    @property
    def waiting_bytes(self) -> int:
        """The most host memory that it has taken beside the arrays among its attributes, as for batches that
        wait; the report's memory counts both."""
        return 0

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on: numpy arrays, numbers, strings. Core saves which rows
        are resident, so that is not part of it.

        Names and types must not change over time: the state of a new policy tells what a saved one may hold.
        """

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ``Damaged`` if ``state`` cannot be a result of ``state_dict()``; called before anything is
        loaded.

        A policy whose state has numbers of rows or slots checks their range here as well.
        """
        from recpipe.common.saved import like  # which imports torch

        like(self.state_dict(), state, "state")

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``'s result; ``space.residents`` shows the saved residents already."""


def asks_once(policy: type[CachePolicy]) -> bool:
    """Whether policies of this class may be told each row once: the class that has their ``migrate`` or
    ``admit`` says so."""
    for kind in policy.__mro__:
        own = vars(kind)
        if "each_once" in own or "migrate" in own or "admit" in own:
            return bool(own.get("each_once", False))
    return False


def no_policy(made: object) -> str | None:
    """What is wrong with the result of ``Cache.policy``."""
    return None if isinstance(made, CachePolicy) else f": policy() returned no CachePolicy: {made!r}"


class Cache(ABC):
    """A plugin's claim on the cache of some tables; it makes a ``CachePolicy`` for each group of them.

    A group has the tables of one collection, dimension and optimizer. If a claim covers only some of a
    group's tables, these become a group of their own. Tables that nobody claims are kept as ``tiers.policy``
    says.
    """

    tables: str = "*"
    """A pattern for the tables' names, as for file names."""
    fallback: bool = False
    """Whether the claim gives way to any other plugin's instead of conflicting with it."""
    by_shards: bool = False
    """Whether its policies also work on a part of the rows. If so, tables may be sharded, and each rank has
    policies of its own for its shards; otherwise these tables cannot be sharded."""

    @abstractmethod
    def policy(self, space: RowSpace) -> CachePolicy:
        """Make a policy for the group ``space.group``; called once for each group, on every rank that trains.

        With sharded tables it is called for each part of the group that a rank looks up together; ``space``
        then numbers the rows of that part.
        """

    def beside(self, group: GroupInfo) -> int:
        """How many bytes of the group's budget (``group.slots`` records) the cache keeps for its own buffers;
        the slots get the rest. Called once for each group, before ``store``, unless tables are sharded."""
        return 0

    def store(self, store: ColdStore) -> ColdStore:
        """The cold store to use for the group: ``store`` itself, or a wrapper around it."""
        return store

    def collection(self, parts: TierParts) -> TableCollection | None:
        """The plugin's own implementation of the tables, instead of tiers under ``policy()``; None: tiers.
        Not called if tables are sharded.

        Called on every rank, before ``policy``. The result's ``forward`` gets this trainer's share of each
        batch, and its backward pass updates the rows, as a fused optimizer does. Frozen tables
        (``parts.tables.optimizer.frozen``) are only looked up: no backward pass comes, and nothing may be
        written back.
        """
        return None
