"""A model is quantized in memory that does not grow with its tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from recpipe_low_precision import lookups
from recpipe_low_precision.row_types import FLOAT, Choice

import recpipe
from recpipe.answers.stored import FloatCheckpoint
from tests.quantizing import SMALL

ROWS, DIM = 1_000_000, 16


@contextmanager
def growth(found: list[int]) -> Iterator[None]:
    """Appends to ``found`` the bytes by which this process has been larger in the block than before."""
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is that of the block
    before = resident("VmHWM")
    yield
    found.append(resident("VmHWM") - before)


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def quantized(checkpoint: Path | str | None, output: Path) -> dict[str, Any]:
    assert checkpoint is not None
    words = ("types=[int8]", "dense=float32", "bound=1", "prune=true")
    mine = [f"plugins.low_precision.{word}" for word in words]
    return recpipe.quantize(checkpoint, None, "+plugin=low_precision", *mine, output=output, quiet=True)


@pytest.mark.soak
def test_memory_does_not_grow_with_the_tables(checkpoint: Path, tmp_path: Path) -> None:
    """And the measure sees it where it does: in a model that is loaded."""
    quantized(checkpoint, tmp_path / "small")  # imports, threads and buffers are there from now on
    words = (*SMALL, f"data.tables={{d: {ROWS}}}", "data.samples=2000", "optim=sgd")
    with recpipe.train(None, None, *words, output=tmp_path / "run", quiet=True) as run:
        trained = run.checkpoint
    found: list[int] = []
    with growth(found):
        made = quantized(trained, tmp_path / "q")
    assert made["bytes"]["float32"] > 4 * DIM * ROWS
    with growth(found):
        model = recpipe.load(str(trained))
    assert isinstance(model, torch.nn.Module)
    per_row = [size / ROWS for size in found]
    assert per_row[0] < 20
    assert per_row[1] > 0.5 * 4 * DIM


@pytest.mark.parametrize(
    "most",
    [
        100_000,
        # The same lookups, of tables that are not cut.
        pytest.param(1 << 30, marks=pytest.mark.soak),
    ],
)
def test_lookups_are_timed_in_tables_of_bounded_size(
    slice_of: Any, source: FloatCheckpoint, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Small tables as they are, and large ones with ids counted on from their first row."""
    monkeypatch.setattr(lookups, "LARGEST_BYTES", most)
    made, seen = lookups._lookups, []

    def noted(stub, configs, choices, asked):  # type: ignore[no-untyped-def]
        seen.append({c.name: c.num_embeddings for c in configs})
        for features, before in zip(asked, stub.asked, strict=True):
            for c in configs:
                for name in c.feature_names:
                    assert features[name].values().equal(before[name].values() % c.num_embeddings)
                    assert features[name].lengths().equal(before[name].lengths())
        return made(stub, configs, choices, asked)

    monkeypatch.setattr(lookups, "_lookups", noted)
    slice_ = slice_of(0, 300)
    assert lookups.compare(slice_, dict.fromkeys(slice_.tables, Choice("int8"))).ratio > 0
    large = 4000 if most > 100_000 else (100_000 - 64 * (300 + 90 + 40)) // 64
    assert seen == [{"a": 300, "b": 90, "c": 40, "d": large}] * 2
    seen.clear()
    rounds = lookups.rounds_of(slice_, [FLOAT, Choice("int8"), Choice("int8", True)], lambda *_: True)
    assert seen[-2:] == [{"d": 4000 if most > 100_000 else 1562}] * 2
    assert len(seen) == 2 * len(slice_.tables), "a pruned table is timed as a whole one"
    assert rounds["d", Choice("int8")] == rounds["d", Choice("int8", True)]
