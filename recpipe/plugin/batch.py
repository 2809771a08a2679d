"""The batch: what every part of recpipe hands to the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import DataError


@dataclass
class Batch:
    """B >= 0 samples: dense float32 [B, D], sparse ids (a KJT of F features x B bags), labels float32 [B].

    Shapes and types are checked once, when a batch is made. Follows TorchRec's ``Pipelineable``: ``to``,
    ``pin_memory`` and ``record_stream`` move all three parts together.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        size = self.labels.shape[0] if self.labels.dim() == 1 else -1
        if size < 0:
            raise DataError(f"labels must be a vector, not of shape {tuple(self.labels.shape)}")
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
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, from which copies to a GPU run asynchronously."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all parts until ``stream`` has passed this point."""
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)


@dataclass
class BatchShare(Batch):
    """One trainer's share of a batch, read without the rest of it; it may be empty."""

    total: int
    """Number of samples of the whole batch, at least 1."""

    @classmethod
    def of(cls, batch: Batch, total: int) -> BatchShare:
        """``batch`` as a share of a batch of ``total`` samples."""
        return cls(batch.dense, batch.sparse, batch.labels, total)
