"""The machine's limits: matrix products at their best, streaming, and random rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recpipe.profiling.limits import Sample, measured

ROW_BYTES = (16, 64, 256, 1024)
"""Sizes of the rows that are gathered."""


def measure(quick: bool) -> Iterator[Sample]:
    """The samples of ``measured`` on the CPU, for rows of each of ``ROW_BYTES``."""
    yield from measured(ROW_BYTES[1:3] if quick else ROW_BYTES, torch.device("cpu"))
