"""The knobs of a run, and the sums that its figures come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """The plugin's knobs, with shares converted to batches; see its yaml."""

    drop: float
    window: int
    start: int
    sampled_batches: int
    epoch_batches: int
    stale_lookups: int | None
    min_touches: int
    snapshot_every: int | None
    search: str
    control: str | None
    step: int
    """A batch keeps a multiple of so many inputs."""
    tries: bool
    """Whether to stop where nothing is to be had."""


@dataclass
class Totals:
    """Sums over the batches trained so far, also before a resume; seconds are host time."""

    samples: int = 0
    hot: int = 0
    dropped: int = 0
    marked_hot: int = 0
    """How many hot inputs the marks in force have classified."""
    marked_dropped: int = 0
    """How many of them were left out."""
    classified: int = 0
    """How many inputs were classified, hot ones or not."""
    marked_batches: int = 0
    """How many batches were trained under marks."""
    offered_share: float = 0.0
    """Share of hot inputs among those sampled last."""
    refused: str = ""
    """Why nothing was marked: too few inputs are ``hot``, or too few of these are ``stale``."""
    snapshots: int = 0
    threshold: float = 0.0
    sampled_inputs: int = 0
    sampled_share: float = 0.0
    snapshot_seconds: float = 0.0
    search_seconds: float = 0.0
    classify_seconds: float = 0.0
    freeze_seconds: float = 0.0
