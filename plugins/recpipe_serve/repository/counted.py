"""Where requests for a model went, and what its shadow gave beside what was answered, of all workers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recpipe_serve.batching.forms import Array


@dataclass
class Compared:
    """Sums over samples of one output."""

    answered: float = 0.0
    shadow: float = 0.0
    apart: float = 0.0
    most: float = 0.0

    def add(self, other: Compared) -> None:
        """Take in another process's."""
        self.answered += other.answered
        self.shadow += other.shadow
        self.apart += other.apart
        self.most = max(self.most, other.most)

    def told(self, samples: int) -> dict[str, float | None]:
        """Of so many ``samples``, for people."""
        sums = {"mean": self.answered, "shadow_mean": self.shadow, "mean_difference": self.apart}
        means: dict[str, float | None] = {of: one / samples if samples else None for of, one in sums.items()}
        return means | {"largest_difference": self.most if samples else None}


@dataclass
class Routed:
    """Totals of one process since requests go as they do."""

    by: Counter[int] = field(default_factory=Counter)
    """Requests without a version, by the one that answered them."""
    requests: int = 0
    """Those that the shadow has scored."""
    samples: int = 0
    failed: int = 0
    dropped: int = 0
    """Those that the shadow had no time for: nobody waits because of it."""
    outputs: dict[str, Compared] = field(default_factory=dict)

    def compared(self, names: Sequence[str], answered: Array, shadow: Array) -> None:
        """The outputs [N, T] of these ``names`` that were answered, and those of the shadow."""
        self.requests += 1
        self.samples += len(answered)
        for place, name in enumerate(names):
            one, other = (own[:, place].astype(np.float64) for own in (answered, shadow))
            apart = np.abs(other - one)
            sums = Compared(float(one.sum()), float(other.sum()), float(apart.sum()), float(apart.max()))
            self.outputs.setdefault(name, Compared()).add(sums)

    def add(self, other: Routed) -> None:
        """Take in another process's."""
        self.by += other.by
        for name in ("requests", "samples", "failed", "dropped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, own in other.outputs.items():
            self.outputs.setdefault(name, Compared()).add(own)


class SharedRouted:
    """What this process has ``routed``, and all have that share the ``folder``, where it is the one of this
    ``number``; None: there is one. Each writes its own there now and then."""

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        self._folder, self._number = folder, number
        self._where, self.own = "", Routed()

    def begin(self, where: str) -> None:
        """Count anew: requests go as ``where`` says from now on."""
        self._where, self.own = where, Routed()
        if self._folder is not None:
            for found in self._read([self._file(self._number)]):
                self.own = found  # of a process in whose place this one is

    def _file(self, number: int | str) -> Path:
        assert self._folder is not None
        return self._folder / f"routed-{number}.json"

    def share(self) -> None:
        """Let the others see what has been counted."""
        if self._folder is None:
            return
        file = self._file(self._number)
        beside = file.with_suffix(".new")  # nobody reads half of it
        outputs = {name: vars(own) for name, own in self.own.outputs.items()}
        beside.write_text(json.dumps({"where": self._where, **vars(self.own), "outputs": outputs}))
        beside.replace(file)

    def all(self) -> Routed:
        """Of all processes; the others' are some tenths of a second old."""
        total = Routed()
        total.add(self.own)
        if self._folder is not None:
            mine = self._file(self._number)
            for found in self._read(sorted(set(self._folder.glob(self._file("*").name)) - {mine})):
                total.add(found)
        return total

    def _read(self, files: Sequence[Path]) -> list[Routed]:
        """What processes have counted for whom requests go as they do here."""
        told = [json.loads(file.read_bytes()) for file in files if file.is_file()]
        return [_routed(own) for own in told if own.pop("where") == self._where]


def _routed(told: Mapping[str, object]) -> Routed:
    found = Routed(**told)  # type: ignore[arg-type]
    found.by = Counter({int(version): count for version, count in found.by.items()})
    found.outputs = {name: Compared(**own) for name, own in found.outputs.items()}  # type: ignore[arg-type]
    return found
