"""Watches a served model: its scores, its ids, and its quality as labels arrive, which clients send later,
against the package's reference figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.answers import figures as drift
from recpipe.answers.score import DEFAULT_ROW
from recpipe.errors import shown
from recpipe.model.scores import Kind
from recpipe_serve.batching.scorer import Side
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import bad
from recpipe_serve.monitor.compared import Compared, compare, judged_labels
from recpipe_serve.monitor.windows import (
    AGAIN,
    ALL_IDS,
    JOINED,
    LABELLED,
    MISSING,
    SCORED,
    TOTALLED,
    UNKNOWN,
    UNKNOWN_IDS,
    Kept,
    Sizes,
    Windows,
    put,
)

AT_ONCE = 64
"""Requests whose labels are joined before others have their turn."""
MOST = 10_000
"""Most requests whose labels one body has."""
_ALLOWED = {
    "clicks": "0, 1 or null (not known)",
    "counts": "a number of at least 0, or null (not known)",
    "values": "a number, or null (not known)",
    "ranking": "a number, or null (not known)",
}


class Monitor:
    """What one worker sees of the model of the package with ``manifest``, and what the others see of it."""

    def __init__(
        self, manifest: Mapping[str, Any], config: ServeConfig, folder: Path | None = None, number: int = 0
    ) -> None:
        """``folder``: where the workers of a server share what they see, of which this is the one of this
        ``number``; None: there is one."""
        self.manifest, self.config, self.folder = manifest, config, folder
        self.tasks = {output["name"]: output["kind"] for output in manifest["outputs"]}
        self._features = len(manifest["sparse"])
        self._grows = np.array(["map" in feature for feature in manifest["sparse"]], bool)
        self._grow = bool(self._grows.any())
        self._reference = manifest.get("reference")
        sizes = Sizes(len(self.tasks), self._features, config.window, config.kept, drift.BINS)
        self._package = blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=8).hexdigest()
        self._file = folder and folder / f"{self._package}.{number}.windows"
        self.mine = Windows(sizes, self._file)
        self._others: dict[Path, Windows] = {}
        self._lock, self._totalling = Lock(), Lock()
        self._judged: tuple[int, dict[str, Any]] | None = None
        """How many labels had come, and the figures of them."""

    def close(self) -> None:
        """Leave nothing behind for others."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def saw(self, sides: Sequence[Side], scores: NDArray[np.float32]) -> None:
        """Take in a batch: its ids, and its scores [B] or [B, T]."""
        ids = np.zeros((3, self._features))
        for side in sides:
            features = list(side.features)
            if side.given_lengths is None:
                ids[ALL_IDS, features] = len(scores)
            else:
                ids[ALL_IDS, features] = _in_samples(side, side.lengths.numpy().reshape(len(features), -1))
            ids[MISSING, features] = _with_row(side, 0)
            if self._grow:
                ids[UNKNOWN_IDS, features] = _with_row(side, DEFAULT_ROW)
        ids[UNKNOWN_IDS] *= self._grows
        self.mine.unknown += ids[UNKNOWN_IDS].astype(np.int64)
        columns = scores.reshape(len(scores), -1)
        for start in range(0, len(columns), self.config.window):
            part = columns[start : start + self.config.window]
            heads, share = self.mine.heads, len(part) / len(columns)
            if heads[SCORED] + len(part) - heads[TOTALLED] > self.config.window:
                self._total()
            self.mine.add(part, ids * share)

    def keep(self, ident: str, scores: NDArray[np.float32]) -> None:
        """Keep the scores [N, T] of the request ``ident`` for its labels."""
        self.mine.keep(ident, scores)

    def knows(self, ident: str) -> bool:
        """Whether the scores of the request ``ident`` are kept, by any worker."""
        return any(own.find(ident) is not None for own in self._windows())

    async def labelled(self, body: bytes) -> dict[str, int]:
        """Join the labels in ``body`` with the scores that are kept, all of them or none. How many requests
        were ``joined``, ``unknown`` (never seen here, or no longer kept), or joined ``again``, which changes
        nothing; and the number of ``samples`` joined. ``Refused`` for a body that cannot be used."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as fault:
            raise bad(f"the body is no JSON ({shown(fault, 100)})") from fault
        entries = content.get("labels") if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise bad('the body is not {"labels": [{"id": "REQUEST", "label": [0, 1]}]}')
        if len(entries) > MOST:
            raise bad(f"the body has labels of {len(entries)} requests, and {MOST} is the most")
        found: list[tuple[Kept, NDArray[np.float32]]] = []
        counts = dict.fromkeys(("joined", "unknown", "again", "samples"), 0)
        windows = self._windows()
        for number, entry in enumerate(entries):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            ident, labels = read_labels(entry, self.tasks)
            kept = next(filter(None, (own.find(ident) for own in windows)), None)
            if kept is None:
                counts["unknown"] += 1
                continue
            if len(kept.scores) != len(labels):
                raise bad(
                    f"request '{shown(ident)}' has {len(kept.scores)} samples, and "
                    f"{len(labels)} labels came for it"
                )
            found.append((kept, labels))
        for kept, labels in found:
            if kept.joined():
                counts["again"] += 1
                continue
            counts["joined"] += 1
            counts["samples"] += len(labels)
            pairs = np.stack([kept.scores, labels], axis=1)
            self.mine.heads[LABELLED] = put(self.mine.pairs, int(self.mine.heads[LABELLED]), pairs)
        for place, name in ((JOINED, "joined"), (UNKNOWN, "unknown"), (AGAIN, "again")):
            self.mine.posted[place] += counts[name]
        return counts

    def compared(self) -> Compared:
        """All figures, of all workers, against the reference, in some milliseconds. May be called from any
        thread."""
        with self._lock:
            windows = self._windows()
            self._total()
            labelled = sum(int(own.heads[LABELLED]) for own in windows)
            if self._judged is None or self._judged[0] != labelled:
                pairs = [own.latest(LABELLED) for own in windows]
                self._judged = labelled, judged_labels(self.tasks, pairs)
            return compare(self.manifest, self.config.drift, windows, self._judged[1])

    def _total(self) -> None:
        """Bring this worker's totals up to date."""
        with self._totalling:
            heads = self.mine.heads
            first, end = int(heads[TOTALLED]), int(heads[SCORED])
            heads[TOTALLED] = end
            scores = self.mine.scores[np.arange(first, end) % len(self.mine.scores)]
            for n, (task, kind) in enumerate(self.tasks.items()):
                own, total = scores[:, n], self.mine.totals[n]
                inner = self._reference["tasks"][task]["edges"] if self._reference else []
                total[: len(inner) + 1] += drift.histogram(own, inner)
                total[-1] += np.nansum(drift.predictions(kind, own))

    def _windows(self) -> list[Windows]:
        """The arrays of all workers."""
        if self.folder is not None:
            for file in sorted(self.folder.glob(f"{self._package}.*.windows")):
                if file != self._file and file not in self._others:
                    self._others[file] = Windows(self.mine.sizes, file)
        return [self.mine, *self._others.values()]


