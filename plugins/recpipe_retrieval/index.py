"""An index over candidates: their vectors in parquet and safetensors, and FAISS's search structure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.numpy import save_file

from recpipe.errors import UserError, shown
from recpipe_retrieval.vectors import Vectors

ITEMS, VECTORS, SEARCH, ABOUT = "items.parquet", "vectors.safetensors", "index.faiss", "index.json"
KINDS = ("flat", "hnsw", "ivf_pq")
"""``flat``: exact, all candidates are compared; ``hnsw``: a graph of neighbours (Malkov and Yashunin, 2018);
``ivf_pq``: vectors in cells, coded by product quantization (Jegou et al., 2011)."""
NEIGHBOURS, CODES, PROBES = 32, 256, 16
"""Of a node of the graph; of a code of 8 bits, each learned from a candidate at least; cells looked into."""


def faiss() -> ModuleType:
    """FAISS; ``UserError`` where it is not installed."""
    try:
        import faiss as found
    except ImportError as fault:
        raise UserError("retrieval needs FAISS: pip install 'recpipe[retrieval]'") from fault
    module: ModuleType = found
    return module


@dataclass(frozen=True)
class About:
    """What an index is of."""

    checkpoint: str
    step: int
    item: str
    """The column of the files that names a candidate."""
    kind: str
    items: int
    dim: int
    recall: dict[str, float] | None
    """By ``recall@K``, the share of the exact best K that the search finds, for the first rows of the data;
    None: it is exact."""


def distinct(rows: Iterator[tuple[pa.Table, Vectors]], item: str) -> tuple[pa.Table, Vectors]:
    """The columns of all candidates, the first of which has their ids, and their vectors, float32 [N, D]:
    those of each id's first row. Rows without an id are left out. ``UserError`` if none is left."""
    seen: set[Any] = set()
    items, vectors = [], []
    for table, found in rows:
        new = []
        for row, value in enumerate(table.column(0).to_pylist()):
            if value is not None and value not in seen:
                seen.add(value)
                new.append(row)
        items.append(table.take(pa.array(new, pa.int64())))
        vectors.append(found[new])
    if not seen:
        raise UserError(f"item={shown(item)}: no row of the data has an id")
    return pa.concat_tables(items).combine_chunks(), np.concatenate(vectors)


def searched(kind: str, vectors: Vectors) -> Any:
    """FAISS's index of a ``kind`` over ``vectors`` [N, D], by their products with a query."""
    lib, (count, dim) = faiss(), vectors.shape
    product = lib.METRIC_INNER_PRODUCT
    if kind == "flat":
        made = lib.IndexFlatIP(dim)
    elif kind == "hnsw":
        made = lib.IndexHNSWFlat(dim, NEIGHBOURS, product)
    else:
        if count < CODES:
            raise UserError(f"kind=ivf_pq learns {CODES} codes and there are {count:,} items: take kind=flat")
        parts = next(n for n in range(max(1, dim // 2), 0, -1) if dim % n == 0)
        cells = max(1, min(int(4 * math.sqrt(count)), count // 39))
        made = lib.IndexIVFPQ(lib.IndexFlatIP(dim), dim, cells, parts, 8, product)
        made.train(vectors)
        made.nprobe = min(PROBES, cells)
    made.add(vectors)
    return made


def best(index: Any, queries: Vectors, k: int) -> tuple[Vectors, NDArray[np.int64]]:
    """Scores float32 [Q, k] and places int64 [Q, k] of the best k, best first; -1 where there are fewer."""
    scores, places = index.search(np.ascontiguousarray(queries), k)
    return scores, places


def recall_at(index: Any, vectors: Vectors, queries: Vectors, ks: tuple[int, ...]) -> dict[str, float]:
    """For each k, the share of the exact best k of all ``queries`` that ``index`` finds."""
    exact, found = searched("flat", vectors), {}
    for k in ks:
        k = min(k, len(vectors))
        wanted, got = best(exact, queries, k)[1], best(index, queries, k)[1]
        found[f"recall@{k}"] = float(
            np.mean([len({*a} & {*b}) / k for a, b in zip(wanted, got, strict=True)])
        )
    return found


def write(directory: Path, items: pa.Table, vectors: Vectors, index: Any, about: About) -> None:
    """Write all files of an index; the one that says what it is comes last."""
    listed = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ABOUT).unlink(missing_ok=True)
    pq.write_table(items.append_column("vector", listed), directory / ITEMS)
    save_file({"candidates": vectors}, directory / VECTORS)
    faiss().write_index(index, str(directory / SEARCH))
    (directory / ABOUT).write_text(json.dumps(asdict(about), indent=1) + "\n")


def read(directory: Path) -> tuple[About, pa.Array, Any]:
    """What an index is of, the ids of its candidates and FAISS's index; ``UserError`` for anything else."""
    try:
        about = About(**json.loads((directory / ABOUT).read_text()))
        ids = pq.read_table(directory / ITEMS, columns=[about.item]).column(0).combine_chunks()
        index = faiss().read_index(str(directory / SEARCH))
        whole = len(ids) == about.items == index.ntotal and index.d == about.dim
    except (OSError, ValueError, TypeError, RuntimeError, pa.ArrowException) as fault:
        raise UserError(
            f"{directory} is no index ({shown(fault, 200)}): make one by recpipe index"
        ) from fault
    if not whole:
        raise UserError(f"{directory}: its files are of several indexes: make it again by recpipe index")
    return about, ids, index
