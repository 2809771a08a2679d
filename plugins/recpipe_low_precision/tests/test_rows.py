"""Rows in low precision: their bytes, their error, and that lookups read what was written."""

from __future__ import annotations

import pytest
import torch

from recpipe.answers.row_types import BITS, ROW_TYPES, decode_rows, encode_rows, fits, row_bytes, row_scales
from recpipe.errors import UserError

DIM = 64


def weights(rows: int = 50, dim: int = DIM, size: float = 0.05) -> torch.Tensor:
    return size * torch.randn(rows, dim, generator=torch.Generator().manual_seed(3))


def test_bytes_of_a_row() -> None:
    assert [row_bytes(kind, DIM) for kind in ROW_TYPES] == [256, 128, 68, 36, 20]
    assert row_bytes("fp32", DIM) / row_bytes("int8", DIM) >= 3.7
    for kind in ROW_TYPES:
        assert encode_rows(weights(), kind).shape == (50, row_bytes(kind, DIM))


@pytest.mark.parametrize("kind", BITS)
def test_error_is_at_most_half_a_step_and_the_rounding_of_scale_and_bias(kind: str) -> None:
    values = weights()
    rows = encode_rows(values, kind)
    scale, bias = row_scales(rows)
    apart = (decode_rows(rows, kind, DIM) - values).abs().amax(1)
    codes = 2 ** BITS[kind] - 1
    step = (values.amax(1) - values.amin(1)) / codes
    # float16 has 11 bits: scale and bias are within 2^-11 of themselves.
    assert (apart <= 0.5 * step + 2.0**-11 * (codes * step + bias.abs())).all()
    assert (apart > 0.1 * step).all(), "or the bound shows nothing"
    assert ((scale - step).abs() <= 2.0**-10 * values.abs().amax()).all()


def test_float_types_round_as_torch_does() -> None:
    values = weights()
    assert torch.equal(decode_rows(encode_rows(values, "fp32"), "fp32", DIM), values)
    assert torch.equal(decode_rows(encode_rows(values, "fp16"), "fp16", DIM), values.half().float())


@pytest.mark.parametrize("kind", ROW_TYPES)
def test_a_constant_row_and_a_row_of_zeros_are_exact(kind: str) -> None:
    values = torch.stack((torch.zeros(DIM), torch.full((DIM,), 0.25)))
    assert torch.equal(decode_rows(encode_rows(values, kind), kind, DIM), values)


@pytest.mark.parametrize("kind", ROW_TYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_named(kind: str, bad: float) -> None:
    values = weights()
    values[7, 3] = bad
    with pytest.raises(UserError, match="table 't', row 107: a weight is not finite"):
        encode_rows(values, kind, "t", first=100)


@pytest.mark.parametrize("kind", ["fp16", *BITS])
def test_a_row_beyond_float16_is_refused(kind: str) -> None:
    values = weights()
    values[2] = -1e6
    with pytest.raises(UserError, match=f"row 2: .* too large for {kind}"):
        encode_rows(values, kind, "t")


def test_rows_of_an_odd_number_of_bytes_are_refused() -> None:
    assert [kind for kind in ROW_TYPES if not fits(kind, 12)] == ["int2"]
    with pytest.raises(UserError, match="12 weights in int2"):
        encode_rows(weights(dim=12), "int2")
