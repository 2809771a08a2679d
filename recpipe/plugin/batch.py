"""The batch: what every part of recpipe hands to the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import DataError


@dataclass
class Batch:
    """B >= 0 samples: dense float32 [B, D], sparse ids (a KJT of F features x B bags), labels float32 [B], or
    [B, L] if there are several for each sample.

    Shapes and types are checked once, when a batch is made. Follows TorchRec's ``Pipelineable``: ``to``,
    ``pin_memory`` and ``record_stream`` move all parts together.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor | None = field(default=None, kw_only=True)
    """How much each label counts, float32 >= 0 in the labels' shape: a loss or figure is
    sum(weight * value) / sum(weight). 0: the label is not known. None: all count alike."""
    log_q: torch.Tensor | None = field(default=None, kw_only=True)
    """The logarithm of the chance with which each sample's id of ``data.negatives.feature`` is drawn, float32
    [B], by which a sampled softmax corrects its logits; None: the recipe draws none."""

    def __post_init__(self) -> None:
        size = self.labels.shape[0] if self.labels.dim() in (1, 2) else -1
        if size < 0:
            raise DataError(f"labels must be [B] or [B, L], not of shape {tuple(self.labels.shape)}")
        if self.weights is not None and self.weights.shape != self.labels.shape:
            raise DataError(
                f"weights must have the labels' shape, {tuple(self.labels.shape)}, not "
                f"{tuple(self.weights.shape)}"
            )
        if self.weights is not None and self.weights.dtype != torch.float32:
            raise DataError(f"weights must be float32, not {self.weights.dtype}")
        if self.log_q is not None and (self.log_q.shape, self.log_q.dtype) != ((size,), torch.float32):
            raise DataError(
                f"log_q must be float32 [{size}], not {self.log_q.dtype} {tuple(self.log_q.shape)}"
            )
        if self.dense.dim() != 2 or self.dense.shape[0] != size:
            raise DataError(f"dense must be [{size}, D] for {size} labels, not {tuple(self.dense.shape)}")
        if self.dense.dtype != torch.float32 or self.labels.dtype != torch.float32:
            raise DataError(
                f"dense and labels must be float32, not {self.dense.dtype} and {self.labels.dtype}"
            )
        if self.sparse.stride() != size:
            raise DataError(f"sparse holds {self.sparse.stride()} samples, but there are {size} labels")

    @property
    def size(self) -> int:
        """Number of samples, B."""
        return self.labels.shape[0]

    @property
    def dense_features(self) -> torch.Tensor:
        """``dense`` under TorchRec's name, float32 [B, max(1, D)]. TorchRec's models need at least one
        column; without any, this is a column of ones.
        """
        return self.dense if self.dense.shape[1] else self.dense.new_ones((self.size, 1))

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """``sparse`` under TorchRec's name."""
        return self.sparse

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on ``device``."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            weights=None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
            log_q=None if self.log_q is None else self.log_q.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, from which copies to a GPU run asynchronously."""
        return Batch(
            self.dense.pin_memory(),
            self.sparse.pin_memory(),
            self.labels.pin_memory(),
            weights=None if self.weights is None else self.weights.pin_memory(),
            log_q=None if self.log_q is None else self.log_q.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all parts until ``stream`` has passed this point."""
        for part in (self.dense, self.sparse, self.labels, self.weights, self.log_q):
            if part is not None:
                part.record_stream(stream)

    def scaled(self) -> Batch:
        """The same batch with weights whose mean is 1 for each label, so that the mean of weight * loss over
        its samples, and the sum of its parts' shares of that, is the weighted mean. Weights of 1 stay as they
        are; a label that no sample has keeps 0."""
        if self.weights is None:
            return self
        return replace(self, weights=_scaled(self.weights, total_weight(self.weights), self.size))


def total_weight(weights: torch.Tensor | None) -> tuple[float, ...]:
    """The sum of the weights, [B] or [B, L], of each label; () for None. ``DataError`` if they are none."""
    if weights is None or not weights.numel():
        return ()
    columns = weights.reshape(len(weights), -1)
    total = tuple(columns.sum(0, dtype=torch.float64).tolist())
    if not (float(columns.min()) >= 0 and all(map(math.isfinite, total))):
        raise DataError("a batch's weights are not all finite numbers of at least 0")
    return total


def scaled(weights: torch.Tensor) -> torch.Tensor:
    """The weights [B] or [B, L] of a whole batch with a mean of 1 for each label, float32 (as
    ``Batch.scaled``)."""
    return _scaled(weights, total_weight(weights), len(weights))


def _scaled(weights: torch.Tensor, total: tuple[float, ...], samples: int) -> torch.Tensor:
    if not weights.numel():
        return weights
    factors = [samples / each if each > 0 else 0.0 for each in total]
    return (weights * torch.tensor(factors, dtype=torch.float64, device=weights.device)).float()


@dataclass
class BatchShare(Batch):
    """One trainer's share of a batch, read without the rest of it; it may be empty."""

    total: int
    """Number of samples of the whole batch, at least 1."""
    whole_weight: tuple[float, ...] = ()
    """``total_weight`` of the whole batch."""

    @classmethod
    def of(cls, batch: Batch, total: int, weight: tuple[float, ...] = ()) -> BatchShare:
        """``batch`` as a share of a batch of ``total`` samples, whose ``total_weight`` is ``weight``."""
        own = batch.dense, batch.sparse, batch.labels
        return cls(*own, total, weight, weights=batch.weights, log_q=batch.log_q)

    def scaled(self) -> Batch:
        """The same share with the weights that it has in the whole batch's ``scaled``."""
        if self.weights is None:
            return self
        return replace(self, weights=_scaled(self.weights, self.whole_weight, self.total))
