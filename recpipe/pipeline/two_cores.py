"""A batch's samples shared between two cores, each of which takes its own through the whole dense part.

Where OpenMP shares out every operator, two cores meet at the end of each, fetch what the other has just
computed out of its cache, and one waits while the other looks up rows, updates tables or runs Python. Here::

    this core    look up | bottom MLP, interaction, top MLP, and all the way back | update the tables
    other core   bottom MLP | interaction, top MLP, and all the way back .....................

they meet twice: when the rows are there, and when the gradients of all rows are. The sums are those of the
whole batch, in another order, which is always the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recpipe.model.ranker import Ranker
from recpipe.pipeline.step import StagedBatch, look_up, update_tables, usable
from recpipe.threads import one_thread

LEAST_SAMPLES = 1_536
"""Of a batch: with less, waking the other thread and taking turns at Python cost more than this gains."""
FLOPS_PER_ID = {torch.float32: 6_000, torch.bfloat16: 10_000}
"""What a core computes of the dense part in the time of looking up a row and updating it, by precision."""
ROWS = 16
"""Shares are multiples of it: oneDNN's kernels take so many rows at a time."""
LEAST_SHARE = 0.4
"""Of the calling thread's core: with less, it would wait for the other's gradients."""


def own_share(ranker: Ranker, staged: StagedBatch) -> int:
    """How many samples the core that has the tables takes, so that both end together; 0: it takes them all.

    Two cores share a batch that is large enough, trains alone and is not in micro-batches, where neither
    other threads nor other ranks look up rows.
    """
    samples = staged.batch.size
    if torch.get_num_threads() != 2 or samples < LEAST_SAMPLES or not staged.alone or staged.bounds:
        return 0
    if staged.batch.dense.device.type != "cpu" or ranker.embeddings.threads > 1:
        return 0
    if staged.sent is not None or staged.upcoming is not None:
        return 0
    tables = staged.batch.sparse.values().numel() * FLOPS_PER_ID[ranker.dtype]
    share = max(LEAST_SHARE, (1 - tables / (samples * ranker.dense_flops)) / 2)
    return int(samples * share) // ROWS * ROWS


class TwoCores:
    """Training steps on two cores, of which one is the calling thread's."""

    def __init__(self) -> None:
        self._other = ThreadPoolExecutor(1, "recpipe-samples", partial(torch.set_num_threads, 1))

    def close(self) -> None:
        """End the other core's thread."""
        self._other.shutdown()

    def accumulate(
        self, ranker: Ranker, dense: Sequence[nn.Parameter], staged: StagedBatch, share: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``step.accumulate``; the calling thread takes the first ``share`` samples.

        ``dense``: the ranker's dense parameters.
        """
        rows: Future[torch.Tensor] = Future()
        mine, others = (_Part(ranker, staged, s, rows) for s in (slice(share), slice(share, None)))
        with one_thread():
            ended = self._other.submit(others.train, dense)
            with _fault_to(rows):
                pooled = look_up(ranker, staged)
                rows.set_result(pooled.detach())
            staged.stage_next()
            mine.train(dense)
            added = self._other.submit(_add_up, dense, mine, others)
            loss = mine.loss.result() + others.loss.result()
            if usable(staged, loss):
                update_tables(staged, pooled, rows.result())
            ended.result()
            added.result()
        return loss, torch.cat((mine.logits, others.logits))


@dataclass
class _Part:
    """One core's samples and what comes of them: addends of the batch's mean loss and of its gradients."""

    ranker: Ranker
    staged: StagedBatch
    samples: slice
    rows: Future[torch.Tensor]
    """Pooled rows of the whole batch, whose gradient each part puts into their place."""
    loss: Future[torch.Tensor] = field(default_factory=Future)
    """There as soon as the gradient of the rows is."""
    logits: torch.Tensor = field(init=False)
    gradients: list[torch.Tensor] = field(init=False)

    def train(self, dense: Sequence[torch.Tensor]) -> None:
        """Forward and backward."""
        with _fault_to(self.loss):
            bottom = self.ranker.bottom(self.staged.batch.dense[self.samples])
            # .data: torch would take what the other part writes into its rows for a change of these.
            rows = self.rows.result().data[self.samples]
            leaf = rows.data.requires_grad_()
            logits = self.ranker.top(bottom, leaf)
            self.logits = logits.detach()
            labels, total = self.staged.batch.labels[self.samples], self.staged.total
            loss = binary_cross_entropy_with_logits(self.logits, labels, reduction="sum") / total

            def arrived(gradient: torch.Tensor) -> None:
                rows.copy_(gradient)
                self.loss.set_result(loss)

            leaf.register_hook(arrived)  # type: ignore[no-untyped-call]
            # The loss's derivative by hand: autograd takes ten times as long over so few numbers.
            slope = (self.logits.sigmoid() - labels).div_(total)
            _, *self.gradients = torch.autograd.grad(logits, [leaf, *dense], slope)


def _add_up(dense: Sequence[nn.Parameter], mine: _Part, others: _Part) -> None:
    """Gradients of all samples; runs in the other core's thread, after its part."""
    torch._foreach_add_(mine.gradients, others.gradients)
    for parameter, gradient in zip(dense, mine.gradients, strict=True):
        parameter.grad = gradient


@contextmanager
def _fault_to(future: Future[Any]) -> Iterator[None]:
    """A fault also becomes that of ``future``, for which another thread waits."""
    try:
        yield
    except BaseException as fault:
        if not future.done():
            future.set_exception(fault)
        raise
