"""A trace of requests, made of the rows of any data in their order and at their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from recpipe_serve import Asked
from recpipe_serve.http.features import Features

from recpipe.answers.trained import Trained
from recpipe.data.config import FileConfig
from recpipe.data.file_columns import Beside, has_columns, read_columns
from recpipe.data.make import StreamedDataset, open_source
from recpipe.data.schema import Schema
from recpipe.errors import UserError, did_you_mean
from recpipe.plugin import Batch

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Encoded rows that are requests."""

    dense: Array
    """float32 [R, D]."""
    ids: list[list[Array]]
    """Of each sparse feature the ids of each row, int64."""
    times: NDArray[np.float64] | None
    """When they came, in seconds; None: not known."""

    def __len__(self) -> int:
        return len(self.dense)


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they come. Each asks for its row's user beside candidates, or for its
    row alone."""

    inputs: list[dict[str, Array]]
    """The tensors of each, by name, as a client sends them."""
    asked: list[Asked]
    times: NDArray[np.float64] | None
    user: tuple[int, ...]
    """The places of the sparse features that are not the candidates'."""
    users: int
    """Different user sides."""


def rows_of(trained: Trained, visit: Sequence[str], time: str | None, most: int | None, skip: int) -> Rows:
    """The rows of the data of ``trained``, from the ``skip``-th request on and at most so many. Of rows that
    follow each other with the same values of the columns ``visit`` the first one is a request; (): each is
    one.
    ``time``: the column of times."""
    config = trained.cfg.data
    columns = [*dict.fromkeys([*visit, *([] if time is None else [time])])]
    if columns and not has_columns(config):
        raise UserError(f"data={config.name} has no columns that could be read: leave visit= and time= out")
    if not isinstance(config, FileConfig):
        raise UserError(f"data={config.name}: a trace is read from files; take data=files data.path=...")
    source = open_source(config, labelled=False, trained_by=trained.trained_on.preparation)
    dataset = StreamedDataset(source)
    trained.require_columns(dataset)
    beside = Beside(read_columns(config, columns)) if columns else None
    dense: list[Array] = []
    ids: list[list[Array]] = [[] for _ in trained.schema.sparse]
    times: list[float] = []
    before: Any = None
    seen = 0
    for batch in dataset.batches("train", config.batch_size):
        table = None if beside is None else beside.take(batch.size)
        chosen = list(range(batch.size))
        if visit:
            assert table is not None
            values = list(zip(*(table.column(name).to_pylist() for name in visit), strict=True))
            chosen = [n for n, own in enumerate(values) if own != (values[n - 1] if n else before)]
            before = values[-1]
        wanted = chosen[max(0, skip - seen) :]
        seen += len(chosen)
        wanted = wanted[: None if most is None else most - len(dense)]
        dense += list(batch.dense.numpy()[wanted])
        for own, of_rows in zip(ids, _ids_of(batch), strict=True):
            own += [of_rows[n] for n in wanted]
        if time is not None:
            assert table is not None
            times += _seconds(table.column(time), time)[wanted].tolist()
        if most is not None and len(dense) >= most:
            break
    if not dense:
        raise UserError(f"there are no requests after the first {skip:,} of the data")
    return Rows(np.stack(dense), ids, np.array(times) if time is not None else None)


def _ids_of(batch: Batch) -> Iterator[list[Array]]:
    """Of each sparse feature the ids of each row."""
    for feature in batch.sparse.to_dict().values():
        offsets = feature.offsets().numpy()
        yield np.split(feature.values().numpy().astype(np.int64), offsets[1:-1])


def _seconds(column: pa.ChunkedArray, name: str) -> NDArray[np.float64]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        found = column.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy() / 1e6
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        found = column.to_numpy()
    else:
        raise UserError(
            f"time={name}: holds {kind}, neither times nor numbers of seconds; choose another column"
        )
    seconds: NDArray[np.float64] = found.astype(np.float64)
    return seconds


