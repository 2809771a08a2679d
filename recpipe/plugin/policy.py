"""Cache policies: which rows are resident when.

A policy sees each batch once, in order, before it is trained, and answers with a ``Placement``. It moves
nothing and takes nothing back: core carries placements out, keeps a journal of them, and knows who is
resident.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from recpipe.tables.collection import TableCollection
    from recpipe.tables.stores.base import ColdStore
    from recpipe.tables.tiers.parts import TierParts

Slots = NDArray[np.int32]
RowIds = NDArray[np.int64]
IN_STORE = -1


class Residents:
    """Who is resident, as it will be once every placement so far has been carried out; read only.

    Core writes it by ``put`` and ``empty``; who keeps rows in slots of its own making may use them too.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self._where = np.full(rows, IN_STORE, np.int32)
        self._row_of_slot = np.full(slots, -1, np.int64)

    @property
    def row_of_slot(self) -> RowIds:
        """Of each slot the row that it holds, -1 where it is empty: int64 [slots], not to be written."""
        view = self._row_of_slot.view()
        view.flags.writeable = False
        return view

    def slot_of(self, rows: RowIds) -> Slots:
        """Of each of ``rows`` the slot that it is in, -1 where it is not resident: int32 [n]."""
        slots: Slots = np.maximum(self._where[rows], IN_STORE)
        return slots

    @property
    def rows(self) -> RowIds:
        """The resident rows, in the order of their slots."""
        return self._row_of_slot[self._row_of_slot >= 0]

    @property
    def nbytes(self) -> int:
        """DRAM of the maps: 4 bytes per row and 8 per slot."""
        return self._where.nbytes + self._row_of_slot.nbytes

    def put(self, slots: Slots, rows: RowIds) -> RowIds:
        """Give ``slots`` to ``rows``; returns the rows that leave them (-1: the slot was empty)."""
        leaving = self._row_of_slot[slots]
        self._where[leaving[leaving >= 0]] = IN_STORE
        self._where[rows] = slots
        self._row_of_slot[slots] = rows
        return leaving

    def empty(self, slots: Slots) -> RowIds:
        """Take their rows from ``slots``; returns those rows (-1: the slot was empty)."""
        leaving = self._row_of_slot[slots]
        self._where[leaving[leaving >= 0]] = IN_STORE
        self._row_of_slot[slots] = -1
        return leaving


@dataclass(frozen=True)
class RowSpace:
    """What a policy may know: the rows of its group of tables by number, and how many can be resident."""

    bases: RowIds
    """Number of each table's row 0, and of the row after the last: int64 [T + 1]."""
    slots: int
    """Rows that ``tiers.resident_bytes`` holds."""
    group: int = 0
    """Number of the group of tables (``Context.groups``)."""
    residents: Residents = field(init=False, repr=False, compare=False)
    """Who is resident now."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "residents", Residents(self.rows, self.slots))

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return int(self.bases[-1])


@dataclass(frozen=True)
class Placement:
    """From this batch on, ``slots[i]`` holds ``rows[i]``; what was there before goes to the cold store."""

    slots: Slots
    """Distinct slots, int32 [P]."""
    rows: RowIds
    """Distinct rows that are not resident, int64 [P]."""
    freed: Slots = field(default_factory=lambda: np.empty(0, np.int32))
    """Slots that are emptied: their rows go to the cold store. None of them is in ``slots``."""


NOTHING = Placement(np.empty(0, np.int32), np.empty(0, np.int64))


class CachePolicy(ABC):
    """Decides placements, of one group of tables.

    All calls come from one thread, one batch ahead of training. Decisions must follow from the calls alone
    (and the seed): every rank that trains takes the same ones. Core checks each placement when it is given,
    and a wrong one ends the run with the plugin's name.

    Random replacement, whole::

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

    def __init__(self, space: RowSpace) -> None:
        self.space = space

    def migrate(self, rows: RowIds) -> Placement:
        """Called first, with all rows that the batch looks up (int64 [L], repeats included).

        Rows that the placement drops are looked up as cold ones in this batch.
        """
        return NOTHING

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Called second: ``hits`` are the slots looked up (int32 [H], with repeats), ``misses`` the
        distinct rows that are not resident (int64 [U]); ``looked_up`` as for ``migrate``.

        The placement's rows must be among ``misses`` and its slots not among ``hits``. Rows of
        ``misses`` that are not admitted pass through the slab for this batch alone.
        """
        return NOTHING

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on: numpy arrays, numbers, strings. Who is resident is not
        part of it: core saves that.

        The same names and types in every state, so that a new policy's tells what a saved one may hold.
        """

    def check_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` on what cannot be ``state_dict()``'s result; asked before anything is loaded.

        A policy whose state has numbers of rows or slots checks their range here as well.
        """
        from recpipe.common.saved import like  # which imports torch

        like(self.state_dict(), state, "state")

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``'s result; ``space.residents`` shows the saved residents already."""


class Cache(ABC):
    """A plugin's claim of some tables' cache: it brings a ``CachePolicy`` for each group of them.

    Groups are tables of one collection, dimension and optimizer. A claim of some of a group's tables makes
    these a group of their own; tables that nobody claims are kept as ``tiers.policy`` says.
    """

    tables: str = "*"
    """Pattern (as of file names) of the tables' names."""
    fallback: bool = False
    """Gives way to any other plugin's claim instead of conflicting with it."""
    by_shards: bool = False
    """Whether its policies decide from what they are shown alone, whatever rows these are. Where tables are
    sharded, each rank then has policies of its own, for the shards that it holds; else they may not be."""

    @abstractmethod
    def policy(self, space: RowSpace) -> CachePolicy:
        """A new policy for the group ``space.group``; asked once for each, on every rank that trains.

        Of sharded tables it is asked for each part of the group that a rank looks up together, and
        ``space`` numbers the rows of that part.
        """

    def store(self, store: ColdStore) -> ColdStore:
        """The group's cold store as the policy wants to reach it: itself, or one around it."""
        return store

    def collection(self, parts: TierParts) -> TableCollection | None:
        """Tables of the plugin's own making instead of tiers under ``policy()``; None: tiers. Not asked
        where tables are sharded.

        Called on every rank, before ``policy``. Its ``forward`` gets this trainer's share of each batch, and
        its backward makes the update, as a fused optimizer does.
        """
        return None
