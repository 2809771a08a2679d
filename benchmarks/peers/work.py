"""The one work that every side trains: model sizes, tables, clicks in files, and the clock.

Peers run in interpreters of their own, so this needs numpy and torch alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
DENSE = 13
ROWS = (
    *(1460, 583, 1000000, 1000000, 305, 24, 12517, 633, 3, 93145, 5683, 1000000, 3194),
    *(27, 14992, 1000000, 10, 5652, 2173, 4, 1000000, 18, 15, 286181, 105, 142572),
)
TABLES = {f"C{number}": rows for number, rows in enumerate(ROWS, 1)}
"""Rows of the 26 one-hot features' tables."""
ZIPF = 1.12
"""The r-th most popular row of a table is drawn in proportion to r^-ZIPF."""
LEARNING_RATE = 0.02
EPSILON = 1e-8
"""Of the tables' row-wise Adagrad."""
SKIPPED = 10
"""First steps of a run that are not counted, as recpipe leaves them out of its own figure."""


@dataclass(frozen=True)
class Setting:
    """A DLRM's sizes: hidden layers (the bottom MLP goes on to ``dim``, the top one to 1), samples a step."""

    dim: int
    batch: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


SETTINGS = {
    "small": Setting(16, 2048, (512, 256, 64), (512, 256)),
    "large": Setting(64, 8192, (512, 256), (512, 256)),
    "tiny": Setting(16, 2048, (64,), (64,)),
    **{
        f"dim{dim}-batch{batch}": Setting(dim, batch, (512, 256, 64), (512, 256))
        for dim in (16, 64)
        for batch in (128, 512, 2048, 8192)
    },
}
"""``tiny`` has next to no GEMMs: there a framework's own cost shows most. The last ones are a grid."""


class Batch(NamedTuple):
    """Dense float32 [B, 13], ids int64 [26, B], labels float32 [B], all in memory."""

    dense: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor


def as_is(batch: Batch) -> Batch:
    """For peers that take a batch as it is."""
    return batch


@dataclass(frozen=True)
class Work:
    """What ``write`` left in a directory, in memory, as batches."""

    setting: Setting
    tables: dict[str, int]
    batches: list[Batch]

    @classmethod
    def load(cls, directory: Path, batch: int | None = None) -> Work:
        """Read whole batches of ``batch`` samples, by default the setting's."""
        import torch

        setting = setting_of(directory)
        size = batch or setting.batch
        dense, ids, labels = (
            torch.from_numpy(np.load(directory / f"day_0_{part}.npy"))
            for part in ("dense", "sparse", "labels")
        )
        batches = [
            Batch(
                dense[low : low + size].clone(),
                ids[low : low + size].T.long().contiguous(),
                labels[low : low + size, 0].float(),
            )
            for low in range(0, len(labels) - size + 1, size)
        ]
        return cls(setting, TABLES, batches)


class Clock(Generic[T]):
    """A work's batches, each in the ``shape`` that a peer takes it in, made before the clock runs; and the
    time from the first counted step to the end."""

    def __init__(self, work: Work, shape: Callable[[Batch], T]) -> None:
        if len(work.batches) <= SKIPPED:
            raise SystemExit(f"{len(work.batches)} steps: {SKIPPED} are not counted, so give more")
        self.batch = work.setting.batch
        self.items = [shape(batch) for batch in work.batches]
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        started = 0.0
        for number, item in enumerate(self.items):
            if number == SKIPPED:
                started = perf_counter()
            yield item
        self.seconds = perf_counter() - started

    def report(self, *packages: str, **more: Any) -> None:
        """Print a run's result in one line: samples per second, and what it ran on."""
        speed = (len(self) - SKIPPED) * self.batch / self.seconds
        print(json.dumps({"samples_per_second": speed, "versions": versions("torch", *packages), **more}))


def setting_of(directory: Path) -> Setting:
    """That of the work in a directory."""
    return SETTINGS[json.loads((directory / "work.json").read_text())["setting"]]


def versions(*packages: str) -> dict[str, str]:
    """Installed versions, as far as the packages are installed as such."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(directory: Path, name: str, steps: int) -> None:
    """``steps`` batches of setting ``name`` as one of TorchRec's .npy triples.

    Popular rows lie scattered over their table; a click depends on all features by a planted logistic model.
    """
    samples, rng = steps * SETTINGS[name].batch, np.random.default_rng(1)
    dense = rng.standard_normal((samples, DENSE), np.float32)
    score = dense @ rng.normal(0, 0.2, DENSE).astype(np.float32) - 1
    ids = np.empty((samples, len(TABLES)), np.int32)
    for column, rows in enumerate(TABLES.values()):
        shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
        ranks = np.searchsorted(shares, rng.random(samples) * shares[-1])
        ids[:, column] = rng.permutation(rows)[ranks]
        score += rng.normal(0, 0.2, rows).astype(np.float32)[ids[:, column]]
    labels = rng.random(samples) < 1 / (1 + np.exp(-score))
    directory.mkdir(parents=True, exist_ok=True)
    for part, values in (("dense", dense), ("sparse", ids), ("labels", labels.astype(np.int32)[:, None])):
        np.save(directory / f"day_0_{part}.npy", values)
    (directory / "work.json").write_text(json.dumps({"setting": name}))
