"""Model quantizers: make a finished model smaller, ``recpipe quantize CHECKPOINT +plugin=NAME``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recpipe.answers.stored import FloatCheckpoint
    from recpipe.data.dataset import Dataset


@dataclass(frozen=True)
class FinishedModel:
    """A finished model and the data to judge it by."""

    source: FloatCheckpoint
    """The checkpoint: the model's dense part, and its tables block by block."""
    dataset: Dataset
    """The data; its held-out part has not been trained on."""
    batch_size: int
    output: Path
    """The directory for whatever else the quantizer leaves; the report is written there."""
    quantized: Path
    """The directory for the quantized checkpoint (``write_quantized``). It gets its own name, and can be
    packaged, once ``quantize`` has judged it and returned."""


@dataclass(frozen=True)
class ReportSection:
    """A part of report.html: a table, and a plot of curves above it if there are any."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Points (bytes, figure) of each curve."""
    axes: tuple[str, str] = ("", "")
    """Labels for bytes and figure."""


@dataclass(frozen=True)
class Quantized:
    """What a quantizer has done."""

    figures: Mapping[str, Any]
    """The content of report.json: JSON values."""
    lead: str
    """What came out, in a sentence or two."""
    sections: Sequence[ReportSection]
    lines: Sequence[tuple[str, str]]
    """What the terminal shows: a word and its line."""


class ModelQuantizer(ABC):
    """A plugin that also derives from this class works on finished models. It has no part in training: its
    ``contribute`` should refuse with a ``PluginError`` that says so."""

    recpipe_command = "quantize"

    @abstractmethod
    def quantize(self, finished: FinishedModel) -> Quantized:
        """Write the quantized checkpoint to ``finished.quantized``, judge it as it lies there, and return the
        report, which core writes.

        ``UserError`` for what cannot be quantized. After Ctrl-C, ``KeyboardInterrupt`` passes.
        """
