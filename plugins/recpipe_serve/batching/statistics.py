"""How many requests a model has had, and how long they took, as Triton counts it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
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
    samples: int = 0
    batches: int = 0
    requests: dict[str, list[float]] = field(
        default_factory=lambda: {name: [0, 0.0] for name in ("success", "fail", *STAGES)}
    )
    """How many requests, and their seconds."""
    sizes: dict[int, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0, 0.0, 0.0]))
    """By the samples of a batch: how many there were, and the seconds of its three stages."""

    def answered(self, status: int, seconds: float) -> None:
        """Count a request that was answered with HTTP's ``status`` after so many ``seconds``."""
        own = self.requests["success" if status == 200 else "fail"]
        own[0] += 1
        own[1] += seconds
        self.last = time.time_ns() // 1_000_000

    def took(self, batch: Took) -> None:
        """Count a batch that was scored."""
        self.batches += 1
        self.samples += batch.samples
        for name in STAGES:
            own, seconds = self.requests[name], getattr(batch, name)
            own[0] += batch.requests
            own[1] += seconds if name == "queue" else seconds * batch.requests
        size = self.sizes[batch.samples]
        size[0] += 1
        size[1] += batch.compute_input
        size[2] += batch.compute_infer
        size[3] += batch.compute_output

    def add(self, other: Statistics) -> None:
        """Take in another process's."""
        self.last = max(self.last, other.last)
        self.samples += other.samples
        self.batches += other.batches
        for name, values in other.requests.items():
            self.requests[name] = [a + b for a, b in zip(self.requests[name], values, strict=True)]
        for size, values in other.sizes.items():
            self.sizes[size] = [a + b for a, b in zip(self.sizes[size], values, strict=True)]

    def told(self, name: str, version: str) -> dict[str, Any]:
        """Triton's ``ModelStatistics``."""

        def duration(count: float, seconds: float) -> dict[str, int]:
            return {"count": int(count), "ns": round(1e9 * seconds)}

        return {
            "name": name,
            "version": version,
            "last_inference": self.last,
            "inference_count": self.samples,
            "execution_count": self.batches,
            "inference_stats": {what: duration(*own) for what, own in self.requests.items()},
            "batch_stats": [
                {"batch_size": size}
                | {what: duration(own[0], own[1 + n]) for n, what in enumerate(STAGES[1:])}
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
        counted = int(own.requests["success"][0] + own.requests["fail"][0])
        if self.folder is None or counted == self._written:
            return
        self._written = counted
        file = self._file(self.number)
        beside = file.with_suffix(".new")  # nobody reads half of it
        beside.write_text(json.dumps(vars(own)))
        beside.replace(file)

    async def keep_sharing(self) -> None:
        """Do so again and again."""
        while self.folder is not None:
            await asyncio.sleep(SHARED)
            self.share()

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
                own = Statistics(told["last"], told["samples"], told["batches"], told["requests"])
                own.sizes.update({int(size): values for size, values in told["sizes"].items()})
                found.append(own)
        return found
