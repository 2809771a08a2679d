"""Which kernel is the faster one, as measured: a plain dict, to be stored and used again bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import torch

Choices = dict[str, dict[str, dict[str, str]]]
"""What was measured: of a kernel's signature, by threads, by samples, the faster of two.

{"linear 512-256": {"2": {"64": "addmm", "2048": "onednn"}}}: keys are strings as JSON has them.
"""
FIRST_SHARES = {"cores 1.0": 1.0, "cores 0.9": 0.9, "cores 0.8": 0.8}
"""What the first core takes of an equal share of a batch, where cores share it."""
ANSWERS = ("addmm", "onednn", "plain", "cpu", "openmp", *FIRST_SHARES)
"""Of a linear layer ``addmm`` or ``onednn``; of a part of a model ``plain`` (as it is) or ``cpu``; of a whole
model ``openmp`` (threads share its operators) or cores (they share its samples)."""


class Chooser:
    """Looks up ``choices``; what was not measured takes torch's own way.

    Of several batch sizes measured, the nearest by ratio counts. Without ``measured_only``, a part of a
    model is converted at every size; with it, where that was measured to be faster.
    """

    def __init__(self, choices: Mapping[str, Mapping[str, Mapping[str, str]]], measured_only: bool) -> None:
        self.choices = choices
        self.measured_only = measured_only
        self._known: dict[tuple[str, int, int], str | None] = {}

    def onednn(self, inputs: int, outputs: int, samples: int) -> bool:
        """Whether a linear layer of these widths goes to oneDNN's own operator at so many samples."""
        return self._faster(linear_signature(inputs, outputs), samples) == "onednn"

    def pays(self, part: str, samples: int) -> bool:
        """Whether to take the back end's way through a part with this signature."""
        return not self.measured_only or self._faster(part, samples) == "cpu"

    def first_share(self, model: str, samples: int) -> float | None:
        """What the first core takes of an equal share of so many samples; None where cores do not pay."""
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
