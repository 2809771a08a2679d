"""``ShardedScorer``: scores the dense part of a package whose rows are looked up by shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve import Lookup, LookupCall, Scorer, Tables, tensors
from recpipe_serve.errors import Refused
from recpipe_serve.grpc.messages import read_response, write_request

from recpipe.answers.manifest import SHARDS
from recpipe.answers.score import GOLDEN
from recpipe.errors import UserError
from recpipe_scale_out.calls import ShardCalls
from recpipe_scale_out.lookups import Part, Parts, TableLookup, runs, table_lookups
from recpipe_scale_out.rows import Rows
from recpipe_scale_out.sealed import OWN, is_shard
from recpipe_scale_out.wire import OUTPUT_TYPE, POOLED, Question, Wanted

Array = NDArray[Any]
Floats = NDArray[np.float32]


class RemoteTables(Tables):
    """What a ``Lookup`` reads of tables none of whose rows are here."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.about = manifest["tables"]
        self.places = {}
        self.starts = dict.fromkeys(self.about, 0)
        self.rows = torch.empty(0, dtype=torch.uint8)
        self.parts: Parts = manifest[SHARDS]["parts"]
        self.numbers = {own: number for number, own in enumerate(table_lookups(manifest))}


class _Column(NamedTuple):
    """One part of a lookup: a table, and where its values are among those of the whole lookup."""

    number: int
    """Of the table's lookup."""
    own: TableLookup
    parts: Sequence[Part]
    begin: int
    end: int


class RemoteLookup(Lookup):
    """One lookup, whose rows are at the shards."""

    def __init__(self, found: dict[str, Any], names: list[str], tables: RemoteTables) -> None:
        super().__init__(found, names, tables)
        self.columns: list[_Column] = []
        end = 0
        for _, table in found["parts"]:
            begin, end = end, end + tables.about[table]["dimension"]
            own = TableLookup(table, found["pooling"], self.weighted)
            self.columns.append(_Column(tables.numbers[own], own, tables.parts[table], begin, end))
        self.width = end

    def pooled(self, *_: Any, **__: Any) -> torch.Tensor:
        """There are no rows here to add up."""
        raise AssertionError("ShardedScorer.pooled asks the shards")


class _Bags(NamedTuple):
    """The bags of one column of a call."""

    call: int
    column: _Column
    bags: int
    ids: Array
    lengths: Array | None
    """None: each bag has one id."""
    weights: Array | None
    where: Array | None
    """The bag of each sample; None: each has its own."""


class _Asked(NamedTuple):
    """What of some bags one shard is asked for."""

    wanted: Wanted
    own: TableLookup
    """As the shard computes it."""
    bags: _Bags
    of: Array | None
    """Which of the bags these are; None: all of them, and no other shard has rows of them."""