def _with_row(side: Side, row: int) -> NDArray[np.float64]:
    """How many ids of each feature of a ``side`` have this ``row``, over all samples, [F]."""
    found, features = side.ids.numpy() == row, len(side.features)
    if side.given_lengths is None:
        return _in_samples(side, found.reshape(features, -1))
    running = np.concatenate([[0], np.cumsum(found)])[side.offsets.numpy()]
    return _in_samples(side, np.diff(running).reshape(features, -1))


def _in_samples(side: Side, bags: NDArray[Any]) -> NDArray[np.float64]:
    """The sums of what each bag of each feature has, [F, bags], over the samples that have the bag, [F]."""
    of_sample = side.of_sample
    shares = np.ones(side.bags) if of_sample is None else np.bincount(of_sample.numpy(), minlength=side.bags)
    found: NDArray[np.float64] = (bags @ shares).astype(np.float64)
    return found


def read_labels(entry: object, tasks: Mapping[str, Kind]) -> tuple[str, NDArray[np.float32]]:
    """The id of the request of one entry, and its labels [N, T], NaN where not known; ``Refused`` names the
    request and what is wrong with its labels."""
    if not isinstance(entry, dict):
        raise bad("an entry of labels is no JSON object")
    ident, given = entry.get("id"), entry.get("label")
    if not isinstance(ident, str):
        raise bad("an entry of labels has no id, or one that is no text")
    if isinstance(given, dict):
        if given.keys() != tasks.keys():
            raise bad(
                f"label of request '{shown(ident)}' is not given for {', '.join(tasks)}, and those alone"
            )
        lists = [given[task] for task in tasks]
    elif len(tasks) == 1:
        lists = [given]
    else:
        raise bad(f"label of request '{shown(ident)}' is no object with lists for {', '.join(tasks)}")
    columns: list[NDArray[np.float32]] = []
    for values, kind in zip(lists, tasks.values(), strict=True):
        if not isinstance(values, list):
            raise bad(f"label of request '{shown(ident)}' is no list of a label for each sample")
        known = [value for value in values if value is not None]
        if not _all_fit(known, kind):
            wrong = next(value for value in known if not _all_fit([value], kind))
            raise bad(f"label of request '{shown(ident)}' has {shown(wrong)}, not {_ALLOWED[kind]}")
        columns.append(np.array(values, np.float64).astype(np.float32))  # null becomes NaN
    if len({len(column) for column in columns}) > 1:
        raise bad(f"label of request '{shown(ident)}' has lists of different lengths")
    return ident, np.stack(columns, axis=1)


def _all_fit(values: Sequence[Any], kind: Kind) -> bool:
    if not set(map(type, values)) <= {int, float}:
        return False
    if kind == "clicks":
        return set(values) <= {0, 1}
    most = float(np.finfo(np.float32).max)
    low = 0.0 if kind == "counts" else -most
    return all(low <= value <= most for value in values)
