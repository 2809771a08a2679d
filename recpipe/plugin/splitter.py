"""Splitters: a batch cut into micro-batches that together make one exact update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recpipe.plugin.batch import Batch


@dataclass(frozen=True)
class Split:
    """A batch cut into micro-batches: ``order`` lists the samples, ``bounds`` says where each micro-batch
    ends.

    ``order`` is a permutation of 0 .. B - 1 (int64 [B]); ``bounds`` increases and ends with B:
    ``(n_popular, B)`` makes two micro-batches, the first one of samples ``order[:n_popular]``. Core rounds
    all bounds but the last down to multiples of ``micro_batch_step``: the samples between train with the next
    micro-batch.
    """

    order: NDArray[np.int64]
    bounds: tuple[int, ...]


def micro_batch_step(batch_size: int) -> int:
    """The step, in samples, between possible micro-batch sizes: a sixteenth of ``batch_size``, rounded up.

    Matrix kernels are made, and kept in memory, for each input size. Without steps they took as much memory
    as the rest of a small model's run.
    """
    return -(-batch_size // 16)


def wrong_split(split: object, samples: int) -> str:
    """What is wrong with ``split`` as the result for a batch of so many ``samples``; empty if nothing is."""
    import numpy as np  # importing it takes longer than all that ``import recpipe`` needs

    if not isinstance(split, Split):
        return f"{type(split).__name__}, not a Split"
    order, bounds = np.asarray(split.order), list(split.bounds)
    if order.shape != (samples,) or not np.issubdtype(order.dtype, np.integer):
        return f"an order of {order.dtype} {list(order.shape)} for a batch of {samples} samples"
    seen = np.zeros(samples, bool)
    seen[order[(order >= 0) & (order < samples)]] = True
    if not seen.all():
        return f"an order without sample {int(seen.argmin())}: it must be a permutation of 0 .. {samples - 1}"
    if not bounds or bounds[-1] != samples or any(a > b for a, b in pairwise([0, *bounds])):
        return f"bounds {tuple(bounds)}: they must grow and end with {samples}, the batch's samples"
    return ""


class Splitter(ABC):
    """Cuts batches so that samples which need no cold rows train while the rows of the others are fetched.

    Core does the rest: the scale of the losses, one update per batch, fetches behind the micro-batches that
    need nothing. ``split`` is called in the loader's thread, one batch ahead of training. Every trainer calls
    it with the same whole batch and must get the same answer.

    A complete example, which trains warm samples first::

        class WarmFirst(Splitter):
            def split(self, batch: Batch, needs_cold: NDArray[np.bool_]) -> Split:
                order = np.argsort(needs_cold, kind="stable")
                warm, samples = int((~needs_cold).sum()), len(needs_cold)
                return Split(order, (warm, samples) if 0 < warm < samples else (samples,))
    """

    optional: bool = True
    """Whether core may train a batch whole where cutting it makes steps no shorter (``trainer.split=auto``).
    False for a splitter that cuts for another reason, such as the memory of activations."""

    @abstractmethod
    def split(self, batch: Batch, needs_cold: NDArray[np.bool_]) -> Split:
        """How to cut ``batch``. ``needs_cold`` (bool [B]) says for each sample whether it looks up a row that
        is not in device memory; if every row is resident, it is all false."""
