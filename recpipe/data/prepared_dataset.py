"""Prepared data as a data set: batches cut out of memory-mapped files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import cast

import numpy as np
import torch

from recpipe.data.columns import BatchMaker, Columns, Int64
from recpipe.data.dataset import NumberedDataset
from recpipe.data.id_mapper import IdMapper
from recpipe.data.prepared import Mapped, Meta
from recpipe.data.schema import IdRule, Schema
from recpipe.data.split import Parts
from recpipe.data.table_rows import TableRows
from recpipe.plugin.batch import Batch, total_weight


class PreparedDataset(NumberedDataset):
    """A prepared directory as a data set with the table rows of ``schema``; the operating system's page cache
    is the only cache. ``eval_fraction`` is held out unless preparation has split the samples.

    ``fingerprint`` covers the content of the arrays as rows of tables, the schema and the split, but
    not the files' location. It is found once for each schema, and kept beside the files. ``BeyondTable`` if
    the data are of rows, and one is not in its table.
    """

    def __init__(self, directory: Path, eval_fraction: float, schema: Schema) -> None:
        meta = Meta.read(directory)
        super().__init__(meta.samples, 0.0 if meta.parts else eval_fraction)
        if meta.parts:
            self._part(Parts(*meta.parts))
        self.schema, self.rejected_rows = schema, meta.rejected_rows
        self.missing = {name: count for name, count in meta.missing.items() if count}
        self.unseen = {name: count for name, count in meta.unseen.items() if count}
        self.mapped = Mapped(directory, meta)
        kept = cast(tuple[IdRule, ...], meta.kept)
        self._to_rows = IdMapper(schema, meta.multi_hot, kept)
        self._make = BatchMaker(schema, meta.multi_hot)
        digest, self._of_rows = TableRows(schema, meta.multi_hot, kept, directory).open(self.mapped)
        """All samples with rows of tables in place of ids; None: ids become rows as they are read."""
        identity = f"{meta.identity(schema, digest)} {meta.parts or eval_fraction!r}"
        self.fingerprint = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    def samples_between(self, low: int, high: int) -> Batch:
        """Samples ``low`` to ``high`` (excluded), cut out of the mapped files."""
        if self._of_rows is not None:
            return self._make(self._of_rows[low:high])
        return self.batch_of(self.mapped.between(low, high))

    def samples_at(self, numbers: Int64) -> Batch:
        """The samples with these ``numbers``, copied out of the mapped files."""
        if self._of_rows is not None:
            return self._make(self._of_rows.take(numbers))
        return self.batch_of(self.mapped.at(numbers))

    def batch_of(self, columns: Columns) -> Batch:
        """Samples as the source gave them as a batch."""
        return self._make(self._to_rows(columns))

    def weight_between(self, low: int, high: int) -> tuple[float, ...]:
        """The ``total_weight`` of the batch of samples ``low`` to ``high`` (excluded); no ids are read."""
        return self._weight(slice(low, high))

    def weight_at(self, numbers: Int64) -> tuple[float, ...]:
        """The ``total_weight`` of the batch of samples with these ``numbers``; no ids are read."""
        return self._weight(numbers)

    def _weight(self, rows: slice | Int64) -> tuple[float, ...]:
        weights = self.mapped.weights(rows)
        return () if weights is None else total_weight(torch.from_numpy(np.array(weights)))
