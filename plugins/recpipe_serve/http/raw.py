"""Raw values of a request, as files have them, become a model's inputs by the encoding of its package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from recpipe.data.features import Features
from recpipe.data.preparation import Preparation
from recpipe.errors import BadRow, DataError, shown
from recpipe_serve.batching.forms import Array
from recpipe_serve.errors import bad

DENSE = "dense"
"""The tensor of all dense features."""
WEIGHTS = ".weights"
"""After a feature's name: what each of its ids weighs."""
LENGTHS = ".lengths"
"""After a feature's name: how many ids each sample has."""
REQUEST = "the request"


class RawValues:
    """Makes inputs of rows by what training's data were prepared with."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    @cached_property
    def _encoding(self) -> Any:
        """Imported with pyarrow when the first raw values come: a server of encoded ones does without."""
        return self._preparation.encoding

    @property
    def features(self) -> Features:
        """What it makes inputs of."""
        found: Features = self._encoding.features
        return found

    def inputs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """The tensors that ``Features`` takes, of rows by the names of their columns; ``Refused`` names the
        row and the column of what cannot be."""
        import pyarrow as pa

        names = list(dict.fromkeys(name for row in rows for name in row))
        return self.of_batch(
            pa.record_batch([_array(name, [row.get(name) for row in rows]) for name in names], names)
        )

    def of_batch(self, batch: Any) -> dict[str, Array]:
        """``inputs`` of the rows of a ``pyarrow.RecordBatch``."""
        from recpipe.data.columns import BatchMaker
        from recpipe.data.files import RowChecks

        checks = RowChecks(REQUEST, 1, len(batch))
        try:
            self._encoding.require_types(REQUEST, batch.schema)
            columns = self._encoding.columns(batch, checks, labelled=False).columns
            checks.finish(skip=False)
            made = self._encoding.to_rows(columns)
        except BadRow as fault:
            raise bad(fault.fault) from fault
        except DataError as fault:
            raise bad(str(fault)) from fault
        single = [f.name for f in self._encoding.schema.sparse if f.name not in made.bags]
        inputs: dict[str, Array] = {DENSE: made.dense} if made.dense.shape[1] else {}
        inputs |= {name: np.asarray(made.ids[:, place], np.int64) for place, name in enumerate(single)}
        for name, bag in made.bags.items():
            own = bag.trimmed()
            inputs[name], inputs[name + LENGTHS] = own.values.astype(np.int64), np.diff(own.offsets)
        if self._encoding.schema.weighted:
            found = BatchMaker(self._encoding.schema, self._encoding.multi_hot)(made).sparse.to_dict()
            inputs |= {name + WEIGHTS: own.weights().numpy() for name, own in found.items()}
        return inputs


def _array(name: str, values: list[Any]) -> Any:
    """An Arrow array of JSON's values; ``Refused`` if they are of several kinds."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as fault:
        raise bad(
            f"{REQUEST}, column {shown(name)}: its values are not all text, or all numbers, or lists of one "
            f"of these ({shown(fault, 100)})"
        ) from fault
