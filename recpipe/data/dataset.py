"""What a data set is to the rest of recpipe: a schema, two splits, and batches from any position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from recpipe.data.batch import Batch

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class SparseFeature:
    """One categorical feature and the number of rows of its embedding table (ids are in [0, rows))."""

    name: str
    rows: int


@dataclass(frozen=True)
class Schema:
    """The columns of a data set, in the order in which batches hold them."""

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]


class Dataset(ABC):
    """Samples in time order; ``eval`` is the later ``data.eval_fraction`` of them.

    ``fingerprint`` identifies content and preparation (equal fingerprints, equal batches);
    ``rejected_rows`` counts input rows that ``data.on_bad_row=skip`` left out.
    """

    schema: Schema
    fingerprint: str
    rejected_rows: int

    @abstractmethod
    def size(self, split: Split) -> int:
        """Number of samples in ``split``."""

    @abstractmethod
    def batches(self, split: Split, batch_size: int, first: int = 0) -> Iterator[Batch]:
        """Batches ``first``, ``first + 1``, ... of ``split``; the last one may be short, none is lost.

        Starting at ``first`` costs no more than starting at 0: resuming seeks, it does not replay.
        """

    def num_batches(self, split: Split, batch_size: int) -> int:
        """How many batches of ``batch_size`` the split holds, a short last one included."""
        return -(-self.size(split) // batch_size)
