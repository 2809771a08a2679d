"""Quantizers: rows stored, or sent, in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.calls import Owned
from recpipe.plugin.store import Fill, Records, StoreLayout

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.types import CommOp, QuantizedCommCodec

    from recpipe.plugin.context import TableInfo

Direction = Literal["forward", "backward"]
STORAGES = ("fp32", "fp16")
"""The types that ``Quantizer.storage`` may name."""


@dataclass(frozen=True)
class RecordLayout:
    """A row's record as the tiers move it, float32 [width]: ``dim`` weights, then the optimizer's state."""

    dim: int
    width: int


class RowCodec(ABC):
    """Records of one layout in ``bytes_per_record`` bytes.

    A codec has no state: equal records give equal bytes, whichever records come with them, in any thread
    (several may call at the same time), on any rank. A resumed run continues bit by bit if encoding a decoded
    record gives the same bytes again, as recpipe's own codecs do.

    It is also told of no records at all (n = 0).

    A row is rounded each time it leaves device memory, that is its slot or the slab of rows that one batch
    needs.
    """

    bytes_per_record: int

    @abstractmethod
    def encode(self, records: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Encode ``records`` float32 [n, width], on their way to the cold tier, as uint8 [n,
        bytes_per_record]. It must not change ``records``."""

    @abstractmethod
    def decode(self, encoded: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Decode uint8 [n, bytes_per_record] into ``out``, float32 [n, width]. Both are C-contiguous."""

    def rounded(self, records: torch.Tensor) -> torch.Tensor | None:
        """What ``decode`` makes of the bytes of ``records`` (float32 [n, width]), computed where they are,
        bit by bit the same; None: only ``encode`` and ``decode`` can tell, in host memory.

        Rows that the next batch needs again stay on a GPU, rounded. Without this method, each step waits for
        the GPU.
        """
        return None


class Quantizer:
    """Stores rows in fewer bits in the cold tier or in the tables, or sends them in fewer bits between ranks.
    Each of these three aspects has one owner for each table (or each collective), independent of who owns the
    cache. If a method returns None, other plugins may own that aspect. Its plugin alters EXACT_GRADIENT, and
    TABLE_LAYOUT where ``storage`` is not fp32.

    A complete example, with float16 weights and exact optimizer state in the cold tier::

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
    """A pattern, as for file names, for the tables that ``cold`` and ``storage`` apply to."""

    def cold(self, layout: RecordLayout) -> RowCodec | None:
        """The codec for records of ``layout`` in the cold tier; None: float32.

        Called once for each layout among the tables, on every rank. Tables with different codecs are in
        different groups.
        """
        return None

    def storage(self, table: TableInfo) -> str | None:
        """The type of a table's weights in device memory: ``fp32`` or ``fp16``; None: fp32. Optimizer
        state stays float32. (FBGEMM trains no rows of bfloat16, neither on a CPU nor on a GPU.)"""
        return None

    def codecs(self) -> Mapping[tuple[CommOp, Direction], QuantizedCommCodec[Any]]:
        """One codec for each collective and direction between ranks. If there are any, the tables are
        sharded.

        A codec that no table of the model uses is refused.
        """
        return {}


WORD = 4
"""Bytes of a float32 word, the unit that stores move."""


class Coding:
    """Packs a codec's bytes into records of float32 words, which any store moves unchanged. The last word is
    padded with zeros."""

    def __init__(self, codec: Owned[RowCodec]) -> None:
        self.codec = codec
        self.bytes_per_record = codec.part.bytes_per_record
        self.width = -(-self.bytes_per_record // WORD)
        """The number of words in an encoded record."""

    def encoded(self, records: Records) -> Records:
        """``records``, float32 [n, record width], as words [n, ``width``]."""
        shape = (len(records), self.bytes_per_record)

        def wrong(made: object) -> str | None:
            if isinstance(made, np.ndarray) and made.dtype == np.uint8 and made.shape == shape:
                return None
            what = f"{made.dtype} {made.shape}" if isinstance(made, np.ndarray) else type(made).__name__
            return f": encode() must return uint8 {shape}, not {what}"

        made = self.codec.call(RowCodec.encode, np.ascontiguousarray(records), wrong=wrong)
        if made.shape[1] < WORD * self.width:
            padded = np.zeros((len(made), WORD * self.width), np.uint8)
            padded[:, : made.shape[1]] = made
            made = padded
        return np.ascontiguousarray(made).view(np.float32)

    def decode(self, words: Records, out: Records) -> None:
        """Decode words into ``out``."""
        encoded = words.view(np.uint8)[:, : self.bytes_per_record]
        self.codec.call(RowCodec.decode, np.ascontiguousarray(encoded), out)

    def rounded(self, records: Records) -> Records:
        """What is read of ``records`` after they have been written."""
        out = np.empty(records.shape, np.float32)
        self.decode(self.encoded(records), out)
        return out

    def rounded_there(self, records: torch.Tensor) -> torch.Tensor | None:
        """The same, computed where ``records`` are; None: the codec cannot."""

        def wrong(made: object) -> str | None:
            if made is None or (isinstance(made, type(records)) and _alike(made) == _alike(records)):
                return None
            what = _alike(made) if isinstance(made, type(records)) else type(made).__name__
            return f": rounded() must return {_alike(records)}, not {what}"

        return self.codec.call(RowCodec.rounded, records, wrong=wrong)

    def layout(self, layout: StoreLayout) -> StoreLayout:
        """The layout of the encoded records of ``layout``."""
        return StoreLayout(layout.tables, layout.rows, self.width)

    def fill(self, fill: Fill) -> Fill:
        """First records, encoded."""
        return lambda table, start, stop: self.encoded(fill(table, start, stop))


def _alike(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
