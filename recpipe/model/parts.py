"""Whether a model may be trained in parts of a batch: found out on a few samples before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recpipe.data.parts import batch_size
from recpipe.model.placed import Parts, PlacedModel
from recpipe.pipeline.select import between

SAMPLES = 64
"""That are tried, at most."""
TOLERANCE = 1e-4
"""Largest difference of the losses, relative to the loss: in-batch negatives of halves differ by log 2."""


def find_out(model: PlacedModel, batch: Any, most: int = SAMPLES) -> Parts:
    """Compare the loss of the first samples of ``batch`` with the losses of their halves, in training mode.

    Nothing is trained; buffers and random numbers are as before. ``most``: samples that tables can look up.
    """
    count = min(SAMPLES, most, batch_size(batch)) // 2 * 2
    if count < 2:
        return Parts(refused="the first batch has a single sample, on which it cannot be found out")
    tried = between(batch, 0, count)
    late = model.late_calls
    with _undone(model), torch.no_grad():
        before = torch.get_rng_state()
        buffers = [buffer.clone() for buffer in model.module.buffers()]
        whole, first, second = (
            float(model.called(between(tried, low, high))[0])
            for low, high in ((0, count), (0, count // 2), (count // 2, count))
        )
        if not torch.equal(before, torch.get_rng_state()):
            return Parts(refused="the model draws random numbers (dropout), other ones for each part")
        changed = any(not torch.equal(a, b) for a, b in zip(buffers, model.module.buffers(), strict=True))
        if changed:
            return Parts(refused="the model keeps statistics of its batches (as BatchNorm does)")
    assert model.late_calls == late, "nothing is looked up to be trained"
    allowed = TOLERANCE * max(abs(whole), 1e-3)
    if abs(whole - (first + second) / 2) <= allowed:
        return Parts()
    if abs(whole - (first + second)) <= allowed:
        return Parts(sums=True)
    return Parts(
        refused=f"its loss is neither a mean nor a sum over samples ({whole:.6g} for {count} samples, "
        f"{first:.6g} and {second:.6g} for their halves), as with in-batch negatives"
    )


@contextmanager
def _undone(model: PlacedModel) -> Iterator[None]:
    """What a forward pass in training mode changes is as before afterwards."""
    state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.module.buffers()]
    training = model.training
    model.train()
    try:
        yield
    finally:
        model.train(training)
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, value in zip(model.module.buffers(), buffers, strict=True):
                buffer.copy_(value)
