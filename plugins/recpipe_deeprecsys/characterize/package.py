"""Steps of a package: its lookups, and the operators of its dense part as they were exported.

A package's dense part is compiled: several operators are one kernel, which cannot be taken apart. So its
exported program, which the package has as well, is run operator by operator, and the compiled one is timed
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from recpipe.answers.manifest import read_manifest
from recpipe.answers.score import (
    BITS,
    SCALE_BYTES,
    Call,
    PackageError,
    Scorer,
    offsets_of,
    with_lengths,
)
from recpipe.common.timing import seconds_by_round
from recpipe.errors import UserError
from recpipe_deeprecsys.characterize.operators import FORWARD, Watched, lookup_call
from recpipe_deeprecsys.characterize.roofs import Work
from recpipe_deeprecsys.characterize.steps import FLOAT, ID, Stepped, stepped
from recpipe_deeprecsys.requests import Candidates

BATCHES = 4
"""Batches of other candidates, which steps take in turn."""
ROUNDS = 7


@dataclass(frozen=True)
class Inputs:
    """A batch as the package's lookups and dense part take it."""

    dense: torch.Tensor
    calls: list[Call]
    works: list[Work]
    """Of the calls."""


class Package:
    """An opened package. ``UserError`` if it cannot be used here."""

    def __init__(self, directory: Path, ids: str, most: int, seed: int) -> None:
        """``ids``: how they are drawn, of ``most`` candidates for a batch."""
        self.manifest = read_manifest(directory)
        try:
            self.scorer = Scorer(directory, mapped=True)
        except PackageError as fault:
            raise UserError(str(fault)) from fault
        self.directory = directory
        self.candidates = Candidates.drawn(directory, self.manifest, BATCHES * most, ids, seed)

    def stepped(self, size: int, seconds: float) -> tuple[Stepped, float]:
        """Steps of so many candidates operator by operator, and the seconds of one with the compiled dense
        part, the median."""
        batches = [self._inputs(number * size, size) for number in range(BATCHES)]
        tables = self.manifest["tables"]
        dims = [max(tables[t]["dimension"] for _, t in each["parts"]) for each in self.manifest["lookups"]]
        step = _PackageStep(batches, self._exported(size), dims)
        compiled = seconds_by_round([partial(self._compiled, batch) for batch in batches], ROUNDS)
        return stepped(step, BATCHES, seconds), median(each for times in compiled for each in times)

    def tables(self) -> list[dict[str, Any]]:
        """Memory by table."""
        return [
            {
                "name": name,
                "rows": table["rows"],
                "dim": table["dimension"],
                "type": table["type"],
                "bytes": table["rows"] * row_bytes(table),
                "state_bytes": 0,
            }
            for name, table in self.manifest["tables"].items()
        ]

    def _inputs(self, first: int, size: int) -> Inputs:
        dense, side = self.candidates.batch([(first, first + size)])
        lengths = side.given_lengths
        if lengths is None:
            lengths = torch.ones(len(self.manifest["sparse"]) * size, dtype=torch.int64)
        rows = self.scorer.rows_of(side.ids, lengths).contiguous()
        offsets = offsets_of(lengths)
        calls = [Call(lookup, rows, offsets, size, None, side.weights) for lookup in self.scorer.lookups]
        parts = lengths.view(len(self.manifest["sparse"]), size).sum(1).tolist()
        each = torch.split(rows, parts)
        counts = {
            feature["name"]: (len(ids), len(torch.unique(ids)))
            for feature, ids in zip(self.manifest["sparse"], each, strict=True)
        }
        works = [self._work(about, counts, size) for about in self.manifest["lookups"]]
        return Inputs(dense, calls, works)

    def _work(self, about: Mapping[str, Any], counts: Mapping[str, tuple[int, int]], size: int) -> Work:
        """Of one lookup: rows at random in their own types, ids and offsets, and float32 rows that it
        gives."""
        gathered = weights = distinct = given = 0.0
        for feature, name in about["parts"]:
            table, (ids, own) = self.manifest["tables"][name], counts[feature]
            weights += ids * table["dimension"]
            gathered += ids * row_bytes(table)
            distinct += own * row_bytes(table)
            given += FLOAT * table["dimension"] * (size if about["pooling"] != "none" else ids)
            given += ID * (ids + size)
        lookups = sum(counts[feature][0] for feature, _ in about["parts"])
        flops = weights * (1 + bool(about.get("weighted"))) if about["pooling"] != "none" else 0.0
        mean_row = gathered / lookups if lookups else 0.0
        return Work(flops, given, gathered, distinct + given, "float32", mean_row, weights)

    def _exported(self, size: int) -> Callable[..., torch.Tensor]:
        """The program that is compiled for batches of so many samples, as it was exported."""
        low = self.scorer.program_for(size).about["precision"] == "low"
        exported = self.manifest["golden"]["programs"]
        about = next((about for about in exported if about["low"] == low), exported[0])
        program = torch.export.load(self.directory / about["file"])
        module: Callable[..., torch.Tensor] = program.module()
        return module

    def _compiled(self, batch: Inputs) -> None:
        with torch.inference_mode():
            self.scorer.scores(batch.dense, with_lengths(batch.calls, self.scorer.pooled(batch.calls)))


class _PackageStep:
    """Lookups, and the dense part operator by operator."""

    def __init__(
        self, batches: Sequence[Inputs], dense: Callable[..., torch.Tensor], dims: Sequence[int]
    ) -> None:
        """``dims``: the widest rows of each lookup."""
        self.batches, self.dense, self.dims = batches, dense, dims

    def run(self, number: int, watched: Watched | None) -> None:
        """Score a batch."""
        batch, found = self.batches[number], []
        with torch.no_grad():
            for place, (call, work) in enumerate(zip(batch.calls, batch.works, strict=True)):
                own = lookup_call(place, len(call.lookup.features), self.dims[place], FORWARD)
                with nullcontext() if watched is None else watched.whole(own, work):
                    found.append(call.lookup(*call[1:]))
            inputs = with_lengths(batch.calls, found)
            with watched or nullcontext():
                self.dense(batch.dense, inputs)


def row_bytes(table: Mapping[str, Any]) -> float:
    """Of a row of a package's table, with its scale and bias."""
    kind = table["type"]
    scale = SCALE_BYTES if BITS[kind] <= 8 else 0
    return float(table["dimension"] * BITS[kind] / 8 + scale)
