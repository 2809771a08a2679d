"""Specifications of embedding tables: rows, dimension, optimizer and first values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt, Interval
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, DataType, EmbeddingBagConfig

from recpipe.common.validation import one_of
from recpipe.errors import UserError, shown
from recpipe.plugin.averaging import Averaging, Clock
from recpipe.plugin.calls import Owned
from recpipe.plugin.first_values import Drawn, Uniform
from recpipe.plugin.quantizer import WORD, Coding, RowCodec
from recpipe.plugin.schedule import Rate, Schedule
from recpipe.plugin.store import Records, StoreLayout

FILL_ROWS = 65_536
"""Rows per seed of the first values, so that any chunking of a table yields the same rows."""
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
"""Those that FBGEMM fuses into the backward pass of a lookup, unless they have momentum or weight decay, or
clip rows."""
_DECAY = ("weight_decay", "weight_decay_mode")
_MOMENTS = ("beta1", "beta2", *_DECAY)
KNOBS = {
    "sgd": ("stochastic_rounding", "momentum", *_DECAY),
    "adagrad": ("stochastic_rounding", *_DECAY),
    "rowwise_adagrad": ("stochastic_rounding", *_DECAY),
    "adam": _MOMENTS,
    "partial_rowwise_adam": _MOMENTS,
    "lamb": _MOMENTS,
    "partial_rowwise_lamb": _MOMENTS,
    "ftrl": ("l1", "l2", "beta"),
}
"""What each optimizer of tables takes beside ``lr``, ``eps``, ``schedule`` and ``clip_row_norm``."""
DECAYS = ("l2", "decouple")
"""How weights decay (FBGEMM's names): as a part of the gradient, or apart from it."""


EVICTIONS = ("lru", "lfu", "age", "none")
"""Which row goes for a new id when none is free: of the id seen longest ago, of the one seen least often, of
one not seen for some batches, or none."""


@dataclass(frozen=True)
class Growth:
    """How the ids of a table get rows while it is trained (``recpipe.tables.dynamic``).

    Row 0 is that of missing values, row 1 that of ids without a row. An id gets one in the batch in which it
    was seen ``admit_after`` times altogether, with ``admit_probability`` in each batch from then on.
    """

    table: str
    """Features with the same one share their ids' rows."""
    admit_after: int = 1
    admit_by: str = "exact"
    """How sightings are counted: ``exact`` or ``sketch``."""
    admit_probability: float = 1.0
    evict: str = "lru"
    """One of ``EVICTIONS``, or a policy of another package (``recpipe.tables.dynamic.policies``)."""
    max_age: int = 0
    """For ``age``: the rows of ids not seen for more batches than this may go."""


@dataclass(frozen=True)
class SparseFeature:
    """One categorical feature and the number of rows of its embedding table (ids are in [0, rows)).

    ``growth``: its ids are keys of any 64 bits instead, which get rows as they come.
    """

    name: str
    rows: int
    growth: Growth | None = None
    table: str | None = None
    """The table that it shares with others; None: one of its own name."""
    pooling: Annotated[str, one_of("sum", "mean")] = "sum"
    """What the rows of a sample's ids are put together by, the same for all features of a table."""
    dim: int | None = None
    """The dimension of its table's rows; None: the model's."""
    weighted: bool = False
    """Whether each of its ids has a weight, by which its row is multiplied. Then all ids of a batch have one,
    1 where nothing else is said, and those of ``mean`` features already add up to 1."""
    sequence: int | None = None
    """The most ids of a sample, whose order is that of events, the latest last; 0: any number; None: it is no
    sequence."""
    ages: str | None = None
    """The dense inputs that say how many seconds before the sample each of its latest events was: ``ages_0``
    and so forth, the latest last, -1 before the first event; None: it is not known."""


Share = Annotated[float, Interval(ge=0, lt=1)]
AtLeast0 = Annotated[float, Ge(0)]


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer of tables, which updates the rows of a batch in the backward pass of their lookup.

    Rows that a batch does not look up stay as they are, their state among them; weight decay and bias
    correction count a row's own updates (``recpipe.tables.updating``).
    """

    name: Annotated[str, one_of(*KNOBS)]
    lr: AtLeast0
    """The learning rate; 0: the tables are frozen."""
    eps: Annotated[float, Gt(0)] = 1e-8
    stochastic_rounding: bool = False
    """Whether a GPU's update rounds weights of 16 bits up or down at random; False: to the nearest value."""
    momentum: Share = 0.0
    """Of ``sgd``, as in ``torch.optim.SGD``."""
    beta1: Share = 0.9
    beta2: Share = 0.999
    weight_decay: AtLeast0 = 0.0
    weight_decay_mode: Annotated[str, one_of(*DECAYS)] = "l2"
    """``l2``: the decay times the weights is added to the gradient (``torch.optim.Adam``); ``decouple``:
    weights are multiplied by 1 - lr * decay (``AdamW``), of LAMB a part of the step that its trust ratio
    scales."""
    l1: AtLeast0 = 0.0
    """Of ``ftrl``, as l2 and beta: see McMahan et al., "Ad Click Prediction: a View from the Trenches"."""
    l2: AtLeast0 = 0.0
    beta: AtLeast0 = 1.0
    schedule: Schedule | None = None
    """How ``lr`` changes with the steps; None: it does not."""
    clip_row_norm: Annotated[float, Gt(0)] | None = None
    """The limit of the norm of a row's gradient, summed over the batch; None: there is none."""
    average: Averaging | None = None
    """What the rows are averaged by, as ``trainer.ema`` and ``trainer.swa`` say for the whole model."""

    def __post_init__(self) -> None:
        """``UserError`` for a value that this optimizer does not take."""
        takes = ("lr", "eps", *KNOBS.get(self.name, ()), "schedule", "clip_row_norm")
        for each in fields(self)[1:]:
            if each.name not in (*takes, "average") and getattr(self, each.name) != each.default:
                raise UserError(
                    f"the tables' optimizer {shown(self.name)} takes no {each.name}, but {', '.join(takes)}"
                )
        if self.stochastic_rounding and not self.fused:
            raise UserError(
                f"the tables' optimizer {self.name} with momentum, weight_decay, clip_row_norm, trainer.ema "
                "or trainer.swa rounds to the nearest value: set stochastic_rounding to false"
            )

    @cached_property
    def frozen(self) -> bool:
        """Whether the tables are looked up and never change: no backward pass reaches them, they have no
        optimizer state, and their rows are not written back."""
        return self.lr == 0

    @cached_property
    def rate(self) -> Rate:
        """The rate in force, which the updates of all tables with this very object take."""
        return Rate(self.lr)

    @cached_property
    def clock(self) -> Clock:
        """The averaging points that the run has come to; without ``average``, none pass."""
        return Clock()

    @cached_property
    def fused(self) -> bool:
        """Whether FBGEMM makes its steps; otherwise recpipe does (``recpipe.tables.updating``)."""
        own = self.momentum or self.weight_decay or self.clip_row_norm or self.average
        return self.frozen or (self.name in OPTIMIZERS and not own)

    @property
    def kind(self) -> EmbOptimType:
        """FBGEMM's name of this optimizer, if it is fused; of frozen tables, one without state."""
        return OPTIMIZERS["sgd" if self.frozen else self.name]

    @property
    def knobs(self) -> dict[str, float]:
        """The arguments of the same optimizer in ``torch.optim`` and ``torchrec.optim``, if it is fused."""
        return {"lr": self.lr} if self.name == "sgd" else {"lr": self.lr, "eps": self.eps}

    @property
    def state_by_column(self) -> bool:
        """Whether each weight has its own state, in the same columns, or none: that of a part of a row's
        columns is then a part of the row's."""
        return self.frozen or (self.name in ("sgd", "adagrad") and self.average is None)

    def state_width(self, dim: int) -> int:
        """float32 values of state per row: the optimizer's, and behind it the average's, D + 1."""
        if self.frozen:
            return 0
        return self.own_width(dim) + (0 if self.average is None else dim + 1)

    def own_width(self, dim: int) -> int:
        """float32 values of the optimizer's own state; ``recpipe.tables.updating`` says which."""
        if self.name == "sgd":
            return dim if self.momentum else 0
        widths = {"rowwise_adagrad": 1, "adagrad": dim, "ftrl": 2 * dim}
        rowwise = self.name.startswith("partial_rowwise")
        return widths.get(self.name, dim + 2 if rowwise else 2 * dim + 1)


FROZEN = TableOptimizer("sgd", 0.0)
"""Of all frozen tables, so that those of one collection and dimension are one group."""


FirstValues = Callable[[int, int], NDArray[np.float32]]
"""Returns the first weights of rows [start, stop) of a table, float32 [stop - start, D]."""
Values = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Weights float32 [rows, columns] and optimizer state float32 [rows, S] of some rows."""
SavedRows = Callable[[int, int], Values]
"""Returns rows [start, stop) of a table as they were saved."""


@dataclass(frozen=True)
class Table:
    """A table that one or several features look up; ids are in [0, rows)."""

    name: str
    rows: int
    features: tuple[str, ...]
    first: FirstValues | Drawn | None = None
    """Gives its first weights, or what they are drawn from, block by block; None: uniform in
    +-sqrt(1 / rows), as in DLRM and in TorchRec's collections."""
    saved: SavedRows | None = None
    """Gives the rows that it starts with instead, those of a checkpoint; first weights are then never
    made."""
    first_free: int | None = None
    """Rows from this one on are nobody's at first and hold zeros: they are begun when an id gets them
    (``recpipe.tables.dynamic``). None: all rows begin with first weights."""

    @property
    def drawn_from(self) -> Drawn | None:
        """What its first weights are drawn from; None: they are given."""
        if self.first is None:
            return Uniform.usual(self.rows)
        return self.first if isinstance(self.first, Drawn) else None


@dataclass(eq=False)
class Kernel:
    """What looks up and updates the rows of a group's tables on a CPU, where there are loops of recpipe's own
    beside FBGEMM's kernels."""

    faster: Callable[[], bool] | None = None
    """Whether loops are faster; None: FBGEMM does all."""

    @property
    def by_loops(self) -> bool:
        """Whether loops look up ids, and update their rows."""
        return self.faster is not None and self.faster()


@dataclass(frozen=True)
class TableSet:
    """A group of tables: they share ``dim`` and the optimizer, so that a record has one width.

    Features come table by table, as in TorchRec's collections.
    """

    tables: tuple[Table, ...]
    dim: int
    optimizer: TableOptimizer
    seed: int
    pooled: bool = True
    """Whether rows are summed by bag (``EmbeddingBagCollection``) or handed out one for each id."""
    weighted: bool = False
    """Whether ids have weights, by which rows are multiplied before they are summed."""
    numbers: tuple[int, ...] = ()
    """Each table's number among all tables of the model, which makes first values differ between tables;
    empty: 0, 1, ..."""
    storage: DataType = DataType.FP32
    """The type of weights in device memory; optimizer state is float32."""
    codec: Owned[RowCodec] | None = None
    """The codec of records in the cold tier; None: float32."""

    @classmethod
    def one_each(
        cls, features: Sequence[SparseFeature], dim: int, optimizer: TableOptimizer, seed: int
    ) -> TableSet:
        """A table for each feature, with the feature's name."""
        return cls(tuple(Table(f.name, f.rows, (f.name,)) for f in features), dim, optimizer, seed)

    def part(self, names: Collection[str]) -> TableSet:
        """The tables of these ``names``, in their order here."""
        numbers = self.numbers or tuple(range(len(self.tables)))
        chosen = [index for index, table in enumerate(self.tables) if table.name in names]
        return replace(
            self,
            tables=tuple(self.tables[index] for index in chosen),
            numbers=tuple(numbers[index] for index in chosen),
        )

    @cached_property
    def kernel(self) -> Kernel:
        """What looks these tables up, wherever their rows are."""
        return Kernel()

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Names of the features, table by table."""
        return tuple(name for table in self.tables for name in table.features)

    @cached_property
    def table_of(self) -> NDArray[np.int64]:
        """Number of each feature's table, int64 [F]."""
        return np.repeat(np.arange(len(self.tables)), [len(table.features) for table in self.tables])

    @cached_property
    def rows_of_features(self) -> NDArray[np.uint64]:
        """The number of rows of each feature's table, uint64 [F]."""
        return np.array([table.rows for table in self.tables], np.uint64)[self.table_of]

    @cached_property
    def layout(self) -> StoreLayout:
        """Row numbers of the set and the record's width (weights, then optimizer state)."""
        width = self.dim + self.optimizer.state_width(self.dim)
        return StoreLayout(tuple(t.name for t in self.tables), tuple(t.rows for t in self.tables), width)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one row's weights and optimizer state in device memory."""
        return self.bytes_of_weights(self.dim) + WORD * (self.layout.width - self.dim)

    def bytes_of_weights(self, columns: int) -> int:
        """Bytes of so many weights of a row."""
        bits: int = DATA_TYPE_NUM_BITS[self.storage]
        return bits * columns // 8

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of all tables in device memory, optimizer state included."""
        return self.layout.total_rows * self.record_bytes

    @property
    def cold_record_bytes(self) -> int:
        """Bytes of one row's record in the cold tier."""
        return WORD * (self.layout.width if self.codec is None else Coding(self.codec).width)

    @property
    def cold_bytes(self) -> int:
        """Bytes of all rows' records in the cold tier, without a store's overhead."""
        return self.layout.total_rows * self.cold_record_bytes

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Per table: rows, dimension, width of the optimizer state."""
        return {t.name: (t.rows, self.dim, self.layout.width - self.dim) for t in self.tables}

    def configs(self) -> list[EmbeddingBagConfig]:
        """TorchRec's description of the tables."""
        return [
            EmbeddingBagConfig(
                name=t.name,
                embedding_dim=self.dim,
                num_embeddings=t.rows,
                feature_names=list(t.features),
                data_type=self.storage,
            )
            for t in self.tables
        ]

    def fill(self, table: str, start: int, stop: int) -> Records:
        """First records of rows [start, stop), float32 [stop - start, width]: first weights, and zero state,
        or what was saved of them.

        The values depend on (seed, table, row) alone, not on the calls.
        """
        index = self.layout.tables.index(table)
        own = self.tables[index]
        if own.saved is not None:
            return np.concatenate(own.saved(start, stop), axis=1)
        out, free = np.zeros((stop - start, self.layout.width), np.float32), own.first_free
        first, end = own.first if callable(own.first) else partial(self._drawn, index), stop
        if free is not None:
            end = max(start, min(stop, free))
        if start < end:
            out[: end - start, : self.dim] = first(start, end)
        return out

    def _drawn(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of the table with that index, drawn in chunks with a seed each."""
        all_rows, drawn_from = self.tables[index].rows, self.tables[index].drawn_from
        assert drawn_from is not None, "the table's first weights are given"
        number = (self.numbers or range(len(self.tables)))[index]
        out = np.empty((stop - start, self.dim), np.float32)
        for chunk in range(start // FILL_ROWS, -(-stop // FILL_ROWS)):
            first = chunk * FILL_ROWS
            rows = min(FILL_ROWS, all_rows - first)
            rng = np.random.Generator(np.random.Philox(key=[self.seed, (number << 40) + chunk]))
            values = drawn_from.draw(rng, rows, self.dim)
            lo, hi = max(start, first), min(stop, first + rows)
            out[lo - start : hi - start] = values[lo - first : hi - first]
        return out


def weight_name(table: str) -> str:
    """The name of a table's weights among saved tensors."""
    return f"{table}.weight"


def state_name(table: str) -> str:
    """The name of a table's optimizer state among saved tensors."""
    return f"{table}.state"


@dataclass(frozen=True)
class Region:
    """Rows [start, stop) and columns [left, right) of one table: the unit of saving and loading."""

    table: str
    start: int
    stop: int
    left: int
    right: int


def row_chunks(tables: TableSet) -> list[Region]:
    """All rows of all tables, in regions small enough to copy."""
    return [
        Region(table.name, start, min(start + FILL_ROWS, table.rows), 0, tables.dim)
        for table in tables.tables
        for start in range(0, table.rows, FILL_ROWS)
    ]


def rows_in(regions: Iterable[Region]) -> int:
    """How many rows ``regions`` have."""
    return sum(region.stop - region.start for region in regions)


def to_numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    """The tensor as a float32 array in host memory, without a copy if it is already there."""
    array: NDArray[np.float32] = tensor.detach().to("cpu", torch.float32).numpy()
    return array
