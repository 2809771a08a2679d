"""Records that a program hands over, written to a file once, so that they are read like all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recpipe.errors import UserError, shown

Records = Iterable[Any]
"""Record batches, tables, or dicts with an array, a tensor or a list for each column."""


def write_records(records: Records, file: Path) -> None:
    """Write ``records``, one after the other, as a stream of Arrow's; memory does not grow with them.

    ``records`` may be a table itself, of pyarrow, pandas, polars or another library that speaks Arrow.
    ``UserError`` for what are no records, for none at all, and for columns that change.
    """
    schema: pa.Schema | None = None
    with pa.OSFile(str(file), "wb") as sink:
        for number, table in enumerate(_tables(records), 1):
            if schema is None:
                schema = table.schema
                writer = pa.ipc.new_stream(sink, schema)
            writer.write_table(_alike(table, schema, number))
        if schema is None:
            raise UserError("the data has no record batch")
        writer.close()


def _tables(records: Records) -> Iterator[pa.Table]:
    if hasattr(records, "__arrow_c_stream__"):
        for batch in pa.RecordBatchReader.from_stream(records):
            yield pa.Table.from_batches([batch])
        return
    if not isinstance(records, Iterable) or isinstance(records, Mapping):
        raise UserError(
            f"the data is a {type(records).__name__}: with features, hand over a path, a table, or an "
            "iterable of record batches, of tables or of dicts of columns"
        )
    for number, given in enumerate(records, 1):
        yield _table(given, number)


def _table(given: Any, number: int) -> pa.Table:
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    try:
        if isinstance(given, Mapping):
            return pa.table({str(name): _column(values) for name, values in given.items()})
        if hasattr(given, "__arrow_c_stream__"):
            return pa.table(given)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise UserError(f"record batch {number}: is no table of columns ({shown(error, 200)})") from error
    raise UserError(
        f"record batch {number} is a {type(given).__name__}: with features, it is a record batch, a table or "
        "a dict of columns"
    )


def _column(values: Any) -> pa.Array:
    """An array [n] or [n, size], a tensor or a list; rows of an array are lists."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)


def _alike(table: pa.Table, schema: pa.Schema, number: int) -> pa.Table:
    """``table`` with the columns and types of the first one."""
    if table.schema.equals(schema):
        return table
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise UserError(
            f"record batch {number}: has not the columns and types of the first one ({shown(error, 200)})"
        ) from error
