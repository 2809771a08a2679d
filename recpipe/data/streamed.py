"""Files read once from beginning to end as batches, without preparing them for later runs."""

from __future__ import annotations

from collections.abc import Iterator

from recpipe.data.batch import Batch
from recpipe.data.cache import Source
from recpipe.data.columns import BatchMaker, Columns, concatenate
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.fold import Fold


class StreamedDataset(Dataset):
    """All rows of a source in order, as the training split. Their number is not known before they are read.

    ``share``: the part of the input that the latest ``batches`` has read, in [0, 1].
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.schema, self.preparation = source.schema, source.preparation
        self.fingerprint = ""
        self.share = 0.0
        self._make = BatchMaker(source.schema, source.multi_hot)
        self._fold = Fold(source.schema, source.multi_hot, source.kept)

    def size(self, split: SplitName) -> int:
        """0: not known."""
        return 0

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """All rows from the first one on, whatever ``first`` and ``part`` are; none of the held-out split."""
        if split == "train":
            for columns in self._cut(batch_size):
                yield self._make(self._fold(columns))

    def _cut(self, size: int) -> Iterator[Columns]:
        """Blocks of ``size`` rows; the last one may be short."""
        kept: list[Columns] = []
        rows = 0
        for block, share in self.source.blocks():
            self.share = share
            kept.append(block)
            rows += len(block)
            if rows < size:
                continue
            joined, at = concatenate(kept), 0
            while rows - at >= size:
                yield joined[at : at + size]
                at += size
            kept, rows = [joined[at:]], rows - at
        if rows:
            yield concatenate(kept)
