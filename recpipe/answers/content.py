"""What is read of a package's manifest.json, by type, for the validation that recipes go through."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval
from pydantic import with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from recpipe.answers.score import TYPES
from recpipe.common.validation import STRICT, Count, Positive, one_of
from recpipe.model.metrics import Kind

Tolerance = Annotated[float, Interval(ge=0)]


class _Dense(TypedDict):
    names: list[str]
    transform: dict[str, Any]


class _Feature(TypedDict):
    name: str
    rows: Positive
    ids: dict[str, Any]


class _Lookup(TypedDict):
    pooling: Literal["sum", "mean", "none"]
    parts: list[tuple[str, str]]


class _Table(TypedDict):
    rows: Positive
    dimension: Positive
    type: Annotated[str, one_of(*TYPES)]
    file: str


class _Output(TypedDict):
    name: str
    kind: Kind


class _Compiled(TypedDict):
    machine: str
    instruction_set: str
    cpu_flags: list[str]


_Program = TypedDict(
    "_Program",
    {"file": str, "constants": str | None, "from": Count, "golden": str, "tolerance": Tolerance},
)


class _GoldenProgram(TypedDict):
    file: str
    golden: str
    tolerance: Tolerance
    low: bool


class _Golden(TypedDict):
    programs: list[_GoldenProgram]


class _Layer(TypedDict):
    type: str
    most: int


class _Sequences(TypedDict):
    single: list[str]
    aligned: list[list[str]]


class _Popularity(TypedDict):
    file: str
    samples: Count


class _Figure(TypedDict):
    value: float | None
    low: float | None
    high: float | None


class _Means(TypedDict):
    prediction: float | None
    label: float | None


class _TaskFigures(TypedDict):
    kind: Kind
    edges: list[float]
    counts: list[float]
    lowest: float | None
    highest: float | None
    mean: _Means
    saturated: float | None
    figures: dict[str, _Figure]


class _FeatureFigures(TypedDict):
    ids_per_sample: float
    row_0: float | None


class _Reference(TypedDict):
    samples: Positive
    tasks: dict[str, _TaskFigures]
    features: dict[str, _FeatureFigures]


@with_config({**STRICT, "extra": "ignore"})
class Content(TypedDict):
    """What is read of manifest.json, with its types; other keys are for people."""

    format: Literal["recpipe package"]
    schema: Literal[2]
    step: Count
    versions: dict[str, str]
    dense: _Dense
    sparse: list[_Feature]
    lookups: list[_Lookup]
    tables: dict[str, _Table]
    layers: dict[str, _Layer]
    outputs: list[_Output]
    compiled: _Compiled
    programs: list[_Program]
    golden: _Golden
    files: dict[str, str]
    sequences: NotRequired[_Sequences]
    reference: NotRequired[_Reference | None]
    popularity: NotRequired[_Popularity]
