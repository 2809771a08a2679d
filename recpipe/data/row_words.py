"""What rows of tables are called in the input's files: prepared data and vocabularies have the keys of text
alone, and a figure that is told by such a row is read by its word."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recpipe.data.config import DataConfig, FilesConfig
from recpipe.data.preparation import Preparation
from recpipe.errors import UserError, shown

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
LOOKED_AT = 1 << 22
"""Rows of the files that are read for the words of a feature."""
OTHERS = ", ..."
"""Behind a word whose row other words have, too."""


class RowWords:
    """Finds words in the files of ``config``, whose values became rows as ``preparation`` says. Words are
    kept from one call to the next; several threads may ask."""

    def __init__(self, config: DataConfig, preparation: Preparation) -> None:
        self._config, self._preparation = config, preparation
        self._asked: dict[str, dict[int, str | None]] = {}
        self._lock = Lock()

    def of(self, name: str, rows: Collection[int]) -> dict[int, str]:
        """By each of the ``rows`` of a feature's table, the value of its column that became this row: of the
        first block of the files in which one did, the one that comes most there, with ``OTHERS`` if there are
        several. Rows that the first ``LOOKED_AT`` rows of the files do not have are left out, as are all of a
        feature that has not one id for each row of the files, and where the files cannot be read any more."""
        with self._lock:
            known = self._asked.setdefault(name, {})
            if wanted := {*rows} - {*known}:
                known |= dict.fromkeys(wanted)
                try:
                    known |= self._found(name, wanted)
                except (OSError, UserError) as fault:
                    log.info("%s: values have rows of the table as names: %s", shown(name), fault)
            return {row: word for row in rows if (word := known[row]) is not None}

    def _found(self, name: str, wanted: Collection[int]) -> dict[int, str]:
        features = self._preparation.features
        own = None if features is None else next((f for f in features.sparse if f.name == name), None)
        if own is None or own.kind != "id" or own.ids == "rows" or own.growth is not None:
            return {}
        whole = self._preparation.encoding
        assert whole is not None, "it has features"
        encoding = replace(whole, features=whole.features.alone([name]))
        left, words = {*wanted}, dict[int, str]()
        for values in self._blocks(encoding.features.sparse[0].source):
            found = words_of(values, encoding.rows_of(values), left)
            words |= found
            left -= {*found}
            if not left:
                break
        return words

    def _blocks(self, column: str) -> Iterator[pa.Array]:
        """The values of a column in the files, those held out behind those that train."""
        from recpipe.data.file_columns import has_columns, read_columns  # with pyarrow

        config, read = self._config, 0
        if not has_columns(config):
            return
        every: list[DataConfig] = [config]
        if isinstance(config, FilesConfig):
            held_out = [path for path in (config.eval_path, config.test_path) if path]
            every += [replace(config.whole(), path=path) for path in held_out]
        for each in every:
            for table in read_columns(each, [column]):
                yield from table.column(0).chunks
                read += len(table)
                if read >= LOOKED_AT:
                    return


def words_of(values: pa.Array, rows: NDArray[np.integer], wanted: Collection[int]) -> dict[int, str]:
    """By each of the ``wanted`` rows that are there, the most frequent of the ``values`` [n] that became it;
    ``rows``: what each value became, int [n]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    there = np.isin(rows, [*wanted])
    if not there.any():
        return {}
    encoded = pc.dictionary_encode(values.filter(pa.array(there)))
    words, codes = encoded.dictionary.to_pylist(), pc.fill_null(encoded.indices, -1).to_numpy()
    found = {}
    for row in np.unique(rows[there]).tolist():
        counts = np.bincount(codes[(rows[there] == row) & (codes >= 0)], minlength=len(words))
        if counts.any():
            several = np.count_nonzero(counts) > 1
            found[row] = f"{words[counts.argmax()]}{OTHERS if several else ''}"
    return found
