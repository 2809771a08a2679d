"""The loader's lookups, against torch's own, for every type of row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import embedding_bag

from recpipe.answers.score import Lookup, Tables, tensors

BAGS = 5


def fused(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows as FBGEMM's lookup reads them: scale and bias first."""
    made = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weights, bits)
    return torch.cat([made[:, -4:], made[:, :-4]], dim=1)


ROWS = {
    "fp32": lambda w: w.view(torch.uint8),
    "fp16": lambda w: w.half().view(torch.uint8),
    "int8": lambda w: fused(w, 8),
    "int4": lambda w: fused(w, 4),
    "int2": lambda w: fused(w, 2),
}
ERROR = {"fp32": 1e-6, "fp16": 1e-2, "int8": 5e-2, "int4": 0.8, "int2": 4.0}
"""Largest error of the sum of some rows of normal numbers."""


def placed(tmp_path: Path, weights: dict[str, torch.Tensor], kinds: dict[str, str]) -> Tables:
    about = {}
    for name, own in weights.items():
        save_file({"rows": ROWS[kinds[name]](own).contiguous()}, tmp_path / f"{name}.safetensors")
        about[name] = {"type": kinds[name], "dimension": own.shape[1], "file": f"{name}.safetensors"}
    return Tables(tmp_path, about)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_type_beside_float32_in_any_order(tmp_path: Path, kind: str, pooling: str) -> None:
    torch.manual_seed(0)
    weights = {"t": torch.randn(40, 8), "u": torch.randn(30, 16), "v": torch.randn(20, 8)}
    tables = placed(tmp_path, weights, {"t": kind, "u": "fp32", "v": kind})
    parts = [["c", "v"], ["a", "t"], ["a", "u"]]
    lookup = Lookup({"pooling": pooling, "parts": parts}, ["a", "b", "c"], tables)
    lengths = torch.tensor([[1, 0, 3, 2, 7], [1, 1, 1, 1, 1], [0, 4, 1, 1, 2]])
    ids = torch.randint(0, 20, (int(lengths.sum()),))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    wanted = []
    for feature, table in parts:
        place = "abc".index(feature)
        low, high = int(offsets[place * BAGS]), int(offsets[(place + 1) * BAGS])
        own = offsets[place * BAGS : (place + 1) * BAGS + 1] - low
        wanted.append(
            embedding_bag(ids[low:high], weights[table], own, mode=pooling, include_last_offset=True)
        )
    found = lookup(ids, offsets, BAGS)
    assert float((found - torch.cat(wanted, 1)).abs().max()) <= ERROR[kind]
    torch.testing.assert_close(found[:, 16:], wanted[2])
    assert lookup(ids[:0], torch.zeros(1, dtype=torch.int64), 0).shape == (0, 32)


def test_pruned_rows_add_nothing(tmp_path: Path) -> None:
    weights = torch.randn(6, 4)
    kept = torch.tensor([True, False, True, True, False, True])
    places = torch.where(kept, kept.cumsum(0) - 1, -1).int()
    save_file({"rows": weights[kept].view(torch.uint8), "places": places}, tmp_path / "t.safetensors")
    save_file({"rows": torch.ones(3, 4).view(torch.uint8)}, tmp_path / "u.safetensors")
    about = {t: {"type": "fp32", "dimension": 4, "file": f"{t}.safetensors"} for t in ("t", "u")}
    lookup = Lookup(
        {"pooling": "sum", "parts": [["a", "t"], ["b", "u"]]},
        ["a", "b"],
        Tables(tmp_path, about),
    )
    ids, offsets = torch.tensor([0, 1, 4, 5, 2, 2]), torch.tensor([0, 2, 3, 4, 5, 5, 6])
    found = lookup(ids, offsets, 3)
    assert found[:, :4].equal(torch.stack([weights[0], torch.zeros(4), weights[5]]))
    assert found[:, 4:].equal(torch.tensor([1.0, 0.0, 1.0]).unsqueeze(1).expand(3, 4))


def test_safetensors_files_are_read_as_the_library_writes_them(tmp_path: Path) -> None:
    kept = {
        "a": torch.randn(3, 5),
        "b": torch.arange(4),
        "c": torch.tensor(2.5, dtype=torch.float64),
        "d": torch.tensor([True, False]),
        "e": torch.randn(7).half(),
    }
    save_file(kept, tmp_path / "x.safetensors", {"note": "yes"})
    found = tensors(tmp_path / "x.safetensors")
    assert found.keys() == kept.keys()
    assert all(found[name].equal(value) and found[name].dtype == value.dtype for name, value in kept.items())
