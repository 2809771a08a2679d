"""Embedding rows in low precision, in FBGEMM's row-wise layout without padding (row alignment 1).

fp32 and fp16 are a row's weights. int8, int4 and int2 are a scale and a bias in float16, then the codes, so
that weight = scale * code + bias; scale and bias are chosen for each row by its smallest and largest weight
(Guan et al. 2019, "Post-Training 4-bit Quantization on Embedding Tables"; Deng et al. 2021).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.errors import UserError
from recpipe.private_api import SCALE_BIAS_BYTES, fused_rows

BITS = {"int8": 8, "int4": 4, "int2": 2}
"""Bits of a weight, for the types with a scale and a bias for each row."""
ROW_TYPES = ("fp32", "fp16", *BITS)
"""Types of rows, the most precise first."""
_BYTES = {"fp32": 4, "fp16": 2}
_LARGEST = torch.finfo(torch.float16).max


def row_bytes(kind: str, dim: int) -> int:
    """Bytes of a row of ``dim`` weights; ``UserError`` where FBGEMM has no such row (``fits``)."""
    if kind in _BYTES:
        return _BYTES[kind] * dim
    if not fits(kind, dim):
        raise UserError(f"rows of {dim} weights in {kind} have no even number of bytes: choose another type")
    return SCALE_BIAS_BYTES + dim * BITS[kind] // 8


def fits(kind: str, dim: int) -> bool:
    """Whether rows of ``dim`` weights can be of this type: FBGEMM's are an even number of bytes."""
    return kind in _BYTES or dim * BITS[kind] % 16 == 0


def encode_rows(
    values: torch.Tensor,
    kind: str,
    table: str = "",
    first: int = 0,
    numbers: NDArray[np.int64] | None = None,
) -> torch.Tensor:
    """``values`` float32 [n, D] as rows of ``kind``, uint8 [n, row_bytes].

    ``UserError``, with ``table`` and the row's number, one of ``numbers`` or counted from ``first``, for a
    row that is not finite in ``kind``: FBGEMM would silently make other values of it.
    """
    values = values.to(torch.float32).contiguous()
    if kind in _BYTES:
        rows = (values.half() if kind == "fp16" else values).view(torch.uint8)
        bad = ~torch.isfinite(values.half() if kind == "fp16" else values).all(1)
    else:
        row_bytes(kind, values.shape[1])
        low, high = values.amin(1), values.amax(1)
        range_ok = torch.isfinite(high - low) & (low.abs() <= _LARGEST)
        bad = ~(range_ok & ((high - low) / (2 ** BITS[kind] - 1) <= _LARGEST))
        rows = fused_rows(values, BITS[kind])
    if bool(bad.any()):
        number = int(bad.int().argmax())
        row = first + number if numbers is None else numbers[number]
        raise UserError(
            f"table '{table}', row {row}: a weight is not finite, or too large for {kind}; keep "
            "the table in fp32, or train it again"
        )
    return rows


def decode_rows(rows: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """Rows uint8 [n, row_bytes] as float32 [n, dim], the values that lookups pool."""
    rows = rows.contiguous()
    if kind == "fp32":
        return rows.view(torch.float32).clone()
    if kind == "fp16":
        return rows.view(torch.float16).float()
    bits = BITS[kind]
    scale, bias = row_scales(rows)
    packed = rows[:, SCALE_BIAS_BYTES:].to(torch.int32)
    codes = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(codes, 2).flatten(1)[:, :dim] * scale[:, None] + bias[:, None]


def row_scales(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and bias of each row of an integer type, float32 [n] each."""
    both = rows[:, :SCALE_BIAS_BYTES].contiguous().view(torch.float16).float()
    return both[:, 0], both[:, 1]