def made_trace(
    schema: Schema,
    features: Features,
    rows: Rows,
    items: Sequence[str],
    candidates: int,
    pool: int | None = None,
) -> Trace:
    """Requests for each row's user side beside those ``candidates`` that come most often among the rows, or
    so many of the ``pool`` that do, drawn for each request, with a seed of its own, by how often they come;
    ``items``: the features of a candidate; (): each row is asked for as it is. ``features``: of the
    package."""
    dense = [*schema.dense]
    sparse = [feature.name for feature in schema.sparse]
    wrong = next((name for name in items if name not in dense and name not in sparse), None)
    if wrong is not None:
        raise UserError(
            f"items: the model has no feature '{wrong}'; it has {', '.join([*dense, *sparse])}."
            f"{did_you_mean(wrong, [*dense, *sparse])}"
        )
    user = tuple(n for n, name in enumerate(sparse) if name not in items)
    own = tuple(n for n in range(len(sparse)) if n not in user)
    own_dense = [n for n, name in enumerate(dense) if name in items]
    sides = [_side(rows, n, own, own_dense) for n in range(len(rows))]
    places = dict(zip(reversed(sides), range(len(sides) - 1, -1, -1), strict=True))
    often = Counter(sides).most_common(candidates if pool is None else max(pool, candidates)) if items else []
    best = [places[side] for side, _ in often]
    draw = _Drawn([count for _, count in often], candidates)
    of_users = [n for n in range(len(dense)) if n not in own_dense]
    distinct = {_side(rows, n, user, of_users) for n in range(len(rows))}
    every = []
    of_all: list[int] = []
    shared: dict[str, Array] = {}
    for n in range(len(rows)):
        inputs: dict[str, Array] = {}
        for place in user:
            inputs |= _tensors(sparse[place], [rows.ids[place][n]])
        chosen = [best[place] for place in draw()] if items else [n]
        if chosen != of_all:
            of_all, shared = chosen, {}
            for place in own:
                shared |= _tensors(sparse[place], [rows.ids[place][one] for one in chosen])
        inputs |= shared
        if dense:
            inputs["dense"] = rows.dense[n : n + 1]
            if own_dense and items:
                inputs["dense"] = np.repeat(rows.dense[n : n + 1], len(chosen), axis=0)
                inputs["dense"][:, own_dense] = rows.dense[np.ix_(chosen, own_dense)]
        every.append(inputs)
    return Trace(every, [*map(features.asked, every)], rows.times, user, len(distinct))


class _Drawn:
    """Draws ``count`` of the candidates that come so many ``times``, each once; their places, ascending."""

    def __init__(self, times: Sequence[int], count: int) -> None:
        self._count, self._every = count, len(times) <= count
        self._weights = np.log(np.array(times, np.float64))
        self._rng = np.random.default_rng(0)

    def __call__(self) -> list[int]:
        if self._every:
            return list(range(len(self._weights)))
        # The largest of weights with Gumbel's noise are drawn without replacement by the weights.
        noisy = self._weights + self._rng.gumbel(size=len(self._weights))
        return sorted(np.argpartition(-noisy, self._count)[: self._count].tolist())


def _side(rows: Rows, n: int, sparse: Sequence[int], dense: Sequence[int]) -> tuple[bytes, ...]:
    """What makes one side of a row differ from others'."""
    return (*(rows.ids[place][n].tobytes() for place in sparse), rows.dense[n, list(dense)].tobytes())


def _tensors(name: str, bags: Sequence[Array]) -> dict[str, Array]:
    """A feature's inputs, by the names that a request has for them, of a bag for each sample."""
    lengths = [len(bag) for bag in bags]
    ids = np.concatenate(bags)
    if min(lengths) == max(lengths) > 0:
        return {name: ids if lengths[0] == 1 else ids.reshape(len(bags), -1)}
    return {name: ids, f"{name}.lengths": np.array(lengths)}
