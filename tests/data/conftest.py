"""Made-up Criteo rows, and a slow parser of them that says what the quick one must give."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recpipe.data.config import CriteoConfig

TABLES = {f"C{index}": 50 * index + 2 for index in range(1, 27)}
MASK = 2**64 - 1


def make_row(rng: random.Random) -> str:
    """One row: about a fifth of the fields missing, ids of 1 to 16 hexadecimal digits."""
    dense = ["" if rng.random() < 0.2 else str(rng.randint(-3, 10**6)) for _ in range(13)]
    ids = ["" if rng.random() < 0.2 else f"{rng.getrandbits(rng.choice([4, 32, 64])):08x}" for _ in range(26)]
    return "\t".join([str(rng.randint(0, 1)), *dense, *ids])


def mix(key: int) -> int:
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK
    return key ^ (key >> 31)


def reference(line: str, tables: dict[str, int]) -> tuple[float, list[float], list[int]]:
    """Label, dense values and ids of one row, by Python's own arithmetic."""
    label, *fields = line.rstrip("\r\n").split("\t")
    values = [float(field or 0) for field in fields[:13]]
    dense = [math.copysign(math.log1p(abs(value)), value) for value in values]
    ids = [
        1 + mix(int(field, 16)) % (rows - 1) if field else 0
        for field, rows in zip(fields[13:], tables.values(), strict=True)
    ]
    return float(label), dense, ids


def assert_matches(dataset, lines: list[str], tables: dict[str, int]) -> None:
    """Both splits of ``dataset``, one after the other, hold exactly ``lines``."""
    batches = [batch for split in ("train", "eval") for batch in dataset.batches(split, 997)]
    wanted = [reference(line, tables) for line in lines]
    labels = np.concatenate([batch.labels.numpy() for batch in batches])
    dense = np.concatenate([batch.dense.numpy() for batch in batches])
    ids = np.concatenate([batch.sparse.values().view(26, -1).T.numpy() for batch in batches])
    np.testing.assert_array_equal(labels, np.array([row[0] for row in wanted], np.float32))
    np.testing.assert_allclose(dense, np.array([row[1] for row in wanted], np.float32), rtol=1e-6)
    np.testing.assert_array_equal(ids, np.array([row[2] for row in wanted]))


@pytest.fixture
def rows() -> list[str]:
    rng = random.Random(7)
    return [make_row(rng) for _ in range(300)]


@pytest.fixture
def criteo(tmp_path: Path) -> Callable[..., CriteoConfig]:
    """``criteo(path, **settings)``: a recipe with small tables and a cache of the test's own."""

    def config(path: object, **settings: object) -> CriteoConfig:
        values = {"tables": dict(TABLES), "cache_dir": str(tmp_path / "cache"), **settings}
        return CriteoConfig(path=path, **values)

    return config
