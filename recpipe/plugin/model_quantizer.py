"""Model quantizers: make a finished model smaller, ``recpipe quantize CHECKPOINT +plugin=NAME``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recpipe.data.dataset import Dataset
    from recpipe.inference.source import FloatCheckpoint


@dataclass(frozen=True)
class FinishedModel:
    """A finished model and the data to judge it by."""

    source: FloatCheckpoint
    """The checkpoint: the model's dense part, and its tables block by block."""
    dataset: Dataset
    """The data; its held-out part has not been trained on."""
    batch_size: int
    output: Path
    """The directory for the report and whatever else the quantizer leaves."""
    quantized: Path
    """The directory for the quantized checkpoint (``recpipe.kit.write_quantized``)."""


class ModelQuantizer(ABC):
    """A plugin that also derives from this class works on finished models. It has no part in training: its
    ``contribute`` should refuse with a ``PluginError`` that says so."""

    @abstractmethod
    def quantize(self, finished: FinishedModel) -> Mapping[str, Any]:
        """Write a quantized checkpoint and a report.json; return the report's content, JSON values.

        ``UserError`` for what cannot be quantized. After Ctrl-C, ``KeyboardInterrupt`` passes.
        """
