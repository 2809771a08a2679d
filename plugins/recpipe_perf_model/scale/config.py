"""The keys of ``task=scale``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval, MinLen

from recpipe.common.validation import FilePath, Positive, one_of

MOST_GPUS = 16_384
Gpus = Annotated[int, Interval(ge=1, le=MOST_GPUS)]


@dataclass(frozen=True)
class ScaleConfig:
    """``scale`` of conf/task/scale.yaml: a model, a machine and how the model is trained on it."""

    model: FilePath | None = None
    """A shipped model or a yaml file; None: the recipe's own."""
    machine: FilePath = "h100_hgx"
    gpus: Annotated[list[Gpus], MinLen(1)] = field(default_factory=lambda: [8, 16, 32, 64, 128])
    batch_size: Positive | None = None
    """Of all GPUs together."""
    gpu_batch_size: Positive | None = None
    """Of each GPU; at most one of the two."""
    precision: Annotated[str, one_of("fp32", "tf32", "fp16", "bf16")] = "bf16"
    messages: Annotated[str, one_of("fp32", "fp16", "bf16")] = "fp32"
    gradients: Annotated[str, one_of("fp32", "fp16", "bf16")] = "fp32"
    software: Annotated[str, one_of("eager", "graph")] = "eager"
    tiers: Annotated[str, one_of("hbm", "dram", "ssd")] = "hbm"
    """The slowest memory that may have rows."""
    samples: Positive | None = None
    """How many to train; None: those that reach the model's published quality."""
    change: Mapping[str, float] = field(default_factory=dict)
    """Constants of the machine to change."""
