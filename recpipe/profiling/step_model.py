"""What ``task=profile`` asks of a package that knows this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from recpipe.profiling.limits import Limits


@dataclass(frozen=True)
class Recheck:
    """What measuring a machine again has found."""

    words: str
    fresh: bool
    """Whether what is known of the machine is right now."""


class StepModel(Protocol):
    """What the entry point ``recpipe.profiles`` names, or a class of it that takes no arguments."""

    def limits(self, row_bytes: int, device: torch.device) -> Limits | None:
        """The limits for rows of ``row_bytes`` that were measured on this machine before; None: none were."""

    def predict(self, training: Any, steps: int, phases: Mapping[str, Any]) -> dict[str, Any]:
        """What is predicted of the later half of the first ``steps`` steps of ``training`` (a
        ``setup.training.Training``), beside the measured ``phases``: ``step_ms`` and more; or only
        ``reason``, why nothing is."""

    def recheck(self, profile: Mapping[str, Any], disturbed: bool) -> Recheck | None:
        """Measure the machine again if a measured ``profile``, as in report.json, contradicts what is known
        of it; None: it does not, or nothing is known. ``disturbed``: whether other programs slowed the run
        down."""


class NoStepModel:
    """Knows no machine and predicts nothing, where no package does."""

    def limits(self, row_bytes: int, device: torch.device) -> Limits | None:
        """None."""
        return None

    def predict(self, training: Any, steps: int, phases: Mapping[str, Any]) -> dict[str, Any]:
        """The reason why nothing is predicted."""
        return {"reason": "no installed package predicts steps; recpipe's own is the performance model"}

    def recheck(self, profile: Mapping[str, Any], disturbed: bool) -> Recheck | None:
        """None."""
        return None
