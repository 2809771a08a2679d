"""What a run measured: the dataclasses behind report.json, schema 1 (its keys are a public interface)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recpipe.model.metrics import Quality

SCHEMA = 1
WARM_UP = 10
"""Steps that the steady speed leaves out, at most."""


@dataclass
class DataFigures:
    """Samples trained and evaluated, ids looked up while training, and input rows left out as bad."""

    train_samples: int
    eval_samples: int
    lookups: int
    rejected_rows: int = 0
    dropped_samples: int = 0
    """Training samples in no epoch, because ``data.last_batch=drop`` left their short batch out."""
    unplanned_calls: int = 0
    """How often the model called a collection with ids that are not the batch's own, in training: those rows
    were looked up there and then."""
    skipped_samples: int = 0
    """Of the samples trained, those that a plugin's skipper left out of their batches."""


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
    """Over all steps, each from the end of the one before."""
    step_ms: StepMilliseconds
    step_histogram: Histogram
    first_step_seconds: float = math.nan
    """From the process's start to the end of its first trained step; NaN without steps."""
    steady_samples_per_second: float = math.nan
    """Without the first tenth of the steps (at most ``WARM_UP``), which find cold caches."""
    end_to_end_samples_per_second: float = math.nan
    """From the process's start until every row is written back to its tier."""
    set_up_seconds: float = math.nan
    """From the process's start to the first step's: imports, data, plugins' preparation, tables."""
    evaluation_seconds: float = math.nan
    end_to_end_seconds: float = math.nan
    """Behind ``end_to_end_samples_per_second``."""
    others_cpu_share: float | None = None
    """Share of the machine's processors that other programs took while this one trained; None of several
    ranks, and where the system does not tell."""

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
            _rate(sum(samples), sum(seconds)),
            step_times(seconds),
            step_histogram(seconds),
            first_step,
            _rate(sum(samples[warm_up:]), sum(seconds[warm_up:])),
            _rate(sum(samples), end_to_end),
            set_up,
            evaluation,
            end_to_end,
            others,
        )


def _rate(samples: int, seconds: float) -> float:
    return samples / seconds if samples and seconds > 0 else math.nan


@dataclass
class Memory:
    """Peak resident set of the process, and the bytes of the resident and of the cold tier."""

    peak_rss_bytes: int
    resident_bytes: int
    cold_bytes: int
    tier_overhead_bytes: int = 0
    """Memory that the tiers need beside the resident rows: row maps, the policy's tables, slab, buffers."""


@dataclass
class Io:
    """Traffic with the cold tier. ``direct``: None for a store that is no file; it is training that waits."""

    store: str | None = None
    direct: bool | None = None
    rows_read: int = 0
    rows_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    wait_seconds: float = 0.0
    rows_staged: int = 0
    """Of ``rows_read``: rows whose block the store still held, so that the device did not read it again."""
    fetch_seconds: float = 0.0
    """The I/O thread's time in fetches; what exceeds ``wait_seconds`` was hidden behind training."""
    write_seconds: float = 0.0
    plan_seconds: float = 0.0
    """The loader thread's time in deciding which rows move."""
    cold_start: bool = False
    """Whether the cache was never full, so that the run shows how it fills and no more."""


@dataclass
class Point:
    """One point of the learning curve: an evaluation after so many steps and samples of the whole run.

    ``loss`` is the mean training loss and ``samples_per_second`` the speed since the point before;
    ``eval_loss`` and the figures besides are the held-out part's, NaN where they do not fit the loss.
    """

    step: int
    samples: int
    auc: float
    logloss: float
    ne: float
    loss: float
    samples_per_second: float
    eval_loss: float = math.nan
    mse: float = math.nan
    rmse: float = math.nan
    mae: float = math.nan
    poisson_deviance: float = math.nan


@dataclass
class RankFigures:
    """The run's processes, and what rank 0 sent to and received from the others (bytes of payload)."""

    world: int = 1
    trainers: Sequence[int] = (0,)
    holders: Sequence[int] = (0,)
    emulate: Mapping[str, float | None] | None = None
    """The slower network that was played, latency_us and gbit_per_s; None: this machine's own."""
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    message_seconds: float = 0.0
    collectives: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """TorchRec's own, by name: calls, bytes and seconds waited; also in the sums above."""


@dataclass
class Resumed:
    """What a resumed run went on from, and the whole run; the other figures are of this part of it.

    ``samples`` and ``total_samples`` are None where the checkpoint does not tell how many it has seen.
    """

    checkpoint: str
    step: int
    """Steps and samples before this part ..."""
    samples: int | None
    steps: int
    """... its own steps (its samples are ``data.train_samples``) ..."""
    total_steps: int
    """... and the sums: those of the whole run."""
    total_samples: int | None


PluginFigures = Mapping[str, object]
"""One plugin's figures by name: a number or string is a row of its table; a list of numbers, or of
[x, y] pairs, is drawn as a curve in report.html."""


@dataclass
class RunReport:
    """All that report.json holds. Not-a-number and infinity become null there (strict JSON)."""

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
    profile: Mapping[str, Any] | None = None
    """Where a step's time goes, and the least it could take; of task=profile alone."""

    def to_dict(self) -> dict[str, Any]:
        """The report as report.json has it: plain JSON values only."""
        return {"schema": SCHEMA, **as_json(asdict(self))}

    def write(self, directory: Path) -> Path:
        """Write ``directory/report.json`` (atomically) and return its path."""
        return write_json(directory / "report.json", self.to_dict())


def step_times(seconds: Sequence[float]) -> StepMilliseconds:
    """p50, p90 and p99 in milliseconds, interpolated linearly between the nearest steps."""
    if not len(seconds):
        return StepMilliseconds(math.nan, math.nan, math.nan)
    p50, p90, p99 = np.percentile(np.asarray(seconds, dtype=np.float64) * 1e3, (50, 90, 99))
    return StepMilliseconds(float(p50), float(p90), float(p99))


def step_histogram(seconds: Sequence[float], bins: int = 40) -> Histogram:
    """Steps by duration in ``bins`` equal bins up to the 99th percentile; the last takes what is longer."""
    if not len(seconds):
        return Histogram([], [])
    milliseconds = np.asarray(seconds, dtype=np.float64) * 1e3
    # A first step that takes seconds (compilation, page faults) would squeeze all others into one bin.
    capped = np.minimum(milliseconds, np.percentile(milliseconds, 99))
    counts, edges = np.histogram(capped, bins=bins)
    return Histogram([float(edge) for edge in edges], [int(count) for count in counts])


def as_json(value: Any) -> Any:
    """``value`` as strict JSON can hold it: NaN and infinity as None, arrays and tensors as lists.

    Anything else that JSON does not know becomes its string: a plugin's odd figure must not cost a
    finished run its report.
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
            temporary.unlink()  # on a full disk it takes what the other files could have
        raise
