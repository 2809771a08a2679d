"""The columns of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from recpipe.errors import DataError, shown
from recpipe.plugin.tables import SparseFeature

LONGEST_NAME = 200
"""Most bytes of a sparse feature's percent-encoded name; file systems allow 255 with what is added to it."""


@dataclass(frozen=True)
class Schema:
    """The columns of a data set, in the order in which batches hold them.

    ``DataError`` if a sparse feature's name cannot be part of a file's name: tables are kept in files named
    so.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]

    def __post_init__(self) -> None:
        for feature in self.sparse:
            try:
                fits = len(quote(feature.name, safe="")) <= LONGEST_NAME
            except UnicodeEncodeError:
                fits = False
            if not fits:
                raise DataError(
                    f"the column name '{shown(feature.name)}' is not text of at most {LONGEST_NAME} bytes, "
                    "percent-encoded; rename the column"
                )
