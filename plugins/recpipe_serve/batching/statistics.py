"""How many requests a model has had, and how long they took, as Triton counts it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE = ("compute_input", "compute_infer", "compute_output")
SHARED = 0.2
"""Seconds from one time that a worker lets the others see its figures to the next one."""


class Took(NamedTuple):
    """A batch: its requests and samples, and the seconds that its requests waited (all together), and that
    were taken to put them together, to score them, and to answer them."""

    requests: int
    samples: int
    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float


@dataclass
class Statistics:
    """Totals of one process. Times are seconds; those of a request's stages are those of its batch."""

    last: int = 0
    """When a request was answered last, in milliseconds of the epoch."""
    successes: int = 0
    success: float = 0.0
    """Seconds of all of these."""
    failures: int = 0
    fail: float = 0.0
    batches: int = 0
    requests: int = 0
    """Of the batches."""
    samples: int = 0
    queue: float = 0.0
    compute_input: float = 0.0
    compute_infer: float = 0.0
    compute_output: float = 0.0
    sizes: dict[int, list[float]] = field(default_factory=dict)
    """By the samples of a batch: how many there were, and the seconds of its three stages."""

    def answered(self, status: int, seconds: float) -> None:
        """Count a request that was answered with HTTP's ``status`` after so many ``seconds``."""
        if status == 200:
            self.successes += 1
            self.success += seconds
        else:
            self.failures += 1
            self.fail += seconds
        self.last = time.time_ns() // 1_000_000

    def took(self, batch: Took) -> None:
        """Count a batch that was scored."""
        requests, samples, queue, put_together, infer, output = batch
        self.batches += 1
        self.requests += requests
        self.samples += samples
        self.queue += queue
        self.compute_input += put_together * requests
        self.compute_infer += infer * requests
        self.compute_output += output * requests
        size = self.sizes.get(samples)
        if size is None:
            self.sizes[samples] = size = [0, 0.0, 0.0, 0.0]
        size[0] += 1
        size[1] += put_together
        size[2] += infer
        size[3] += output

    def add(self, other: Statistics) -> None:
        """Take in another process's."""
        for own in fields(self):
            if own.name not in ("last", "sizes"):
                setattr(self, own.name, getattr(self, own.name) + getattr(other, own.name))
        self.last = max(self.last, other.last)
        for size, values in other.sizes.items():
            mine = self.sizes.get(size, [0, 0.0, 0.0, 0.0])
            self.sizes[size] = [a + b for a, b in zip(mine, values, strict=True)]

    def told(self, name: str, version: str) -> dict[str, Any]:
        """Triton's ``ModelStatistics``."""

        def duration(count: float, seconds: float) -> dict[str, int]:
            return {"count": int(count), "ns": round(1e9 * seconds)}

        stages = {what: duration(self.requests, getattr(self, what)) for what in ("queue", *COMPUTE)}
        outcomes = {
            "success": duration(self.successes, self.success),
            "fail": duration(self.failures, self.fail),
        }
        return {
            "name": name,
            "version": version,
            "last_inference": self.last,
            "inference_count": self.samples,
            "execution_count": self.batches,
            "inference_stats": outcomes | stages,
            "batch_stats": [
                {"batch_size": size} | {what: duration(own[0], own[1 + n]) for n, what in enumerate(COMPUTE)}
                for size, own in sorted(self.sizes.items())
            ],
        }


class SharedStatistics:
    """The statistics of this process ``number``, and those of all that have this ``folder``: each writes its
    own there now and then, and one that is started again goes on where it was. None: there is one process."""

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        self.folder, self.number = folder, number
        self.own = Statistics()
        if folder is not None:
            for found in self._read([self._file(number)]):
                self.own = found
        self._written = -1

    def _file(self, number: int | str) -> Path:
        assert self.folder is not None
        return self.folder / f"statistics-{number}.json"

    def share(self) -> None:
        """Let the others see what has been counted."""
        own = self.own
        counted = own.successes + own.failures
        if self.folder is None or counted == self._written:
            return
        self._written = counted
        file = self._file(self.number)
        beside = file.with_suffix(".new")  # nobody reads half of it
        beside.write_text(json.dumps(vars(own)))
        beside.replace(file)

    def all(self) -> Statistics:
        """Of all processes; the others' are some tenths of a second old."""
        total = Statistics()
        total.add(self.own)
        if self.folder is not None:
            mine = self._file(self.number)
            others = [file for file in self.folder.glob(self._file("*").name) if file != mine]
            for found in self._read(others):
                total.add(found)
        return total

    def _read(self, files: Iterable[Path]) -> list[Statistics]:
        found = []
        for file in files:
            if file.is_file():
                told = json.loads(file.read_bytes())
                told["sizes"] = {int(size): values for size, values in told["sizes"].items()}
                found.append(Statistics(**told))
        return found
