"""A process that scores parts of requests: a package by the server's scorer, on a core of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from recpipe_serve import RowServer
from recpipe_serve.batching.scorer import RequestScorer, Side

from recpipe.answers import score
from recpipe.answers.words import the_plugin
from recpipe.common.console import alone
from recpipe.common.process import old_objects_kept, quieted
from recpipe.errors import UserError
from recpipe.tasks.process import prepare_process
from recpipe_deeprecsys.requests import Candidates, Range

WARM = 3
"""Batches that are scored before the first one counts."""


@dataclass(frozen=True)
class Job:
    """What a process needs. ``rows``: the words of a plugin that keeps the rows; (): all are in DRAM."""

    package: Path
    candidates: Path
    threads: int
    core: int | None
    rows: Sequence[str] = ()


class _Batch(NamedTuple):
    """Ranges of candidates as the server's scorer takes them."""

    ranges: list[Range]
    dense: torch.Tensor
    sides: list[Side]


class PackageScorer:
    """Scores ranges of candidates with a package. ``ahead``: has the rows read that ranges will look up,
    which come next, and returns; None: all rows are there."""

    def __init__(self, scorer: score.Scorer, candidates: Candidates) -> None:
        self.candidates, self.score = candidates, RequestScorer(scorer)
        self.maps = scorer
        self.ahead = None if self.score.ahead is None else self._ahead
        self._next: _Batch | None = None

    def __call__(self, ranges: Sequence[Range], between: Callable[[], None] | None = None) -> torch.Tensor:
        """Scores float32 [B] or [B, T]. ``between`` is called after the lookups, before the dense part."""
        batch, self._next = self._next, None
        if batch is None or batch.ranges != list(ranges):
            batch = self._put_together(ranges)
        return self.score(batch.dense, batch.sides, between)

    def _put_together(self, ranges: Sequence[Range]) -> _Batch:
        dense, side = self.candidates.batch(ranges)
        if self.maps.maps:
            rows = self.maps.rows_of(side.ids, side.lengths)
            side = Side(side.features, rows, side.given_lengths, side.bags, None, side.weights)
        return _Batch(list(ranges), dense, [side])

    def _ahead(self, ranges: Sequence[Range]) -> None:
        assert self.score.ahead is not None
        self._next = self._put_together(ranges)
        self.score.ahead(self._next.sides)


def packed(ranges: Sequence[Range]) -> bytes:
    """Ranges as a message."""
    return np.array(ranges, np.int32).tobytes()


def unpacked(message: bytes) -> list[Range]:
    """The ranges of a message."""
    return [(int(low), int(high)) for low, high in np.frombuffer(message, np.int32).reshape(-1, 2)]


def work(connection: Connection, job: Job) -> None:
    """Score each message's ranges and answer with the seconds that it took, until an empty message comes or
    the other end is closed. The first answer is empty, or says why the package cannot be used."""
    if job.core is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, {job.core})
    prepare_process()
    with quieted(), alone(), suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        torch.set_num_threads(job.threads)
        rows: RowServer | None = None
        try:
            rows = the_plugin(job.rows, RowServer, "serve", "sdm") if job.rows else None
            made = score.Scorer(job.package, mapped=True) if rows is None else rows.scorer(job.package)
            scorer = PackageScorer(made, Candidates.mapped(job.candidates))
            for _ in range(WARM):
                scorer([(0, min(64, len(scorer.candidates)))])
        except (score.PackageError, UserError) as fault:
            connection.send_bytes(str(fault).encode())
            return
        try:
            with old_objects_kept():
                connection.send_bytes(b"")
                answer(connection, scorer)
        finally:
            if rows is not None:
                rows.close()


def answer(connection: Connection, scorer: PackageScorer) -> None:
    """Score each message's ranges and answer, until an empty message comes. A message that comes while one is
    scored has its rows read meanwhile, if the scorer can."""
    following: list[bytes] = []

    def look() -> None:
        if connection.poll():
            following.append(connection.recv_bytes())
            if following[0] and scorer.ahead is not None:
                scorer.ahead(unpacked(following[0]))

    between = look if scorer.ahead is not None else None
    while message := following.pop() if following else connection.recv_bytes():
        began = perf_counter()
        scorer(unpacked(message), between)
        connection.send_bytes(np.float64(perf_counter() - began).tobytes())
