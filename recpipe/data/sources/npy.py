"""TorchRec's preprocessed Criteo triples: ``X_dense.npy`` float32 [N, 13], ``X_sparse.npy`` int32 [N, 26] and
``X_labels.npy`` int32 [N, 1], as ``torchrec.datasets.criteo.BinaryCriteoUtils`` writes them (which has
transformed the dense values; they are taken as they are).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpipe.data.columns import Columns
from recpipe.data.files import RowChecks, check_readable, input_files, map_npy
from recpipe.data.preparation import Preparation
from recpipe.data.schema import OF_MODULES, IdRule
from recpipe.data.sources.criteo import criteo_features, criteo_schema
from recpipe.data.sources.criteo_columns import DENSE, SPARSE
from recpipe.errors import DataError

BLOCK_ROWS = 65536


class Triple(NamedTuple):
    """The three files of one part of the data."""

    dense: Path
    sparse: Path
    labels: Path


def triples(path: Any) -> list[Triple]:
    """The triples of ``path`` (a directory, a ``*_dense.npy`` file, or a list of both); empty if it is not
    .npy data."""
    if not path:
        return []
    if isinstance(path, (list, tuple)):
        parts = [triples(item) for item in path]
        if any(parts) and not all(parts):
            raise DataError(f"data.path mixes .npy triples and other files: {path[parts.index([])]}")
        return [triple for part in parts for triple in part]
    base = Path(str(path)).expanduser()
    if base.is_dir() and any(base.glob("*.npy")):
        files = [file for file in input_files(path, (".npy",)) if file.name.endswith("_dense.npy")]
        if not files:
            raise DataError(f"{base}: holds .npy files, but none is named *_dense.npy")
    elif base.is_file() and base.suffix == ".npy":
        files = [base]
    else:
        return []
    return [_triple(file) for file in files]


def _triple(dense: Path) -> Triple:
    if not dense.name.endswith("_dense.npy"):
        raise DataError(f"{dense}: give the *_dense.npy file of a triple, or its directory")
    stem = dense.name.removesuffix("_dense.npy")
    triple = Triple(dense, dense.with_name(f"{stem}_sparse.npy"), dense.with_name(f"{stem}_labels.npy"))
    for file in triple:
        if not file.exists():
            raise DataError(f"{file}: missing, but {dense.name} is there; a triple has three files")
        check_readable(file)
    return triple


class NpySource:
    """Triples to prepare. With ``hash_ids``, ids % rows is taken, as by TorchRec's ``hashes``; otherwise ids
    are checked."""

    def __init__(
        self,
        found: Sequence[Triple],
        path: Any,
        tables: Mapping[str, int],
        hash_ids: bool,
        skip_bad_rows: bool,
    ) -> None:
        if not found:
            input_files(path, (".npy",))
            raise DataError(f"{path}: no *_dense.npy, *_sparse.npy, *_labels.npy triple here")
        self.files = [file for triple in found for file in triple]
        self.schema = criteo_schema(tables)
        self.multi_hot: tuple[str, ...] = ()
        rule = "modulo" if hash_ids else "rows"
        self.preparation = Preparation.of(criteo_features(tables, rule, "auto", "none"))
        # Of signed and unsigned ids together, neither type holds all.
        alike = len({map_npy(triple.sparse).dtype.kind for triple in found}) == 1
        self._modulo = hash_ids and alike
        self.kept: tuple[IdRule, ...] = ("modulo" if self._modulo else "unchanged",) * len(self.schema.sparse)
        self.missing: dict[str, int] = {}
        self.recipe: dict[str, Any] = {"source": "npy", "hash_ids": hash_ids, "skip": skip_bad_rows}
        if not self._modulo and (hash_ids or skip_bad_rows):  # without, no bad row is left out
            self.recipe["tables"] = dict(tables)
        self.rejected_rows = 0
        self._triples, self._hash, self._skip = list(found), hash_ids, skip_bad_rows
        self._rows = np.array([feature.rows for feature in self.schema.sparse], np.int64)

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples of all triples in order."""
        for index, triple in enumerate(self._triples):
            dense, sparse, labels = _load(triple)
            for low in range(0, len(dense), BLOCK_ROWS):
                high = min(low + BLOCK_ROWS, len(dense))
                columns = self._columns(triple, low, dense[low:high], sparse[low:high], labels[low:high])
                yield columns, (index + high / len(dense)) / len(self._triples)

    def _columns(
        self, triple: Triple, low: int, dense: NDArray[Any], sparse: NDArray[Any], labels: NDArray[Any]
    ) -> Columns:
        ids = self._ids(sparse)
        labels = labels.reshape(-1)
        checks = {file: RowChecks(file, low + 1, len(dense)) for file in triple}
        valid = (labels == 0) | (labels == 1)
        checks[triple.labels].require(valid, "label", labels.__getitem__, "is neither 0 nor 1")
        with np.errstate(over="ignore"):
            stored = dense.astype(np.float32)
        if not np.isfinite(stored).all():
            for column, name in enumerate(DENSE):
                values = dense[:, column]
                checks[triple.dense].require_finite(values, name, values.__getitem__)
        self._require_rows(ids, checks[triple.sparse])
        for check in checks.values():
            check.finish(self._skip)
        good = np.logical_and.reduce([check.good for check in checks.values()])
        self.rejected_rows += int(len(good) - good.sum())
        made = Columns(labels.astype(np.float32), stored, ids)
        made = made if good.all() else made.where(good)
        if not self._modulo:
            made.ids = made.ids.astype(np.int32)
        return made

    def _ids(self, sparse: NDArray[Any]) -> NDArray[np.integer]:
        """The ids [n, 26] of ``sparse``, in a type that holds them and the rows of tables."""
        if not self._hash and sparse.dtype.itemsize == 4:
            return np.asarray(sparse)
        # Ids and rows must have the same signedness: numpy would turn uint64 and int64 into float64.
        ids = sparse.astype(np.int64 if sparse.dtype.kind == "i" else np.uint64)
        if self._hash and not self._modulo:
            ids %= self._rows.astype(ids.dtype)
        return ids

    def _require_rows(self, ids: NDArray[np.integer], checks: RowChecks) -> None:
        """Marks samples with ids that are not in their tables, unless these become rows later."""
        unsigned = f"u{ids.dtype.itemsize}"  # of negative numbers, larger than any row
        if self._modulo or (ids.view(unsigned) < self._rows.astype(unsigned)).all():
            return
        for column, rows in enumerate(self._rows.tolist()):
            values, name = ids[:, column], SPARSE[column]
            remedy = (
                f"is not in [0, {rows}): raise data.tables.{name} or pass data.hash_ids=true {OF_MODULES}"
            )
            checks.require((values >= 0) & (values < rows), name, values.__getitem__, remedy)


def _load(triple: Triple) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    arrays: list[NDArray[Any]] = []
    for file, width, kind in ((triple.dense, 13, "f"), (triple.sparse, 26, "iu"), (triple.labels, 1, "iu")):
        array = map_npy(file)
        rows: Any = len(arrays[0]) if arrays else array.shape[0] if array.ndim else "N"
        if array.shape != (rows, width) and (width > 1 or array.shape != (rows,)):
            raise DataError(f"{file}: shape {array.shape}, expected ({rows}, {width})")
        if array.dtype.kind not in kind:
            raise DataError(f"{file}: holds {array.dtype}, expected {'float32' if kind == 'f' else 'int32'}")
        arrays.append(array)
    if not len(arrays[0]):
        raise DataError(f"{triple.dense}: holds no rows")
    return arrays[0], arrays[1], arrays[2]
