"""Measured choices between kernels, in a plain dict that can be saved and reused exactly."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import torch

Choices = dict[str, dict[str, dict[str, str]]]
"""Measured choices: for a kernel's signature, threads and samples, the faster of two ways.

{"linear 512-256": {"2": {"64": "addmm", "2048": "onednn"}}}: keys are strings, as in JSON.
"""
FIRST_SHARES = {"cores 1.0": 1.0, "cores 0.9": 0.9, "cores 0.8": 0.8}
"""The first core's fraction of an equal share of a batch, if cores share it."""
ANSWERS = ("addmm", "onednn", "plain", "cpu", "openmp", *FIRST_SHARES)
"""For a linear layer, ``addmm`` or ``onednn``; for a part of a model, ``plain`` (unchanged) or ``cpu``; for a
whole model, ``openmp`` (threads share its operators) or a fraction (cores share its samples)."""


class Chooser:
    """Looks up ``choices``; for what was not measured, torch's own way is taken.

    Of several measured batch sizes, the nearest by ratio counts. With ``measured_only``, a part of a model is
    converted only where that was measured to be faster; without it, at every size.
    """

    def __init__(self, choices: Mapping[str, Mapping[str, Mapping[str, str]]], measured_only: bool) -> None:
        self.choices = choices
        self.measured_only = measured_only
        self._known: dict[tuple[str, int, int], str | None] = {}

    def onednn(self, inputs: int, outputs: int, samples: int) -> bool:
        """Whether to use oneDNN's own operator for a linear layer of these widths with so many samples."""
        return self._faster(linear_signature(inputs, outputs), samples) == "onednn"

    def pays(self, part: str, samples: int) -> bool:
        """Whether to use the back end for a part with this signature."""
        return not self.measured_only or self._faster(part, samples) == "cpu"

    def first_share(self, model: str, samples: int) -> float | None:
        """The first core's fraction of an equal share of so many samples; None if cores are not faster."""
        return FIRST_SHARES.get(self._faster(model, samples) or "")

    def _faster(self, signature: str, samples: int) -> str | None:
        key = signature, torch.get_num_threads(), samples
        if key not in self._known:
            self._known[key] = self._nearest(*key)
        return self._known[key]

    def _nearest(self, signature: str, threads: int, samples: int) -> str | None:
        measured = self.choices.get(signature, {}).get(str(threads), {})
        if not measured:
            return None
        return measured[min(measured, key=lambda size: (abs(log(int(size) / samples)), int(size)))]


def linear_signature(inputs: int, outputs: int) -> str:
    """The signature of a linear layer."""
    return f"linear {inputs}-{outputs}"


def chain_signature(sizes: str) -> str:
    """The signature of a chain with these sizes, as ``recpipe.backend.chain.signature`` writes them."""
    return f"chain {sizes}"


def dot_signature(features: int, dim: int) -> str:
    """The signature of TorchRec's ``InteractionArch`` of so many features beside the dense vector."""
    return f"dot {features}x{dim}"


def cross_signature(width: int, rank: int, layers: int) -> str:
    """The signature of TorchRec's ``LowRankCrossNet``."""
    return f"cross {width}-{rank} x{layers}"
