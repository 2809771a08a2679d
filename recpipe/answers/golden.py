"""The golden batch of a package: made-up inputs whose scores show whether a machine computes as it should."""

from __future__ import annotations

from pathlib import Path

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.answers.counts import Alike
from recpipe.common.tensors import save_tensors
from recpipe.data.schema import Schema
from recpipe.plugin.batch import Batch

GOLDEN = "golden.safetensors"
INPUTS = ("dense", "ids", "lengths")
"""What there is beside scores."""
SAMPLES = 64
_ONE_HOT = 48
"""So many samples have one id for each feature; the others have 0 to 3."""
TOLERANCE = {"float32": 1e-4, "tf32": 1e-4, "bfloat16": 5e-2}
"""Largest difference of a score on another machine, by ``model.precision``: relative to the largest score if
that is above 1. A package is scored on CPUs, where tf32 is float32."""
LOW_PRECISION = "bfloat16"
"""The key for layers in low precision: an input that is rounded to another code is a step of 8 bits away."""


def golden_inputs(schema: Schema, alike: Alike | None = None) -> dict[str, torch.Tensor]:
    """``dense`` float32 [64, D], ``ids`` int64 and ``lengths`` int64 [F * 64], by feature and then by sample.

    The first two samples have the first and the last row of every table. ``alike``: the numbers of ids that
    the model needs.
    """
    generator = torch.Generator().manual_seed(0)
    features = len(schema.sparse)
    lengths = torch.ones(features, SAMPLES, dtype=torch.int64)
    lengths[:, _ONE_HOT:] = torch.randint(0, 4, (features, SAMPLES - _ONE_HOT), generator=generator)
    names, alike = [feature.name for feature in schema.sparse], alike or Alike()
    for name in alike.single:
        lengths[names.index(name)] = 1
    for first, *others in alike.aligned:
        for name in others:
            lengths[names.index(name)] = lengths[names.index(first)]
    ids = []
    for feature, count in zip(schema.sparse, lengths.sum(1).tolist(), strict=True):
        own = torch.randint(0, feature.rows, (count,), generator=generator)
        own[:2] = torch.tensor([0, feature.rows - 1])
        ids.append(own)
    dense = torch.randn(SAMPLES, len(schema.dense), generator=generator)
    return {"dense": dense, "ids": torch.cat(ids), "lengths": lengths.reshape(-1)}


def golden_ids(schema: Schema, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The ids of each feature, by sample."""
    sparse = as_batch(schema, inputs).sparse.to_dict()
    return {name: own.values() for name, own in sparse.items()}


def as_batch(schema: Schema, inputs: dict[str, torch.Tensor]) -> Batch:
    """The inputs as a batch; its labels are 0."""
    keys = [feature.name for feature in schema.sparse]
    sparse = KeyedJaggedTensor(keys, inputs["ids"], lengths=inputs["lengths"])
    return Batch(inputs["dense"], sparse, torch.zeros(len(inputs["dense"])))


def tolerance(scores: torch.Tensor, precision: str) -> float:
    """The largest difference that golden ``scores`` may have on another machine."""
    return TOLERANCE[precision] * max(1.0, float(scores.abs().max()))


def write_golden(file: Path, golden: dict[str, torch.Tensor]) -> None:
    """Write inputs and scores."""
    save_tensors(file, golden)
