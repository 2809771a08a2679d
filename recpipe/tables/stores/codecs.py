"""Codecs of cold rows: weights as float16, bfloat16 or 8-bit integers, optimizer state as float32.

A decoded record encodes to the same bytes again. Weights that are not finite stay not finite.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.plugin.quantizer import RecordLayout, RowCodec

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
LEVELS = 255
"""Steps between the smallest and the largest weight of a row in 8 bits."""
NARROW = 32
"""Rows with fewer weights are transposed first: their extremes are then found in a third of the time."""
GRID_BITS = 22
"""A row's scale and bias are multiples of 2**-22 times the power of two at its largest weight, so that bias
plus any multiple of the scale is a float32 without rounding."""
NORMAL = 1
"""Exponent field of the smallest normal float32."""
TOO_LARGE = 254
"""Exponent field of 2**127, from which on a row's range may not be a float32."""


class WeightCodec(RowCodec):
    """A codec whose records have ``weight_bytes`` for the weights, followed by the optimizer state."""

    def __init__(self, layout: RecordLayout, weight_bytes: int) -> None:
        self.dim = layout.dim
        self.weight_bytes = weight_bytes
        self.bytes_per_record = weight_bytes + 4 * (layout.width - layout.dim)

    def encode(self, records: Floats) -> Bytes:
        """As ``RowCodec``."""
        out = np.empty((len(records), self.bytes_per_record), np.uint8)
        self.encode_weights(records[:, : self.dim], out[:, : self.weight_bytes])
        out[:, self.weight_bytes :].view(np.float32)[...] = records[:, self.dim :]
        return out

    def decode(self, encoded: Bytes, out: Floats) -> None:
        """As ``RowCodec``."""
        self.decode_weights(encoded[:, : self.weight_bytes], out[:, : self.dim])
        out[:, self.dim :] = encoded[:, self.weight_bytes :].view(np.float32)

    @abstractmethod
    def encode_weights(self, weights: Floats, out: Bytes) -> None:
        """Encode weights float32 [n, dim] into ``out``, uint8 [n, weight_bytes]; rows need not be
        contiguous."""

    @abstractmethod
    def decode_weights(self, encoded: Bytes, out: Floats) -> None:
        """Decode uint8 [n, weight_bytes] into float32 [n, dim]."""


class Fp16Rows(WeightCodec):
    """Weights as float16: relative error up to 2**-11, from 2**-14 to 65504; beyond, infinity."""

    def __init__(self, layout: RecordLayout) -> None:
        super().__init__(layout, 2 * layout.dim)

    def encode_weights(self, weights: Floats, out: Bytes) -> None:
        """Rounded to the nearest."""
        torch.from_numpy(out.view(np.float16)).copy_(torch.from_numpy(weights))

    def decode_weights(self, encoded: Bytes, out: Floats) -> None:
        """Without rounding."""
        torch.from_numpy(out).copy_(torch.from_numpy(encoded.view(np.float16)))


class Bf16Rows(WeightCodec):
    """Weights as bfloat16: relative error up to 2**-9, in the whole range of float32."""

    def __init__(self, layout: RecordLayout) -> None:
        super().__init__(layout, 2 * layout.dim)

    def encode_weights(self, weights: Floats, out: Bytes) -> None:
        """Rounded to the nearest."""
        torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).copy_(torch.from_numpy(weights))

    def decode_weights(self, encoded: Bytes, out: Floats) -> None:
        """Without rounding."""
        torch.from_numpy(out).copy_(torch.from_numpy(encoded.view(np.int16)).view(torch.bfloat16))


class Int8Rows(WeightCodec):
    """Weights as 8-bit integers with a scale and a bias (float32) for each row: ``bias + scale * q``.

    FBGEMM's fused layout: [dim] uint8, scale, bias. The error is up to half of 1/255 of the row's range, or
    2**-14 of its largest weight where that is more. A row with a weight that is not finite, or of 2**127 and
    more, comes back as NaN.

    With FBGEMM's own rounding, a decoded row encodes to other bytes (every tenth row, measured). Here scale
    and bias are on a grid on which ``bias + scale * q`` is exact, so that both are found again.
    """

    def __init__(self, layout: RecordLayout) -> None:
        super().__init__(layout, layout.dim + 8)

    def encode_weights(self, weights: Floats, out: Bytes) -> None:
        """Rounded to the nearest."""
        values = torch.from_numpy(weights)
        columns = values.t().contiguous() if self.dim < NARROW else values.t()
        scale, bias = _scale_and_bias(columns.amin(0).numpy(), columns.amax(0).numpy())
        steps = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        levels = torch.sub(values, torch.from_numpy(bias).unsqueeze(1))
        levels.mul_(torch.from_numpy(steps).unsqueeze(1)).add_(0.5).clamp_(0, LEVELS)
        # Converting through int32 takes half the time, and makes NaN 0.
        torch.from_numpy(out[:, : self.dim]).copy_(levels.to(torch.int32).to(torch.uint8))
        out[:, self.dim :].view(np.float32)[...] = np.stack((scale, bias), axis=1)

    def decode_weights(self, encoded: Bytes, out: Floats) -> None:
        """Without rounding."""
        scale, bias = torch.from_numpy(encoded[:, self.dim :].view(np.float32).copy()).unbind(1)
        values = torch.from_numpy(out).copy_(torch.from_numpy(encoded[:, : self.dim]))
        values.mul_(scale.unsqueeze(1)).add_(bias.unsqueeze(1))


def _scale_and_bias(low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Scale and bias of rows whose weights are between ``low`` and ``high``, float32 [n] each."""
    largest = np.maximum(np.abs(low), np.abs(high))
    exponent = largest.view(np.int32) >> 23
    grid = np.maximum(exponent - GRID_BITS, NORMAL)
    unit, per_unit = _power(grid), _power(254 - grid)
    finite = exponent < TOO_LARGE
    first = np.ceil(np.where(finite, low, 0) * per_unit) + np.float32(0)  # never -0.0
    last = np.floor(np.where(finite, high, 0) * per_unit)
    steps = np.maximum(last - first, 0).astype(np.int32) // LEVELS
    nan = np.float32(np.nan)
    return np.where(finite, steps * unit, nan).astype(np.float32), np.where(finite, first * unit, nan)


def _power(field: NDArray[np.int32]) -> Floats:
    """The power of two with that exponent field, float32 [n]."""
    return (field << 23).view(np.float32)


COLD: Mapping[str, Callable[[RecordLayout], WeightCodec]] = {
    "fp16": Fp16Rows,
    "bf16": Bf16Rows,
    "int8": Int8Rows,
}
"""Built-in codecs by name."""
