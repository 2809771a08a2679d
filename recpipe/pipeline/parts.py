"""Finds out on a few samples, before training, whether a model may be trained in parts of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import uses_gpu
from recpipe.data.parts import batch_size
from recpipe.data.select import between
from recpipe.pipeline.placed import Parts, PlacedModel
from recpipe.tables.front import Front, handing_out
from recpipe.tables.lookups import same_ids

SAMPLES = 64
"""Most samples that are tried."""
TOLERANCE = 1e-4
"""Largest relative difference between the losses. With in-batch negatives, halves differ by log 2."""


def find_out(model: PlacedModel, batch: Any, most: int = SAMPLES) -> Parts:
    """Compare the loss of the first samples of ``batch`` with the losses of their halves.

    Modules must be in the training or evaluation modes in which they will be trained. Nothing is trained;
    buffers and random numbers are restored. ``most``: how many samples the tables can look up.
    """
    count = min(SAMPLES, most, batch_size(batch)) // 2 * 2
    if count < 2:
        return Parts(refused="the first batch has a single sample, on which it cannot be found out")
    tried = between(batch, 0, count)
    halves = between(tried, 0, count // 2), between(tried, count // 2, count)
    watches = {front: _Watch(front, model.ids_of(front, tried)) for front in model.bound}
    with undone(model), torch.no_grad():
        before = _random_states()
        buffers = [buffer.clone() for buffer in model.module.buffers()]
        with handing_out(watches):
            try:
                whole = float(model.called(tried)[0])
            except RuntimeError:  # FBGEMM's, of an id beyond its table, names neither column nor table
                model.inputs.require_ids(model.inputs.each(tried))
                raise
        first, second = (float(model.called(half)[0]) for half in halves)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
            return Parts(refused="the model draws random numbers (dropout), other ones for each part")
        changed = any(not torch.equal(a, b) for a, b in zip(buffers, model.module.buffers(), strict=True))
        if changed:
            return Parts(refused="the model keeps statistics of its batches (as BatchNorm does)")
    own_ids = not any(watch.others for watch in watches.values())
    allowed = TOLERANCE * max(abs(whole), 1e-3)
    # If the loss is not finite, the first step reports it and names the tensor.
    if not math.isfinite(whole) or abs(whole - (first + second) / 2) <= allowed:
        return Parts(own_ids=own_ids)
    if abs(whole - (first + second)) <= allowed:
        return Parts(sums=True, own_ids=own_ids)
    return Parts(
        refused=f"its loss is neither a mean nor a sum over samples ({whole:.6g} for {count} samples, "
        f"{first:.6g} and {second:.6g} for their halves), as with in-batch negatives"
    )


class _Watch:
    """Watches the ids that a front is called with, and hands out no rows."""

    def __init__(self, front: Front, ids: KeyedJaggedTensor | None) -> None:
        assert ids is not None, "the front is bound"
        self.front, self.ids, self.others = front, ids, False

    def holds(self, sparse: KeyedJaggedTensor) -> bool:
        self.others |= not same_ids(sparse, self.ids, self.front)
        return False

    def rows(self) -> list[torch.Tensor]:
        raise AssertionError("it holds no rows")


@contextmanager
def undone(model: PlacedModel) -> Iterator[None]:
    """Restore after the block what a forward pass changes."""
    (state, *of_gpus), buffers = _random_states(), [buffer.clone() for buffer in model.module.buffers()]
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)
        with torch.no_grad():
            for buffer, value in zip(model.module.buffers(), buffers, strict=True):
                buffer.copy_(value)


def _random_states() -> list[torch.Tensor]:
    """The states of torch's generators: the CPU's and, once CUDA is in use, every GPU's."""
    of_gpus = torch.cuda.get_rng_state_all() if uses_gpu() else []
    return [torch.get_rng_state(), *of_gpus]
