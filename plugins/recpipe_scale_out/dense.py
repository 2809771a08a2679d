"""``ShardedScorer``: scores the dense part of a package whose rows are looked up by shards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from recpipe_serve import LookupCall, Scorer, tensors
from recpipe_serve.errors import Refused
from recpipe_serve.grpc.messages import read_response, write_request

from recpipe.answers.manifest import SHARDS
from recpipe.answers.score import GOLDEN, Program
from recpipe.errors import UserError
from recpipe_scale_out.bags import (
    Asked,
    Bags,
    Pieces,
    asked_of_shards,
    bags_of,
    beside,
    count_of,
    follows,
    runs_of,
    stands_in,
)
from recpipe_scale_out.bottom import TRIED, TwoParts
from recpipe_scale_out.calls import ShardCalls
from recpipe_scale_out.remote import RemoteLookup, RemoteTables
from recpipe_scale_out.rows import HotRows, InMemory, Rows
from recpipe_scale_out.sealed import HOT, OWN, is_shard
from recpipe_scale_out.wire import OUTPUT_TYPE, POOLED, Floats, Question, Wanted

log = logging.getLogger("recpipe")


class ShardedScorer(Scorer):
    """A ``Scorer`` of the dense part of a package, whose tables the shards behind ``calls`` have.

    ``wait``: seconds for the shards to be there. One thread scores.
    """

    tables: RemoteTables
    keep: type[InMemory] = InMemory
    """How rows that are here are kept."""

    def __init__(self, directory: Path, calls: ShardCalls, wait: float) -> None:
        self.calls, self.wait = calls, wait
        self.stands_in = False
        """Whether the mean row of a table stands for those of a shard that does not answer; else ``pooled``
        raises ``Refused`` then."""
        self.wire = "FP32"
        """The type of sums on their way (``wire.TYPES``)."""
        self.lacking: tuple[int, ...] = ()
        """The shards without whose rows the latest lookups were answered."""
        self._dense: torch.Tensor | None = None
        """The dense features of the batch whose rows are asked for next."""
        self._begun: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        """These, and what has been computed of them alone."""
        self.in_two: dict[Program, TwoParts] = {}
        """The programs that are also there in two parts."""
        super().__init__(directory)
        files = self.manifest[SHARDS].get("in_two")
        for program, own in zip(self.programs, files, strict=True) if files else ():
            two = None if own is None else TwoParts(directory, own, program)
            if two is not None and two.gives_the_same(self.manifest, TRIED[:5]):
                self.in_two[program] = two
            elif two is not None:
                log.warning("the dense part begins once rows are there: in two it gives other last bits here")

    def make_tables(self) -> RemoteTables:
        """Where the rows are; ``UserError`` unless all shards are there, of this cut."""
        about = self.manifest.get(SHARDS)
        if about is None:
            raise UserError(
                f"{self.directory} has its tables itself: serve it without shards=, or cut it by 'recpipe "
                f"shard {self.directory} DIRECTORY shards=N'"
            )
        self.models, self.version = about["models"], about["version"]
        own, hot = self.directory / OWN, self.directory / HOT
        self.here: dict[int, Rows] = {}
        """The rows that are here, by numbers that follow those of the shards: tables that are here as a
        whole, and then copies of rows of the shards."""
        self.hot: HotRows | None = None
        """These, for bags that have no others."""
        if is_shard(own):
            self.here[len(self.models)] = Rows(own, None, self.keep)
        if is_shard(hot):
            self.here[len(self.models) + 1] = self.hot = HotRows(hot, self.keep)
        self.default_rows = {
            name: row.numpy() for name, row in tensors(self.directory / about["default_rows"]).items()
        }
        self.find_shards()
        return RemoteTables(self.manifest)

    def find_shards(self) -> None:
        """``UserError`` unless all shards are there, of this cut."""
        self.calls.require(self.models, self.version, self.wait)

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

    def meanwhile(self, dense: torch.Tensor) -> None:
        """See ``ComputesMeanwhile``."""
        self._dense = dense if self.in_two and self.program_for(len(dense)) in self.in_two else None

    def scores(self, dense: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        """See ``Scorer``; what needs no rows may have been computed already."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] is not dense:
            return super().scores(dense, found)
        program = self.program_for(len(dense))
        scores = self.in_two[program].finished(dense, begun[1], found)
        self.last_layer = program.last_layer
        return scores

    def pooled(self, calls: list[LookupCall]) -> list[torch.Tensor]:
        """What the lookups find; each shard is asked once for all of them."""
        # The program rounds by where its inputs lie: torch's memory is aligned.
        results = [torch.empty(count_of(call), call.lookup.width) for call in calls]  # type: ignore[attr-defined]
        asked: dict[int, list[Asked]] = {}
        pieces: dict[int, Pieces] = {}
        needless = set[int]()
        for own in bags_of(calls):
            for server, one in self._servers_of(own, needless):
                if one.of is not None and id(own) not in pieces:
                    pieces[id(own)] = Pieces(own)
                if one.wanted.bags:
                    asked.setdefault(server, []).append(one)
        self.calls.counts.saved += len(needless - asked.keys())
        self.lacking = ()
        for some, matrix in self._answers(asked):
            self._put(some, matrix, results, pieces)
        for several in pieces.values():
            several.put(results)
        return results

    def _servers_of(self, own: Bags, needless: set[int]) -> Iterator[tuple[int, Asked]]:
        """By number, who is asked for these bags, and for what. Bags that have copies of rows alone are
        looked up here, with the bits of the whole table; the shards that would have been asked for them are
        put into ``needless``."""
        column, every = own.column, own.every
        if self.hot is None or column.own.table not in self.hot.ids:
            yield from asked_of_shards(own, every, None)
            return
        places = self.hot.places(column.own.table, every.ids)
        hot = every.all_in(places >= 0)
        self.calls.counts.bags += every.bags
        self.calls.counts.hot_bags += (count := int(hot.sum()))
        some = None if count == every.bags else hot.nonzero()[0]
        if count:
            needless.update(shard for shard, _, _ in column.parts)
            here = every._replace(ids=places).chosen(hot)
            yield len(self.models) + 1, Asked(Wanted(column.number, *here), column.own, own, some)
        if not count:
            yield from asked_of_shards(own, every, None)
        elif count < every.bags:
            yield from asked_of_shards(own, every.chosen(~hot), (~hot).nonzero()[0])

    def _answers(self, asked: dict[int, list[Asked]]) -> Iterator[tuple[list[Asked], Floats]]:
        """The runs of all shards, one shard's after the other's: what of a request is beside each other, and
        the values of that."""
        for own in asked.values():
            own.sort(key=beside)
        here = [(rows, asked.pop(number, [])) for number, rows in self.here.items()]
        messages = {}
        parameters = {} if self.wire == "FP32" else {OUTPUT_TYPE: self.wire}
        for shard, own in asked.items():
            inputs = Question.of([one.wanted for one in own]).tensors()
            messages[shard] = write_request(self.models[shard], inputs, self.version, parameters=parameters)
        answers_of = self.calls.ask(messages)
        for rows, own in here:  # while the questions are on their way
            if own:
                yield from runs_of(own, rows.pooled(Question.of([one.wanted for one in own])))
        if self._dense is not None:
            dense, self._dense = self._dense, None
            self._begun = dense, self.in_two[self.program_for(len(dense))].begun(dense)
        answers = answers_of()
        for shard in sorted(answers):  # sums have one order
            answer = answers[shard]
            if not isinstance(answer, str):
                yield from runs_of(asked[shard], read_response(answer).values[POOLED])
                continue
            if not self.stands_in:
                raise Refused(503, "shards", f"shard {shard} does not answer: {answer}")
            self.lacking += (shard,)
            yield from (([one], stands_in(one, self.default_rows[one.own.table])) for one in asked[shard])

    def _put(
        self,
        asked: Sequence[Asked],
        matrix: Floats,
        results: Sequence[torch.Tensor],
        pieces: Mapping[int, Pieces],
    ) -> None:
        """Put the columns of a run's ``matrix`` where they belong."""
        begin = at = 0
        while at < len(asked):
            first = last = asked[at]
            end = begin + first.bags.column.width
            at += 1
            if first.of is not None:
                pieces[id(first.bags)].take(first, matrix[:, begin:end])
                begin = end
                continue
            while at < len(asked) and follows(last.bags, asked[at]):
                last = asked[at]
                end += last.bags.column.width
                at += 1
            into = results[first.bags.call].numpy()[:, first.bags.column.begin : last.bags.column.end]
            own = matrix[:, begin:end]
            into[:] = own if first.bags.where is None else own[first.bags.where]
            begin = end
