"""Quantizers: rows stored, or sent, in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchrec.distributed.types import CommOp, QuantizedCommCodec

    from recpipe.plugin.api import TableInfo

Direction = Literal["forward", "backward"]
STORAGES = ("fp32", "fp16", "bf16")
"""What ``Quantizer.storage`` may name."""


@dataclass(frozen=True)
class RecordLayout:
    """A row's record as the tiers move it, float32 [width]: ``dim`` weights, then the optimizer's state."""

    dim: int
    width: int


class RowCodec(ABC):
    """Records of one layout in ``bytes_per_record`` bytes.

    Stateless: equal records make equal bytes, whatever rows come with them, in any thread (several may call
    at a time), on any rank. A codec that gives its own bytes again for the records that it has decoded lets a
    resumed run go on bit by bit as the run it resumes; recpipe's own do.

    A row is rounded each time it leaves the device: its slot, or the slab of rows that one batch needs.
    """

    bytes_per_record: int

    @abstractmethod
    def encode(self, records: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Records float32 [n, width], written back, as uint8 [n, bytes_per_record]. Not to be changed."""

    @abstractmethod
    def decode(self, encoded: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """The reverse, fetched: into ``out``, float32 [n, width]. Both are C-contiguous."""


class Quantizer:
    """Fewer bits in the cold tier, in the tables, or between ranks: three aspects, each with one owner for
    each table (each collective), whoever owns the cache. What a method answers with None stays free for other
    plugins. Its plugin alters EXACT_GRADIENT, and TABLE_LAYOUT where ``storage`` is not fp32.

    Weights in the cold tier as float16, optimizer state exact, whole::

        class Half(RowCodec):
            def __init__(self, layout: RecordLayout) -> None:
                self.dim = layout.dim
                self.bytes_per_record = 2 * layout.dim + 4 * (layout.width - layout.dim)

            def encode(self, records: NDArray[np.float32]) -> NDArray[np.uint8]:
                weights = records[:, : self.dim].astype(np.float16).view(np.uint8)
                state = np.ascontiguousarray(records[:, self.dim :]).view(np.uint8)
                return np.concatenate((weights, state), axis=1)

            def decode(self, encoded: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
                split = 2 * self.dim
                out[:, : self.dim] = np.ascontiguousarray(encoded[:, :split]).view(np.float16)
                out[:, self.dim :] = np.ascontiguousarray(encoded[:, split:]).view(np.float32)


        class HalfCold(Quantizer):
            def cold(self, layout: RecordLayout) -> RowCodec:
                return Half(layout)
    """

    tables: str = "*"
    """Pattern (as of file names) of the names of the tables that ``cold`` and ``storage`` are for."""

    def cold(self, layout: RecordLayout) -> RowCodec | None:
        """How records of ``layout`` lie in the cold tier; None: as they are, float32.

        Asked once for each layout among the tables, on every rank. Tables whose codecs differ are groups of
        their own.
        """
        return None

    def storage(self, table: TableInfo) -> str | None:
        """What stores a table's weights where they are looked up: ``fp32``, ``fp16`` or (on a GPU) ``bf16``;
        None: fp32. Optimizer state stays float32."""
        return None

    def codecs(self) -> Mapping[tuple[CommOp, Direction], QuantizedCommCodec[Any]]:
        """One codec for each collective and direction between ranks; shards the tables where there are any.

        A codec that no table of the model uses is refused.
        """
        return {}
