"""Codecs of cold rows: weights as float16, bfloat16 or 8-bit integers, optimizer state as float32.

A decoded record encodes to the same bytes again. Weights that are not finite stay not finite.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

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
        out = np.empty((len(records), self.bytes_per_record), np.uint8)
        self.encode_weights(records[:, : self.dim], out[:, : self.weight_bytes])
        out[:, self.weight_bytes :].view(np.float32)[...] = records[:, self.dim :]
        return out

    def decode(self, encoded: Bytes, out: Floats) -> None:
        self.decode_weights(encoded[:, : self.weight_bytes], out[:, : self.dim])
        out[:, self.dim :] = encoded[:, self.weight_bytes :].view(np.float32)

    def rounded(self, records: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.rounded_weights(records[:, : self.dim]), records[:, self.dim :]), dim=1)

    @abstractmethod
    def rounded_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """What is decoded of weights float32 [n, dim] after they have been encoded, the same bits."""

    @abstractmethod
    def encode_weights(self, weights: Floats, out: Bytes) -> None:
        """Encode weights float32 [n, dim] into ``out``, uint8 [n, weight_bytes]; rows need not be
        contiguous."""

    @abstractmethod
    def decode_weights(self, encoded: Bytes, out: Floats) -> None:
        """Decode uint8 [n, weight_bytes] into float32 [n, dim]."""


class _HalfRows(WeightCodec):
    """Weights in a float type of 16 bits, rounded to the nearest."""

    kind: ClassVar[torch.dtype]

    def __init__(self, layout: RecordLayout) -> None:
        super().__init__(layout, 2 * layout.dim)

    def rounded_weights(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.to(self.kind).float()

    def encode_weights(self, weights: Floats, out: Bytes) -> None:
        torch.from_numpy(out.view(np.int16)).view(self.kind).copy_(torch.from_numpy(weights))

    def decode_weights(self, encoded: Bytes, out: Floats) -> None:
        torch.from_numpy(out).copy_(torch.from_numpy(encoded.view(np.int16)).view(self.kind))


class Fp16Rows(_HalfRows):
    """Weights as float16: relative error up to 2**-11, from 2**-14 to 65504; beyond, infinity."""

    kind = torch.float16


class Bf16Rows(_HalfRows):
    """Weights as bfloat16: relative error up to 2**-9, in the whole range of float32."""

    kind = torch.bfloat16


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

    def rounded_weights(self, weights: torch.Tensor) -> torch.Tensor:
        scale, bias, steps = _scale_and_bias(weights.amin(1), weights.amax(1), torch)
        levels = _levels(weights, bias, steps).float()
        return levels.mul_(scale.unsqueeze(1)).add_(bias.unsqueeze(1))

    def encode_weights(self, weights: Floats, out: Bytes) -> None:
        values = torch.from_numpy(weights)
        columns = values.t().contiguous() if self.dim < NARROW else values.t()
        scale, bias, steps = _scale_and_bias(columns.amin(0).numpy(), columns.amax(0).numpy(), np)
        levels = _levels(values, torch.from_numpy(bias), torch.from_numpy(steps))
        torch.from_numpy(out[:, : self.dim]).copy_(levels)
        out[:, self.dim :].view(np.float32)[...] = np.stack((scale, bias), axis=1)

    def decode_weights(self, encoded: Bytes, out: Floats) -> None:
        scale, bias = torch.from_numpy(encoded[:, self.dim :].view(np.float32).copy()).unbind(1)
        values = torch.from_numpy(out).copy_(torch.from_numpy(encoded[:, : self.dim]))
        values.mul_(scale.unsqueeze(1)).add_(bias.unsqueeze(1))


def _scale_and_bias(low: Any, high: Any, of: Any) -> tuple[Any, Any, Any]:
    """Scale and bias of rows whose weights are between ``low`` and ``high``, float32 [n] each, and 1 / scale,
    or 0 for 0. All are arrays of numpy or tensors, ``of`` that module.

    Each operator rounds by itself, or not at all, so that a GPU gives the same bits.
    """
    exponent = of.maximum(of.abs(low), of.abs(high)).view(of.int32) >> 23
    grid = of.where(exponent > GRID_BITS + NORMAL, exponent - GRID_BITS, NORMAL)
    unit, per_unit = _power(grid, of), _power(254 - grid, of)
    finite = exponent < TOO_LARGE
    first = of.ceil(of.where(finite, low, 0) * per_unit) + 0.0  # never -0.0
    last = of.floor(of.where(finite, high, 0) * per_unit)
    many = of.asarray(of.where(last > first, last - first, 0), dtype=of.int32) // LEVELS
    scale = of.where(finite, of.asarray(many, dtype=of.float32) * unit, of.nan)
    spread = many > 0
    return scale, of.where(finite, first * unit, of.nan), spread / of.where(spread, scale, 1)


def _power(field: Any, of: Any) -> Any:
    """The power of two with that exponent field, float32 [n]."""
    return of.asarray(field << 23, dtype=of.int32).view(of.float32)


def _levels(values: torch.Tensor, bias: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The level of each weight, uint8 [n, dim]."""
    levels = torch.sub(values, bias.unsqueeze(1))
    levels.mul_(steps.unsqueeze(1)).add_(0.5).clamp_(0, LEVELS)
    # Converting through int32 takes half the time, and makes NaN 0.
    return levels.to(torch.int32).to(torch.uint8)


COLD: Mapping[str, Callable[[RecordLayout], WeightCodec]] = {
    "fp16": Fp16Rows,
    "bf16": Bf16Rows,
    "int8": Int8Rows,
}
"""Built-in codecs by name."""