class ShardedScorer(Scorer):
    """A ``Scorer`` of the dense part of a package, whose tables the shards behind ``calls`` have.

    ``wait``: seconds for the shards to be there. One thread scores.
    """

    tables: RemoteTables

    def __init__(self, directory: Path, calls: ShardCalls, wait: float) -> None:
        self.calls, self.wait = calls, wait
        self.stands_in = False
        """Whether the mean row of a table stands for those of a shard that does not answer; else ``pooled``
        raises ``Refused`` then."""
        self.wire = "FP32"
        """The type of sums on their way, FP32 or FP16."""
        self.lacking: tuple[int, ...] = ()
        """The shards without whose rows the latest lookups were answered."""
        super().__init__(directory)

    def make_tables(self) -> RemoteTables:
        """Where the rows are; ``UserError`` unless all shards are there, of this cut."""
        about = self.manifest.get(SHARDS)
        if about is None:
            raise UserError(
                f"{self.directory} has its tables itself: serve it without shards=, or cut it by 'recpipe "
                f"shard {self.directory} DIRECTORY shards=N'"
            )
        self.models, self.version = about["models"], about["version"]
        own = self.directory / OWN
        self.own = Rows(own) if is_shard(own) else None
        """The rows that are here: after those of the shards they have the next number."""
        self.default_rows = {
            name: row.numpy() for name, row in tensors(self.directory / about["default_rows"]).items()
        }
        self.calls.require(self.models, self.version, self.wait)
        return RemoteTables(self.manifest)

    def golden_difference(self) -> float:
        """How far the golden batch's scores are from those of the machine that made the package."""
        known = tensors(self.directory / GOLDEN)
        found = zip(self.programs, self.golden_scores(), strict=True)
        return max(float((scores - known[own.about["golden"]]).abs().max()) for own, scores in found)

    def lookup(self, found: dict[str, Any], features: list[str] | None = None) -> RemoteLookup:
        """See ``Scorer``."""
        names = [feature["name"] for feature in self.manifest["sparse"]]
        return RemoteLookup(found, names if features is None else features, self.tables)

    def ahead(self, calls: list[LookupCall]) -> None:
        """Nothing: what waits now is asked for together with what comes until it is scored, so that each
        batch is one call."""

    def at_hand(self, calls: list[LookupCall]) -> bool:
        """Never: the thread that answers requests does not wait for shards."""
        return False

    def pooled(self, calls: list[LookupCall]) -> list[torch.Tensor]:
        """What the lookups find; each shard is asked once for all of them."""
        # The program rounds by where its inputs lie: torch's memory is aligned.
        results = [torch.empty(_count(call), call.lookup.width) for call in calls]  # type: ignore[attr-defined]
        asked: dict[int, list[_Asked]] = {}
        cut: dict[int, tuple[_Bags, Floats]] = {}
        for own in _bags_of(calls):
            whole = len(own.column.parts) == 1
            if not whole:
                sums = np.zeros((own.bags, own.column.end - own.column.begin), np.float32)
                cut[id(own)] = own, sums
            for shard, first, rows in own.column.parts:
                one = _asked(own, None if whole else (first, rows))
                if one.wanted.bags:
                    asked.setdefault(shard, []).append(one)
        self.lacking = ()
        for some, matrix in self._answers(asked):
            self._put(some, matrix, results, cut)
        for own, sums in cut.values():
            if own.column.own.pooling == "mean":
                lengths = np.ones(own.bags, np.int64) if own.lengths is None else own.lengths
                sums /= np.maximum(lengths, 1)[:, None].astype(np.float32)
            into = results[own.call].numpy()[:, own.column.begin : own.column.end]
            into[:] = sums if own.where is None else sums[own.where]
        return results

    def _answers(self, asked: dict[int, list[_Asked]]) -> Iterator[tuple[list[_Asked], Floats]]:
        """The runs of all shards, one shard's after the other's: what of a request is beside each other, and
        the values of that."""
        here = asked.pop(len(self.models), [])
        here.sort(key=_beside)
        messages = {}
        parameters = {} if self.wire == "FP32" else {OUTPUT_TYPE: self.wire}
        for shard, own in asked.items():
            own.sort(key=_beside)
            inputs = Question.of([one.wanted for one in own]).tensors()
            messages[shard] = write_request(self.models[shard], inputs, self.version, parameters=parameters)
        answers_of = self.calls.ask(messages)
        if here:  # while the questions are on their way
            assert self.own is not None
            yield from _runs_of(here, self.own.pooled(Question.of([one.wanted for one in here])))
        answers = answers_of()
        for shard in sorted(answers):  # sums have one order
            answer = answers[shard]
            if not isinstance(answer, str):
                values = read_response(answer).values[POOLED].astype(np.float32, copy=False)
                yield from _runs_of(asked[shard], values)
                continue
            if not self.stands_in:
                raise Refused(503, "shards", f"shard {shard} does not answer: {answer}")
            self.lacking += (shard,)
            yield from (([one], self._default(one)) for one in asked[shard])

    def _default(self, one: _Asked) -> Floats:
        """What stands for rows of a shard that does not answer: the mean row of the table, as often as rows
        would have been added up."""
        row, wanted = self.default_rows[one.own.table], one.wanted
        each = np.ones(len(wanted.ids), np.float32) if wanted.weights is None else wanted.weights
        if one.own.pooling == "none" or wanted.lengths is None:
            times = each
        else:
            of_bag = np.repeat(np.arange(wanted.bags), wanted.lengths)
            times = np.bincount(of_bag, each, wanted.bags)
            if one.own.pooling == "mean":
                times = times / np.maximum(wanted.lengths, 1)
        found: Floats = (times[:, None] * row).astype(np.float32)
        return found

    def _put(
        self,
        asked: Sequence[_Asked],
        matrix: Floats,
        results: Sequence[torch.Tensor],
        cut: Mapping[int, tuple[_Bags, Floats]],
    ) -> None:
        """Put the columns of a run's ``matrix`` where they belong."""
        begin = at = 0
        while at < len(asked):
            first = last = asked[at]
            end = begin + first.bags.column.end - first.bags.column.begin
            at += 1
            if first.of is not None:
                cut[id(first.bags)][1][first.of] += matrix[:, begin:end]
                begin = end
                continue
            while at < len(asked) and _follows(last.bags, asked[at]):
                last = asked[at]
                end += last.bags.column.end - last.bags.column.begin
                at += 1
            into = results[first.bags.call].numpy()[:, first.bags.column.begin : last.bags.column.end]
            own = matrix[:, begin:end]
            into[:] = own if first.bags.where is None else own[first.bags.where]
            begin = end


