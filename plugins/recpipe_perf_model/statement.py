"""What a plugin's technique costs and saves: a ``Statement`` about the average batch.

A plugin with a method ``costs`` (``tiers.predict.StatesCosts``) states what changes beside a run without
it: which rows move, what is done ahead or left out, and what work is added. It measures nothing and knows no
machine. The performance model times each amount by what it has measured on the machine, and walks the tasks
of a step with the overlap that the pipeline has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Rows of one group of tables that move for an average batch."""

    read: float = 0.0
    """Distinct rows that the cold store gives."""
    returned: float = 0.0
    """Rows written to it that this batch alone needed, one batch after they were read."""
    evicted: float = 0.0
    """Rows written to it that leave a slot."""
    placed: float = 0.0
    """Rows that enter a slot."""
    slab: float = 0.0
    """Distinct rows that the batch looks up outside of the slots."""
    slab_lookups: float = 0.0
    """How many of its lookups are of those."""
    missed: float = 0.0
    """Lookups of rows that are not resident when the batch comes; what is shown as misses, no time depends on
    it."""

    @property
    def written(self) -> float:
        """All rows that are written to the store."""
        return self.returned + self.evicted


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One kind of batches."""

    share: float = 1.0
    """The share of all batches that are of this kind; the shares of a statement's phases add up to 1."""
    moved: Sequence[Moved] = ()
    """For each group of ``Facts.groups``."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work that is added to every batch, as so many runs of one of the machine's micro-benchmarks."""

    name: str
    """What it does; unique in a statement."""
    kind: str
    """Which benchmark, by the ``kind`` of its samples (docs/plugins.md lists them)."""
    at: Mapping[str, float | str] = field(default_factory=dict)
    """Its sizes, by the benchmark's names."""
    times: float = 1.0
    """How often."""
    place: str = "loader"
    """Where: ``loader`` (when the batch is read), ``main`` (before it is trained), or the name of a thread of
    the plugin's own, which works on later batches while this one trains."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a run with the plugin does, each aspect as it is without the plugin unless it is set."""

    why: str
    """In one sentence, what the technique gains by and what it pays for that, with the figures it rests
    on."""
    phases: Sequence[Phase] = ()
    """The rows that move, if the plugin decides which rows are resident."""
    plans: str = "lru"
    """The built-in policy whose planning takes about as long as the plugin's: nocache, lru or lfu."""
    yields: bool = False
    """Whether ``phases`` give way to those of another plugin, as a fallback cache does."""
    early: float = 0.0
    """The share of a batch's samples that train while the rows of the others are fetched; 0: batches are not
    cut."""
    kept: float = 1.0
    """The share of the samples read that are trained."""
    ahead: int = 1
    """How many batches before its turn a batch's fetch begins, at most; 0: training waits for all of it."""
    together: float = 1.0
    """How many batches' rows are read by one request."""
    cold_bytes: Sequence[float] = ()
    """For each group the bytes of a record in the cold store, if it is not float32 there."""
    codec: str = ""
    """The built-in codec (int8, fp16, bf16) that takes about as long to code such a record; empty: none is
    coded."""
    works: Sequence[Work] = ()
    """Work that it adds."""
    inside: bool = False
    """Whether the plugin's own tables plan, fetch and write rows in the lookup, and keep them as plain
    arrays: the training thread does all of it. Over several trainers ``phases`` are those of each one's
    share."""
    spread: float = 1.0
    """The share of the tables' work that the busiest rank does, where tables are sharded."""
    memory: int = 0
    """Bytes of memory beyond the budget for resident rows."""
    unsure: str = ""
    """What the statement cannot know before the run, in a sentence."""
    instead: Statement | None = None
    """What the run does where a measurement while it trains shows that this is faster; the figures are then
    those of the faster one."""
