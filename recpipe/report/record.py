"""The dataclasses of report.json, schema 1, whose keys are a public interface."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recpipe.access.skew import Skew
from recpipe.model.calibrated import Calibration
from recpipe.model.metrics import LOSS, Quality
from recpipe.plugin.context import Io

SCHEMA = 1
WARM_UP = 10
"""Steps that the steady speed leaves out, at most."""
BINS_PER_DECADE = 40
"""Bins of the step times' histogram for each factor of 10."""


@dataclass
class DataFigures:
    """Samples trained and evaluated, ids looked up while training, and input rows left out as bad."""

    train_samples: int
    eval_samples: int
    lookups: int
    rejected_rows: int = 0
    dropped_samples: int = 0
    """How many training samples ``data.last_batch=drop`` left out of every epoch."""
    unplanned_calls: int = 0
    """How many times the model called a collection in training with ids that are not the batch's own; such
    rows are looked up at once."""
    skipped_samples: int = 0
    """How many of the samples a plugin's skipper left out of their batches."""
    missing: dict[str, int] = field(default_factory=dict)
    """How many samples of the files have no value of each feature, held-out ones included."""
    unseen: dict[str, int] = field(default_factory=dict)
    """How many ids of each feature its vocabulary lacks, held-out samples included."""
    growing: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each table whose ids get rows as they come: rows of ids, room for them, ids that got and that lost
    rows, lookups of the default row, and the bytes of the map (``GrowingTables.figures``)."""
    unknown_ids: int = 0
    """Lookups of the default row by ids without a row, in evaluations."""
    test_samples: int = 0
    """How many samples are kept for the finished model, and are neither trained nor evaluated here."""


@dataclass
class StepMilliseconds:
    """Percentiles of the time of one optimizer step, in milliseconds; NaN without steps."""

    p50: float
    p90: float
    p99: float


@dataclass
class Histogram:
    """``counts`` [n] of steps between neighbouring ``edges_ms`` [n + 1]."""

    edges_ms: list[float]
    counts: list[int]


@dataclass
class Throughput:
    """Training speed, three times. Evaluation is in none of them; NaN where nothing was trained."""

    samples_per_second: float
    """The speed over all steps; a step lasts from the end of the one before."""
    step_ms: StepMilliseconds
    step_histogram: Histogram
    first_step_seconds: float = math.nan
    """Seconds from the process's start to the end of its first trained step; NaN without steps."""
    steady_samples_per_second: float = math.nan
    """The speed without the first tenth of the steps (at most ``WARM_UP``), when caches are cold."""
    end_to_end_samples_per_second: float = math.nan
    """The speed over the time from the process's start until every row is written back to its tier."""
    set_up_seconds: float = math.nan
    """Seconds from the process's start to the start of the first step: imports, data, plugins' preparation,
    tables."""
    evaluation_seconds: float = math.nan
    end_to_end_seconds: float = math.nan
    """The time of ``end_to_end_samples_per_second``."""
    others_cpu_share: float | None = None
    """Share of the machine's processors that other programs took while this one trained; None of several
    ranks, and where the system does not tell."""
    graph_steps: int | None = None
    """Steps whose dense part was trained by a CUDA graph; None without one (``trainer.backend``)."""

    @classmethod
    def of_steps(
        cls,
        samples: Sequence[int],
        seconds: Sequence[float],
        first_step: float = math.nan,
        set_up: float = math.nan,
        evaluation: float = math.nan,
        start_to_end: float = math.nan,
        others: float | None = None,
    ) -> Throughput:
        """``samples`` and ``seconds`` of each step; ``start_to_end``: of everything, evaluation included."""
        warm_up = min(WARM_UP, len(seconds) // 10)
        end_to_end = start_to_end - evaluation
        return cls(
            rate(sum(samples), sum(seconds)),
            step_times(seconds),
            step_histogram(seconds),
            first_step,
            rate(sum(samples[warm_up:]), sum(seconds[warm_up:])),
            rate(sum(samples), end_to_end),
            set_up,
            evaluation,
            end_to_end,
            others,
        )


def rate(samples: int, seconds: float) -> float:
    """Samples per second; NaN if there are none."""
    return samples / seconds if samples and seconds > 0 else math.nan


@dataclass
class Memory:
    """Peak resident set of the process, data's preparation included, and the bytes of the resident and of the
    cold tier."""

    peak_rss_bytes: int
    resident_bytes: int
    cold_bytes: int
    tier_overhead_bytes: int = 0
    """Memory of the tiers beside the resident rows: row maps, the policy's arrays, slab, buffers."""
    tables: Sequence[TableMemory] = ()
    """Each table, in the order of the row numbers."""
    training_peak_rss_bytes: int | None = None
    """The same from the making of the tables on."""
    peak_gpu_bytes: int | None = None
    """The most that tensors took of a GPU at a time; None for a run on a CPU."""


@dataclass
class Point:
    """One point of the learning curve: an evaluation after so many steps and samples of the whole run.

    ``loss`` is the mean training loss and ``samples_per_second`` the speed since the previous point.
    """

    step: int
    samples: int
    loss: float
    samples_per_second: float
    quality: Quality
    """Of the held-out part, its loss among them."""
    seconds: float = math.nan
    """Seconds from the process's start, without evaluations; of a resumed run, those of the parts before, up
    to their checkpoint, are included. NaN if the checkpoint does not have them."""
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Those of the latest step, of the dense part's groups and of tables; empty if none has a schedule."""

    def to_dict(self) -> dict[str, Any]:
        """All in one; the loss of the held-out part is ``eval_loss``."""
        told = asdict(self)
        quality: Quality = told.pop("quality")
        return {**quality, **told, f"eval_{LOSS}": quality.get(LOSS, math.nan)}


@dataclass
class RankFigures:
    """The run's processes, and what rank 0 sent to and received from the others (bytes of payload)."""

    world: int = 1
    trainers: Sequence[int] = (0,)
    holders: Sequence[int] = (0,)
    emulate: Mapping[str, float | None] | None = None
    """The slower network that was emulated, latency_us and gbit_per_s; None: no emulation."""
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    message_seconds: float = 0.0
    collectives: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """TorchRec's collectives by name: calls, bytes and seconds waited. The sums above include them."""


@dataclass
class Resumed:
    """The checkpoint of a resumed run, and figures of the whole run; all other figures are those of this
    part.

    ``samples`` and ``total_samples`` are None if the checkpoint does not have the number of samples.
    """

    checkpoint: str
    step: int
    """Steps before this part."""
    samples: int | None
    steps: int
    """Steps of this part; its samples are ``data.train_samples``."""
    total_steps: int
    """Steps of the whole run."""
    total_samples: int | None


@dataclass
class Series:
    """A run's intervals of equally many steps (the last may be shorter): in each list a value for each.

    ``step``, ``samples`` and ``seconds`` are those of the whole run at an interval's end, as in ``Point``;
    all others are those of the interval. Those of the tiers, of this rank, are empty if all rows are
    resident.
    """

    step: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """How many steps the interval has."""
    samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    samples_per_second: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    """Mean training loss."""
    lookups: list[int] = field(default_factory=list)
    """Ids looked up in tables that are not all resident; empty if the plugin that holds those does not
    tell."""
    hits: list[int] = field(default_factory=list)
    """Lookups whose row was resident before any row moved for the batch."""
    bytes_read: list[int] = field(default_factory=list)
    bytes_written: list[int] = field(default_factory=list)


@dataclass
class Window:
    """A window of progressive validation: training's own predictions of samples, made before it learned from
    them."""

    step: int
    """The step of the whole run that it ends with."""
    samples: int
    """Samples of the whole run until then."""
    scored: int
    """Samples of the window."""
    quality: Quality
    """Of the first label."""
    quality_by_label: Mapping[str, Quality] = field(default_factory=dict)
    """Of each label, if there are several."""


@dataclass
class TableMemory:
    """Where one table's rows are; bytes are those of weights and optimizer state."""

    name: str
    rows: int
    dim: int
    weight_bytes: int
    """All rows' weights, as they are in device memory."""
    state_bytes: int
    """All rows' optimizer state."""
    resident_rows: int | None
    """Rows that were resident when the run ended; None if the plugin that holds them does not tell."""
    resident_bytes: int | None
    cold_bytes: int
    """Bytes in the cold tier, which has a place for every row of a table that is not all resident."""
    sharding: str | None = None
    """How it is cut over ranks, if it is; rows and bytes are then those of all ranks."""


PluginFigures = Mapping[str, object]
"""One plugin's figures by name: a number or string is a row of its table; a list of numbers, or of
[x, y] pairs, is drawn as a curve in report.html."""


@dataclass
class RunReport:
    """The content of report.json. Not-a-number and infinity become null there (strict JSON)."""

    task: str
    recipe: Mapping[str, Any]
    assembly: Mapping[str, Any]
    altered: Sequence[str]
    data: DataFigures
    throughput: Throughput
    quality: Quality
    memory: Memory
    io: Io
    plugins: Mapping[str, PluginFigures]
    environment: Mapping[str, Any]
    history: Sequence[Point] = field(default_factory=list)
    ranks: RankFigures = field(default_factory=RankFigures)
    resumed: Resumed | None = None
    """None: the run began with its first step."""
    series: Series = field(default_factory=Series)
    progressive: Sequence[Window] = ()
    """Of a stream, window by window; of a resumed run those of this part."""
    calibration: Calibration | None = None
    """Of the latest evaluation; None unless the labels are clicks."""
    evaluated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of the latest evaluation, by label: ``Judged.to_dict``."""
    skew: Skew | None = None
    """None if no batch has its ids, and in a profile."""
    quality_by_label: Mapping[str, Quality] = field(default_factory=dict)
    """That of each label, if there are several; ``quality`` is that of the first one, with the sum of their
    losses."""
    objective: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """How each output is learnt: its ``loss`` with the ``arguments``, the ``kind`` of its figures, and its
    ``weight`` in the sum of several, at the end where weights are learnt; null of one that is only judged."""
    altered_in_run: Sequence[str] = ()
    """The invariants of ``altered`` that plugins say they really altered in this run, or do not speak of."""
    model: str = ""
    """The recipe's name of the model, or the class of one of the user's."""
    command: str | None = None
    """The command that started the run; None: it was started from Python."""
    profile: Mapping[str, Any] | None = None
    """A step's time by phases, and the least it could take; only for task=profile."""
    unreported: Mapping[str, str] = field(default_factory=dict)
    """Why figures of a plugin are missing, by its name: its reporter failed."""

    def to_dict(self) -> dict[str, Any]:
        """The report in plain JSON values."""
        history = [point.to_dict() for point in self.history]
        return {"schema": SCHEMA, **as_json({**asdict(self), "history": history})}


def step_times(seconds: Sequence[float]) -> StepMilliseconds:
    """p50, p90 and p99 in milliseconds, interpolated linearly between the nearest steps."""
    if not len(seconds):
        return StepMilliseconds(math.nan, math.nan, math.nan)
    p50, p90, p99 = np.percentile(np.asarray(seconds, dtype=np.float64) * 1e3, (50, 90, 99))
    return StepMilliseconds(float(p50), float(p90), float(p99))


def step_histogram(seconds: Sequence[float]) -> Histogram:
    """Steps by duration in bins of equal width on a log scale, ``BINS_PER_DECADE`` for each factor of 10, so
    that a first step of seconds does not squeeze all others into one bin."""
    if not len(seconds):
        return Histogram([], [])
    milliseconds = np.maximum(np.asarray(seconds, dtype=np.float64) * 1e3, 1e-3)
    ends = np.log10([milliseconds.min(), milliseconds.max()]) * BINS_PER_DECADE
    low, high = math.floor(ends[0]), math.floor(ends[1]) + 1
    edges = 10 ** (np.arange(low, high + 1) / BINS_PER_DECADE)
    places = np.clip(np.searchsorted(edges, milliseconds, side="right") - 1, 0, high - low - 1)
    counts = np.bincount(places, minlength=high - low)
    return Histogram([float(edge) for edge in edges], [int(count) for count in counts])


def as_json(value: Any) -> Any:
    """``value`` in strict JSON values: NaN and infinity become None, arrays and tensors become lists.

    Anything else that JSON does not know becomes a string, so that a plugin's odd figure cannot prevent a
    finished run's report.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    return str(value)


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write strict JSON to ``path`` so that a reader sees the old file or the whole new one."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    return replace_file(path, text)


def replace_file(path: Path, text: str) -> Path:
    """Write ``text`` to ``path`` so that a reader sees the old file or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        return temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()  # on a full disk it would take space from the other files
        raise