def _count(call: LookupCall) -> int:
    """The rows of what a call finds."""
    if call.where is not None or not call.lookup.sequence:
        return call.samples
    (feature,) = call.lookup.features
    return int(call.offsets[(feature + 1) * call.samples] - call.offsets[feature * call.samples])


def _bags_of(calls: Sequence[LookupCall]) -> Iterator[_Bags]:
    """The bags of each column of these calls."""
    for number, (lookup, ids, offsets, samples, where, weights) in enumerate(calls):
        assert isinstance(lookup, RemoteLookup)
        given: Array | None = None
        if where is None:
            if weights is not None and lookup.weighted:
                given = lookup.arranged(weights, offsets, samples)[0].numpy()
            ids, offsets = lookup.arranged(ids, offsets, samples)
        rows, ends = ids.numpy(), offsets.numpy()
        every = np.diff(ends) if where is None else ends  # lengths
        for place, column in enumerate(lookup.columns):
            if where is not None:
                low, high = ends[place : place + 2].tolist()
                of_sample = where.numpy()[place * samples : (place + 1) * samples] - low
                alike = high - low == samples and np.array_equal(of_sample, np.arange(samples))
                own = None if alike else of_sample
                yield _Bags(number, column, high - low, rows[low:high], None, None, own)
                continue
            low, high = int(ends[place * samples]), int(ends[(place + 1) * samples])
            each = every[place * samples : (place + 1) * samples]
            one_each = lookup.sequence or (high - low == samples and bool((each == 1).all()))
            lengths = None if one_each else each
            bags = high - low if lengths is None else samples
            own_weights = None if given is None else given[low:high]
            yield _Bags(number, column, bags, rows[low:high], lengths, own_weights, None)


def _asked(own: _Bags, rows: tuple[int, int] | None) -> _Asked:
    """What of some bags a shard is asked for that has these ``rows``, the first one and how many; None: all.
    Of a part of the table only bags with ids there are asked for."""
    if rows is None:
        wanted = Wanted(own.column.number, own.bags, own.ids, own.lengths, own.weights)
        return _Asked(wanted, own.column.own, own, None)
    first, count = rows
    here = (own.ids >= first) & (own.ids < first + count)
    ids = own.ids[here] - first
    weights = None if own.weights is None else own.weights[here]
    computed = own.column.own.of_part(False)
    if own.lengths is None:
        of = np.flatnonzero(here)
        return _Asked(Wanted(own.column.number, len(of), ids, None, weights), computed, own, of)
    counts = np.bincount(np.repeat(np.arange(own.bags), own.lengths)[here], minlength=own.bags)
    of = np.flatnonzero(counts)
    return _Asked(Wanted(own.column.number, len(of), ids, counts[of], weights), computed, own, of)


def _runs_of(asked: list[_Asked], values: Floats) -> Iterator[tuple[list[_Asked], Floats]]:
    """The runs of a request and their matrices in an answer's ``values``; ``Refused`` if these are others."""
    at = 0
    for run in runs([one.own for one in asked], [one.wanted.bags for one in asked]):
        own = asked[run]
        bags, width = own[0].wanted.bags, sum(one.bags.column.end - one.bags.column.begin for one in own)
        end = at + bags * width
        if end > len(values):
            break
        yield own, values[at:end].reshape(bags, width)
        at = end
    if at != len(values):
        raise Refused(503, "shards", "a shard's answer has not the values that it was asked for")


def _beside(one: _Asked) -> tuple[str, bool, int]:
    """Alike for lookups that can be one run."""
    return one.own.pooling, one.own.weighted, one.wanted.bags


def _follows(before: _Bags, one: _Asked) -> bool:
    """Whether a column is the next one of the same call, with the same bags for its samples."""
    own = one.bags
    if one.of is not None or own.call != before.call or own.column.begin != before.column.end:
        return False
    if own.where is None or before.where is None:
        return own.where is before.where
    return np.array_equal(own.where, before.where)
