"""Watches a served model: its scores, its ids, and its quality as labels arrive, against the package's
reference figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.answers import figures as drift
from recpipe.errors import shown
from recpipe_serve.batching.scorer import Side
from recpipe_serve.errors import bad
from recpipe_serve.monitor import labels as later
from recpipe_serve.monitor.compared import Compared, compare, judged_labels
from recpipe_serve.monitor.windows import (
    AGAIN,
    JOINED,
    LABELLED,
    REFUSED,
    SCORED,
    TOTALLED,
    UNKNOWN,
    Kept,
    Sizes,
    Windows,
)

AT_ONCE = 64
"""Requests whose labels are joined before others have their turn."""


@dataclass(frozen=True)
class Watch:
    """How a served model is watched."""

    window: int = 10_000
    """The latest samples, scored or labelled, over which figures are computed, of each worker."""
    kept: int = 1_000_000
    """Samples of requests with an id whose scores are kept until their labels come, of each worker."""
    drift: float = 0.2
    """The population stability index above which scores or ids are said to be off."""
    folder: Path | None = None
    """Where the workers of a server share what they see; None: there is one."""
    number: int = 0
    """This worker's."""


class Monitor:
    """What one worker sees of the model of the package with ``manifest``, and what the others see of it."""

    def __init__(self, manifest: Mapping[str, Any], watch: Watch) -> None:
        self.manifest, self.watch = manifest, watch
        self.tasks = {output["name"]: output["kind"] for output in manifest["outputs"]}
        self._features = len(manifest["sparse"])
        self._reference = manifest.get("reference")
        sizes = Sizes(len(self.tasks), self._features, watch.window, watch.kept, drift.BINS)
        self._package = blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=8).hexdigest()
        self._file = watch.folder and watch.folder / f"{self._package}.{watch.number}.windows"
        self.mine = Windows(sizes, self._file)
        self._others: dict[Path, Windows] = {}
        self._lock, self._totalling = Lock(), Lock()
        self._judged: tuple[int, dict[str, Any]] | None = None

    def close(self) -> None:
        """Leave nothing behind for others."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def saw(self, sides: Sequence[Side], scores: NDArray[np.float32]) -> None:
        """Take in a batch: its ids, and its scores [B] or [B, T]."""
        each, first = np.zeros(self._features), np.zeros(self._features)
        for side in sides:
            if side.given_lengths is None:
                missing = (side.ids.numpy() == 0).reshape(len(side.features), -1)
                features = list(side.features)
                each[features] = len(scores)
                if side.of_sample is None:
                    first[features] = missing.sum(axis=1)
                else:
                    first[features] = missing @ np.bincount(side.of_sample.numpy(), minlength=side.bags)
                continue
            lengths = side.lengths.numpy()
            of_bags, features = lengths.reshape(len(side.features), -1), list(side.features)
            if side.of_sample is None:
                each[features] = own = of_bags.sum(axis=1)
                first[features] = drift.first_rows(side.ids.numpy(), 1, own)
                continue
            shares = np.bincount(side.of_sample.numpy(), minlength=side.bags)
            weights = np.repeat(np.tile(shares, len(features)), lengths)
            each[features] = of_bags @ shares
            first[features] = drift.first_rows(side.ids.numpy(), weights, of_bags.sum(axis=1))
        columns = scores.reshape(len(scores), -1)
        for start in range(0, len(columns), self.watch.window):
            part = columns[start : start + self.watch.window]
            heads, share = self.mine.heads, len(part) / len(columns)
            if heads[SCORED] + len(part) - heads[TOTALLED] > self.watch.window:
                self._total()
            self.mine.add(part, each * share, first * share)

    def keep(self, ident: str, scores: NDArray[np.float32]) -> None:
        """Keep the scores [N, T] of the request ``ident`` for its labels."""
        self.mine.keep(ident, scores)

    def wrong_ids(self, counts: NDArray[np.int64]) -> None:
        """Count ids out of range, ``counts`` [F] of each feature."""
        self.mine.wrong += counts

    def refused(self) -> None:
        """Count a body of labels that could not be used."""
        self.mine.posted[REFUSED] += 1

    async def labelled(self, body: bytes) -> dict[str, int]:
        """Join the labels in ``body`` with the scores that are kept, all of them or none. How many requests
        were ``joined``, ``unknown`` (never seen here, or no longer kept), or joined ``again``, which changes
        nothing; and the number of ``samples`` joined. ``Refused`` for a body that cannot be used."""
        found: list[tuple[Kept, later.Labels]] = []
        counts = dict.fromkeys(("joined", "unknown", "again", "samples"), 0)
        windows = self._windows()
        for number, entry in enumerate(later.listed(body)):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            labels = later.read(entry, self.tasks)
            kept = next(filter(None, (own.find(labels.id) for own in windows)), None)
            if kept is None:
                counts["unknown"] += 1
                continue
            if len(kept.scores) != len(labels.values):
                raise bad(
                    f"request '{shown(labels.id)}' has {len(kept.scores)} samples, and "
                    f"{len(labels.values)} labels came for it"
                )
            found.append((kept, labels))
        for kept, labels in found:
            if kept.joined():
                counts["again"] += 1
                continue
            counts["joined"] += 1
            counts["samples"] += len(labels.values)
            self.mine.add_pairs(kept.scores, labels.values)
        for place, name in ((JOINED, "joined"), (UNKNOWN, "unknown"), (AGAIN, "again")):
            self.mine.posted[place] += counts[name]
        return counts

    def compared(self) -> Compared:
        """All figures, of all workers, against the reference, in some milliseconds. May be called from any
        thread."""
        with self._lock:
            windows = self._windows()
            self._total()
            return compare(self.manifest, self.watch.drift, windows, self._quality(windows))

    def _quality(self, windows: Sequence[Windows]) -> dict[str, Any]:
        """The figures of the labels that have come, computed anew if there are new ones."""
        labelled = sum(int(own.heads[LABELLED]) for own in windows)
        if self._judged is None or self._judged[0] != labelled:
            pairs = [own.latest(LABELLED) for own in windows]
            self._judged = labelled, judged_labels(self.tasks, pairs)
        return self._judged[1]

    def _total(self) -> None:
        """Bring this worker's totals up to date."""
        with self._totalling:
            scores = self.mine.not_totalled()
            for n, (task, kind) in enumerate(self.tasks.items()):
                own, total = scores[:, n], self.mine.totals[n]
                inner = self._reference["tasks"][task]["edges"] if self._reference else []
                total[: len(inner) + 1] += drift.histogram(own, inner)
                total[-1] += np.nansum(drift.predictions(kind, own))

    def _windows(self) -> list[Windows]:
        """The arrays of all workers."""
        if self.watch.folder is not None:
            for file in sorted(self.watch.folder.glob(f"{self._package}.*.windows")):
                if file != self._file and file not in self._others:
                    self._others[file] = Windows(self.mine.sizes, file)
        return [self.mine, *self._others.values()]
