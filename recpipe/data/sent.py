"""Arrays on their way from one process to another: an Arrow batch of one row, with a list for each array and
a head in JSON. Whoever reads them checks them, and nothing in them is ever executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.common.saved import Damaged, entries, parse_json
from recpipe.data.columns import Columns, MultiHot
from recpipe.data.text import READ_FAULTS
from recpipe.errors import shown

Arrays = Mapping[str, NDArray[Any]]
HEAD = b"recpipe"
"""The key of the head in the schema's metadata."""
OF_SAMPLES = ("labels", "dense", "ids", "missing", "weights")
OF_BAGS = ("values", "offsets", "missing", "weights")


class Sent(NamedTuple):
    """What was ``packed``."""

    head: Any
    """A value that JSON has."""
    arrays: dict[str, NDArray[Any]]
    rows: pa.RecordBatch | None = None


def packed(sent: Sent) -> bytes:
    """An Arrow stream that ``unpacked`` reads."""
    shapes = {name: array.shape for name, array in sent.arrays.items()}
    lists = {name: pa.array(array.ravel()) for name, array in sent.arrays.items()}
    if sent.rows is not None:
        lists[""] = sent.rows.to_struct_array()
    columns = [pa.LargeListArray.from_arrays([0, len(each)], each) for each in lists.values()]
    schema = pa.schema([(name, column.type) for name, column in zip(lists, columns, strict=True)])
    head = json.dumps({"head": sent.head, "shapes": shapes}, allow_nan=False)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema.with_metadata({HEAD: head})) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    content: bytes = stream.getvalue().to_pybytes()
    return content


def unpacked(content: bytes) -> Sent:
    """The inverse of ``packed``, with arrays of its own; ``ValueError`` if it is not as it was written."""
    try:
        with pa.ipc.open_stream(content) as reader:
            batch, metadata = reader.read_next_batch(), reader.schema.metadata or {}
        batch.validate(full=True)
    except (*READ_FAULTS, StopIteration) as fault:
        raise Damaged(f"it is no whole Arrow stream ({shown(fault, 200)})") from fault
    if HEAD not in metadata or (batch.num_columns and len(batch) != 1):
        raise Damaged("it has no head")
    stated = entries({"head": Any, "shapes": dict[str, tuple[int, ...]]}, parse_json(metadata[HEAD]))
    found = {name: column.flatten() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    rows = pa.RecordBatch.from_struct_array(found.pop("")) if "" in found else None
    if found.keys() != stated["shapes"].keys():
        raise Damaged("its arrays are not those that it names")
    arrays = {
        name: np.array(found[name].to_numpy(zero_copy_only=False)).reshape(shape)
        for name, shape in stated["shapes"].items()
    }
    return Sent(stated["head"], arrays, rows)


def arrays_of(columns: Columns) -> dict[str, NDArray[Any]]:
    """What ``columns_of`` takes."""
    found = {name: getattr(columns, name) for name in OF_SAMPLES}
    for name, bag in columns.bags.items():
        found |= {f"{part} of {name}": getattr(bag.trimmed(), part) for part in OF_BAGS}
    return {name: array for name, array in found.items() if array is not None}


def columns_of(arrays: Arrays) -> Columns:
    """The inverse of ``arrays_of``; ``Damaged`` if the arrays are not those of samples."""
    first = f"{OF_BAGS[0]} of "
    names = [name.removeprefix(first) for name in arrays if name.startswith(first)]
    try:
        bags = {name: MultiHot(*_parts(arrays, OF_BAGS, 2, f" of {name}")) for name in names}
        labels, dense, ids, missing, weights = _parts(arrays, OF_SAMPLES, 3)
    except KeyError as lacking:
        raise Damaged(f"it lacks {lacking}") from lacking
    for bag in bags.values():
        if not (len(bag.offsets) == len(labels) + 1 and bag.offsets[-1] == len(bag.values)):
            raise Damaged("its bags are not those of its samples")
    if any(len(each) != len(labels) for each in (dense, ids, missing, weights) if each is not None):
        raise Damaged("its arrays are of several numbers of samples")
    return Columns(labels, dense, ids, bags, missing, weights)


def _parts(arrays: Arrays, names: tuple[str, ...], needed: int, of: str = "") -> list[Any]:
    """The arrays with these ``names``, the first of which are ``needed``; None for others that are not
    there."""
    return [arrays[n + of] if place < needed else arrays.get(n + of) for place, n in enumerate(names)]
