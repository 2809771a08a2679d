"""The built-in codecs of cold rows: their errors, the state that they keep, the bytes they find again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recpipe.plugin.quantizer import RecordLayout
from recpipe.tables.stores.codecs import COLD, Bf16Rows, Fp16Rows, Int8Rows, WeightCodec

LAYOUTS = [RecordLayout(dim, dim + state) for dim in (4, 16) for state in (0, 1, dim)]
RNG = np.random.default_rng(7)


def records(layout: RecordLayout) -> np.ndarray:
    """Rows of many kinds: usual ones, of any size, tight around 1, of few values, alike, any bits at all."""
    shape = (400, layout.width)
    scales = 10.0 ** RNG.uniform(-40, 30, (400, 1))
    few = RNG.integers(-3, 4, shape) * 2.0 ** RNG.integers(-20, 20, (400, 1))
    rows = [
        0.05 * RNG.standard_normal(shape),
        RNG.standard_normal(shape) * scales,
        1 + RNG.standard_normal(shape) * 10.0 ** RNG.uniform(-9, 0, (400, 1)),
        few,
        np.full((2, layout.width), 0.1),
        np.full((2, layout.width), -1e-39),
        np.zeros((2, layout.width)),
    ]
    bits = RNG.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    return np.concatenate([np.concatenate(rows).astype(np.float32), bits])


def decoded(codec: WeightCodec, encoded: np.ndarray, layout: RecordLayout) -> np.ndarray:
    out = np.full((len(encoded), layout.width), np.nan, np.float32)
    codec.decode(encoded, out)
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", COLD)
def test_bytes_are_found_again_and_state_is_exact(name: str, layout: RecordLayout) -> None:
    codec, rows = COLD[name](layout), records(layout)
    encoded = codec.encode(rows)
    assert encoded.shape == (len(rows), codec.bytes_per_record)
    back = decoded(codec, encoded, layout)
    assert (codec.encode(back) == encoded).all(), "a row in a checkpoint would not be the row of the run"
    state = (part[:, layout.dim :].view(np.uint32) for part in (rows, back))
    assert np.array_equal(*state)
    alone = np.concatenate([codec.encode(rows[i : i + 1]) for i in range(0, len(rows), 97)])
    assert (alone == encoded[::97]).all(), "a row's bytes depend on the rows beside it"
    broken = ~np.isfinite(rows[:, : layout.dim]).all(1)
    assert broken.any()
    assert (~np.isfinite(back[broken, : layout.dim])).any(1).all(), "a fault would be hidden"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", COLD)
def test_rounding_without_bytes_gives_the_same_bits(name: str, layout: RecordLayout) -> None:
    """As on a GPU, from tensors that stay there."""
    codec, rows = COLD[name](layout), records(layout)
    back = decoded(codec, codec.encode(rows), layout)
    there = codec.rounded(torch.from_numpy(rows)).numpy()
    same = (back.view(np.uint32) == there.view(np.uint32)) | (np.isnan(back) & np.isnan(there))
    assert same.all()
    assert np.array_equal(there[:, layout.dim :].view(np.uint32), rows[:, layout.dim :].view(np.uint32))


def test_errors_are_within_what_is_said() -> None:
    layout = RecordLayout(16, 16)
    rows = records(layout)
    rows = rows[(np.abs(rows) < 2.0**127).all(1)].astype(np.float64)
    largest = np.abs(rows).max(1)

    def errors(codec: WeightCodec) -> np.ndarray:
        back = decoded(codec, codec.encode(rows.astype(np.float32)), layout)
        return np.abs(back - rows)

    normal = (np.abs(rows) >= 2**-14) & (np.abs(rows) <= 65504)
    assert (errors(Fp16Rows(layout))[normal] <= np.abs(rows[normal]) * 2**-11).all()
    normal = (np.abs(rows) >= 2.0**-126) & (np.abs(rows) < 3e38)
    assert (errors(Bf16Rows(layout))[normal] <= np.abs(rows[normal]) * 2**-8).all()
    span = rows.max(1) - rows.min(1)
    bound = np.maximum(span / 510 * (1 + 2**-15), largest * 2**-14) + 255 * 2.0**-126
    assert (errors(Int8Rows(layout)).max(1) <= bound).all()
    usual = errors(Int8Rows(layout))[:400].mean() / span[:400].mean()
    assert usual < 1 / 255 / 3, "most of a row's 255 steps are used"


def test_int8_is_laid_out_as_fbgemm_does() -> None:
    import fbgemm_gpu  # noqa: F401
    import torch

    layout = RecordLayout(16, 16)
    rows = records(layout)[:400]
    encoded = Int8Rows(layout).encode(rows)
    theirs = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(torch.from_numpy(encoded)).numpy()
    assert np.array_equal(theirs, decoded(Int8Rows(layout), encoded, layout))


def test_state_of_eight_bits_would_be_noticed() -> None:
    """Control: a codec that takes the optimizer's state for weights."""
    layout = RecordLayout(16, 17)
    codec = Int8Rows(RecordLayout(17, 17))
    rows = records(layout)[:400]
    back = decoded(codec, codec.encode(rows), layout)
    assert not np.array_equal(back[:, 16:], rows[:, 16:])
