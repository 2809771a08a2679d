"""One feature of files: in which column it is, how its values are read, and its table."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Annotated
from zoneinfo import ZoneInfo

from annotated_types import Interval, MinLen
from pydantic import AfterValidator

from recpipe.common.validation import Count, Dimension, Positive, Text, one_of
from recpipe.errors import UserError, shown
from recpipe.plugin.tables import Growth

DYNAMIC = "dynamic"


def _growing(value: str) -> str:
    if value != DYNAMIC:
        raise ValueError(f"is neither a whole number, as 100000 is, nor {DYNAMIC}")
    return value


Capacity = Annotated[int, Interval(ge=4, le=2**31 - 1)]
"""Number of rows of a table that grows, those of missing and unknown ids among them."""
Rows = Annotated[int, Interval(ge=2, le=2**31 - 1)]
"""Number of rows of a table; row 0 is for missing ids."""
NO_VALUE = ("",)
"""Text that is no value, beside null and NaN."""
WEIGHTED = "weighted_multi_hot"
AGES = "ages"
KINDS = ("dense", "vector", "timestamp", AGES, "id", "multi_hot", WEIGHTED, "sequence", "cross")
OF_NUMBERS = ("dense", "vector", "timestamp")
"""Kinds whose ``default`` is a number."""
SCALES = ("none", "log", "log1p", "standard")
SIDES = ("user", "item")
"""Of what a feature is, where one is looked for by the other."""
HEX = "hexadecimal"
IDS = ("hash", "modulo", "rows", "vocabulary")
GROWTH = ("capacity", "admit_after", "admit_by", "admit_probability", "evict", "max_age")
"""What is said beside ``rows: dynamic``."""
OF_IDS = ("ids", "min_count", "rows", "table", "dim", *GROWTH)
OF_KIND = {
    "dense": ("scale", "default", "edges", "buckets", "table", "dim"),
    "vector": ("size", "separator", "scale", "default"),
    "timestamp": ("as", "unit", "format", "zone", "now", "default", "table", "dim"),
    AGES: ("until", "size", "separator", "unit", "format", "zone"),
    "id": (*OF_IDS, "default"),
    "cross": ("of", *OF_IDS),
    "multi_hot": ("separator", "padding", *OF_IDS, "pooling"),
    WEIGHTED: ("separator", "padding", "weights", "weight_separator", *OF_IDS, "pooling"),
    "sequence": ("separator", "padding", "max_length", "keep", "ages", *OF_IDS, "pooling"),
}
"""The keys that a kind has beside those of every feature."""
PARTS = {"age": None, "hour": 25, "weekday": 8}
"""What a time becomes, and the rows of its table: one for missing times, then hours and weekdays, from Monday
on."""
Parts = tuple[Annotated[str, one_of(*PARTS)], ...]
LARGEST = 3.4028235e38
"""About the largest float32."""
UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
"""Microseconds of each unit of numbers that are times."""


@dataclass(frozen=True)
class Feature:
    """One feature, as ``data.features`` describes it.

    - ``column``: where it is; None: in the column of its name.
    - ``type``: what the values of text are, in CSV for example; ``auto``: whole numbers where all of the
      first block are written as these are, else text. ``hexadecimal``: ids of up to 16 digits, as Criteo's.
    - ``missing``: further values that are none, as text. Null, NaN and empty text always are.
    - ``side``: whether it is of the ``user`` (or of the request) or of the ``item``, for models that look for
      items by a user's vector; None: not said.
    - ``dense``: ``scale`` is ``log`` (sign(x) * log1p(\\|x\\|)), ``log1p`` (of x >= 0), ``standard`` (minus
      the mean, by the standard deviation, both of the training part) or ``none``; ``default`` stands for
      missing values, after scaling. With ``edges`` e1 < e2 ..., or ``buckets``, the number of quantiles of
      the training part, it becomes an id: row 1 below e1, 2 from e1 on and so forth, 0 for missing.
    - ids: ``hash`` (1 + hash % (rows - 1), missing row 0), ``modulo`` (id % rows), ``rows``: they are the
      rows of the table; or ``vocabulary``: each id that comes ``min_count`` times in the training part has a
      row of its own from 2 on, and row 1 is for all others. Features with the same ``table`` share it; its
      name is the feature's otherwise.
    - ``vector``: a list of ``size`` numbers (or text of them with a ``separator``), which become as many
      dense inputs, ``name_0`` and so forth.
    - ``timestamp``: ``as`` is which of ``name_age``, ``name_hour`` and ``name_weekday`` it becomes. Times
      without a zone are in ``zone``, as are hours and weekdays; numbers are times since 1970 in ``unit``,
      also written as text; other text is in ``format``, as Python's strptime has it, or ``iso``. The age is
      sign(d) * log1p(\\|d\\|) of the days d until ``now``; None: until the latest time of the training part.
    - ``ages``: a list of times, as of a timestamp, of which the ``size`` latest, at its end, become as many
      dense inputs: the seconds from each until the time in the column ``until``, and -1 where there is none.
      A sequence names the feature of this kind whose times are those of its events, ``ages``.
    - ``cross``: the id of the ids of two or more features together, missing if one is.
    - ``default`` of an ``id``: the id that stands for a missing one.
    - ``rows: dynamic``: ids get rows of a table of ``capacity`` rows as they come, each a row of its own
      (``recpipe.plugin.tables.Growth`` says what the keys beside it mean).
    - ``dim``: of the table's rows; None: that of the model.
    - ``multi_hot`` and ``sequence``: lists, or text with a ``separator``. Values of ``padding`` only fill
      lists up and are left out. A sequence has at most ``max_length`` ids, its ``last`` or ``first``. Their
      rows are added up, or averaged, by ``pooling``, where the model has one vector for them.
    - ``weighted_multi_hot``: likewise, and each id has a weight, by which its row is multiplied: a number in
      the list that the column ``weights`` has, or after the ``weight_separator`` in the text of each id. A
      mean is then sum(weight * row) / sum(weight), of weights from 0 on.
    """

    name: Text
    kind: Annotated[str, one_of(*KINDS)] = "id"
    column: Text | None = None
    type: Annotated[str, one_of("auto", "integer", "text", HEX)] = "auto"
    missing: tuple[Text, ...] = ()
    side: Annotated[str, one_of(*SIDES)] | None = None
    scale: Annotated[str, one_of(*SCALES)] = "none"
    default: float | Text | None = None
    size: Annotated[int, Interval(ge=1, le=2**16)] | None = None
    parts: Parts = ()
    unit: Annotated[str, one_of(*UNITS)] | None = None
    format: Text | None = None
    zone: Text = "UTC"
    now: Text | None = None
    until: Text | None = None
    ages: Text | None = None
    of: tuple[Text, ...] = ()
    edges: tuple[float, ...] = ()
    buckets: Annotated[int, Interval(ge=2, le=2**16)] | None = None
    ids: Annotated[str, one_of(*IDS)] = "hash"
    min_count: Positive = 1
    rows: Rows | Annotated[str, AfterValidator(_growing)] | None = None
    table: Text | None = None
    dim: Dimension | None = None
    weights: Text | None = None
    weight_separator: Annotated[str, MinLen(1)] | None = None
    capacity: Capacity | None = None
    admit_after: Positive = 1
    admit_by: Annotated[str, one_of("exact", "sketch")] = "exact"
    admit_probability: Annotated[float, Interval(gt=0, le=1)] = 1.0
    evict: Text = "lru"
    max_age: Count = 0
    pooling: Annotated[str, one_of("sum", "mean")] = "sum"
    separator: Annotated[str, MinLen(1)] | None = None
    padding: tuple[Text, ...] = ()
    max_length: Positive | None = None
    keep: Annotated[str, one_of("first", "last")] = "last"

    def __post_init__(self) -> None:
        own = {"name", "kind", "column", "type", "missing", "side", *OF_KIND[self.kind]}
        for key in fields(self):
            word = "as" if key.name == "parts" else key.name
            if word not in own and getattr(self, key.name) != key.default:
                raise UserError(
                    f"data.features, {shown(self.name)}: a feature of kind {self.kind} has no '{word}'; "
                    f"it has {', '.join(OF_KIND[self.kind])}"
                )
        self._require_sense()

    def _require_sense(self) -> None:
        """``UserError`` for keys that do not go together."""
        unused = {
            "min_count": self.min_count > 1 and self.ids != "vocabulary" and "is of ids: vocabulary",
            "edges": list(self.edges) != sorted(set(self.edges)) and "are not each above the one before",
            "buckets": self.edges and self.buckets and "are edges as well; state one of them",
            "scale": self.in_buckets and self.scale != "none" and "is of numbers, not of buckets",
            "default": self._wrong_default,
            "table": self.is_number and self.table and "is of ids, not of numbers",
            "ids": self.kind == "cross"
            and self.ids in ("modulo", "rows")
            and "of a cross are hash or vocabulary",
            "keep": self.ages and self.keep == "first" and "is the last ids, where their ages are known",
            "of": self.kind == "cross" and len(self.of) < 2 and "names less than two features",
            "column": self.kind == "cross"
            and self.column is not None
            and "is of one feature, not of a cross",
            "dim": self.is_number and self.dim and "is of a table of ids, not of numbers",
            "weights": self.kind == WEIGHTED
            and bool(self.weights) == bool(self.weight_separator)
            and "(a column of lists) or weight_separator (':', in the text of an id) says what an id weighs: "
            "state one of them",
            "size": self.kind == AGES
            and self.size is None
            and "of ages is how many of the latest times are taken: state it, size: 20",
            "until": self.kind == AGES
            and self.until is None
            and "of ages is the column with the sample's own time: state it, until: time",
            "now": self._wrong_now,
            "zone": self._wrong_zone,
        }
        for key, fault in unused.items():
            if fault:
                raise UserError(f"data.features, {shown(self.name)}: {key} {fault}")
        if fault := self._growth_fault():
            raise UserError(f"data.features, {shown(self.name)}: {fault}")

    def _growth_fault(self) -> str:
        """What is wrong about ``rows: dynamic``, or about the keys beside it; empty if nothing is."""
        defaults = {key.name: key.default for key in fields(self) if key.name in GROWTH}
        said = next((name for name, usual in defaults.items() if getattr(self, name) != usual), "")
        if self.rows != DYNAMIC:
            return f"'{said}' is of tables whose ids get rows as they come: add rows: dynamic" * bool(said)
        if self.capacity is None:
            return "rows: dynamic needs the most rows that the table may have: capacity: 1000000"
        if self.ids != "hash":
            return f"ids: {self.ids} makes rows of ids, and rows: dynamic gives each its own: leave ids out"
        if (self.evict == "age") != (self.max_age > 0):
            return "evict: age and max_age (batches) belong together: state both, or neither"
        if self.admit_by == "sketch" and not 1 < self.admit_after < 256:
            return "admit_by: sketch counts up to 255 sightings: state admit_after from 2 to 255"
        return ""

    @property
    def growth(self) -> Growth | None:
        """How its ids get rows; None if they are rows, or become them by their hash."""
        if self.rows != DYNAMIC:
            return None
        told = (self.admit_after, self.admit_by, self.admit_probability, self.evict, self.max_age)
        return Growth(self.table_name, *told)

    @property
    def source(self) -> str:
        """The name of its column."""
        return self.name if self.column is None else self.column

    @property
    def table_name(self) -> str:
        """The name of the table of its ids."""
        return self.table or self.name

    @property
    def _wrong_default(self) -> str | None:
        if self.default is None:
            return None
        if self.in_buckets or self.parts in (("hour",), ("weekday",)):
            return "is of numbers and ids; a missing value has a row of its own here"
        if not self.is_number:
            return None
        if isinstance(self.default, str):
            return "is text, and numbers have none"
        return "is beyond float32" if abs(self.default) > LARGEST else None

    @property
    def _wrong_now(self) -> str | None:
        try:
            _ = self.now and datetime.fromisoformat(self.now)
        except ValueError:
            return f"is {shown(self.now)}, not a time as in 2026-03-01 or 2026-03-01T12:00:00+01:00"
        return None

    @property
    def _wrong_zone(self) -> str | None:
        try:
            ZoneInfo(self.zone)
        except (OSError, ValueError, KeyError):
            return f"is {shown(self.zone)}, which is no zone, as Europe/Berlin is"
        return None

    @property
    def number(self) -> float:
        """What stands for a missing number."""
        return float(self.default or 0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its dense inputs."""
        return (self.name,) if self.size is None else tuple(f"{self.name}_{n}" for n in range(self.size))

    @property
    def in_buckets(self) -> bool:
        """Whether it is a number that becomes the id of a bucket."""
        return bool(self.edges) or self.buckets is not None

    @property
    def is_number(self) -> bool:
        """Whether the model sees it among its dense inputs."""
        return (
            self.kind in ("vector", AGES)
            or (self.kind == "dense" and not self.in_buckets)
            or (self.kind == "timestamp" and self.parts == ("age",))
        )

    @property
    def is_exact(self) -> bool:
        """Whether it is kept as float64 until what it needs is learned."""
        return self.scale == "standard" or (self.kind == "timestamp" and self.is_number)

    @property
    def own_rows(self) -> int | None:
        """The rows of its table where its own keys say them."""
        if self.kind == "timestamp" and self.parts:
            return PARTS[self.parts[0]]
        return (self.buckets or len(self.edges) + 1) + 1 if self.in_buckets else self.capacity

    @property
    def is_bag(self) -> bool:
        """Whether a sample has any number of its ids."""
        return self.kind in ("multi_hot", "sequence", WEIGHTED)
