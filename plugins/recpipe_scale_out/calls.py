"""``ShardCalls``: what the main server asks its shards, each in one call, all at once.

The calls are gRPC's own futures and not its asyncio ones: the thread that scores waits for all of a batch,
and would have to hand each over to an event loop and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2 as messages

from recpipe.errors import UserError, shown
from recpipe_scale_out.replica import APPLICATION, REST, Replica
from recpipe_scale_out.versions import sequence_of

if TYPE_CHECKING:
    from recpipe_serve.access.spans import Spans

AGAIN = 0.1
"""Seconds after which a shard is asked again whether it is ready."""
Called = tuple[int, Replica, Any]
"""A shard, which of its replicas was asked, and gRPC's future."""


@dataclass
class Counts:
    """Totals of all calls."""

    calls: int = 0
    """Requests that were sent, hedged ones and second tries among them."""
    failed: int = 0
    """Those that got no answer, or a refusal."""
    hedged: int = 0
    """Those sent since another replica had not answered yet."""
    lost: int = 0
    """Questions that no replica answered."""
    late: int = 0
    """Those of them that were waited for until the end of the time."""
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    """That batches waited for answers."""
    bags: int = 0
    """Bags of tables of which the main server has rows."""
    hot_bags: int = 0
    """Those of them that have no other rows."""
    saved: int = 0
    """Calls that are not made since all bags of a batch that a shard would have been asked for are such."""


@dataclass
class _Open:
    """A question to one shard that is not answered yet."""

    message: Any
    untried: list[Replica]
    calls: dict[Any, Replica] = field(default_factory=dict)
    """gRPC's futures that may still answer it, and who was asked."""
    why: str = ""


class ShardCalls:
    """Asks the shards at ``addresses``: of each one, or several replicas that hold the same rows.

    ``seconds``: for all answers to a batch. ``hedge``: seconds after which another replica is asked too;
    None: one is asked once the one before has failed.
    """

    def __init__(self, addresses: Sequence[Sequence[str]], seconds: float, hedge: float | None) -> None:
        self.shards = [[Replica(address) for address in own] for own in addresses]
        self.seconds, self.hedge, self.counts = seconds, hedge, Counts()
        self.spans: Spans | None = None
        """Where each call is told as a span of the trace that it belongs to; None: nowhere."""

    def ask(self, questions: Mapping[int, Any]) -> Callable[[], dict[int, Any]]:
        """Send each shard its question, a message of the protocol. What is returned waits for the answers:
        such messages, of the model and the version that was asked; or, in the place of one, text that says
        why there is none."""
        until = monotonic() + self.seconds
        came: SimpleQueue[Called] = SimpleQueue()
        waiting: dict[int, _Open] = {}
        answers: dict[int, Any] = {}
        for shard, message in questions.items():
            replicas = self._order(shard)
            if replicas:
                waiting[shard] = _Open(message, replicas)
                self._send(shard, waiting[shard], until, came)
            else:
                given = ", ".join(own.address for own in self.shards[shard])
                answers[shard] = f"{given} did not answer in time, and has not said since that it is ready"
        return lambda: self._answers(waiting, until, came, answers)

    def _answers(
        self, waiting: dict[int, _Open], until: float, came: SimpleQueue[Called], answers: dict[int, Any]
    ) -> dict[int, Any]:
        began = monotonic()
        hedge_at = None if self.hedge is None else until - self.seconds + self.hedge
        while waiting:
            end = until if hedge_at is None else min(until, hedge_at)
            try:
                shard, replica, call = came.get(timeout=max(0.0, end - monotonic()))
            except Empty:
                if end == until:
                    break
                hedge_at = None
                for shard, own in waiting.items():
                    if own.untried:
                        self.counts.hedged += 1
                        self._send(shard, own, until, came, hedged=True)
                continue
            if shard not in waiting or call not in waiting[shard].calls:
                continue  # another replica was faster
            own = waiting[shard]
            why = _fault(own.message, call)
            if why is None:
                answers[shard] = answer = call.result()
                self.counts.received_bytes += answer.ByteSize()
                del waiting.pop(shard).calls[call]
                _given_up(own)
                continue
            self._failed(own, replica, call, why)
            if own.untried:
                self._send(shard, own, until, came)
            elif not own.calls:
                answers[shard] = waiting.pop(shard).why
        for shard, own in waiting.items():
            _given_up(own)
            answers[shard] = f"no answer within {self.seconds * 1e3:g} ms"
        self.counts.late += len(waiting)
        self.counts.lost += sum(isinstance(answer, str) for answer in answers.values())
        self.counts.seconds += monotonic() - began
        return answers

    def _order(self, shard: int) -> list[Replica]:
        """A shard's replicas as they are to be asked, the first one last: in turn, those that failed a moment
        ago after the others, and those that are late not at all."""
        now = monotonic()
        there = [own for own in self.shards[shard] if not own.late]
        return sorted(there, key=lambda own: (now - own.failed < REST, own.asked))[::-1]

    def _send(
        self, shard: int, own: _Open, until: float, came: SimpleQueue[Called], hedged: bool = False
    ) -> None:
        replica = own.untried.pop()
        replica.asked += 1
        self.counts.calls += 1
        size = own.message.ByteSize()
        self.counts.sent_bytes += size
        headers = [(APPLICATION, own.message.model_name)]
        span = None
        if self.spans is not None:
            about = {"recpipe.shard": shard, "server.address": replica.address, "recpipe.hedged": hedged}
            span, traced = self.spans.call(f"shard {shard}", {**about, "recpipe.sent_bytes": size})
            headers += traced
        # Beyond the time that anybody waits: what is late is told from what failed.
        left = max(0.0, until - monotonic()) + 1.0
        call = replica.stub.ModelInfer.future(own.message, timeout=left, metadata=headers)
        own.calls[call] = replica
        if span is not None:
            call.add_done_callback(partial(_end_span, span))
        call.add_done_callback(lambda done: came.put((shard, replica, done)))

    def _failed(self, own: _Open, replica: Replica, call: Any, why: str) -> None:
        del own.calls[call]
        own.why = f"{replica.address}: {why}"
        replica.failed = monotonic()
        self.counts.failed += 1

    def require(self, models: Sequence[str], version: str, seconds: float) -> None:
        """Return once a replica of each shard answers for its model of this ``version``; ``UserError`` after
        so many ``seconds``, and at once for one that has another model. One that has another version of it
        may be about to take this one over."""
        self._require_all(models)
        until = monotonic() + seconds
        for number, (model, replicas) in enumerate(zip(models, self.shards, strict=True)):
            self._require(number, replicas, model, version, until)

    def _require(
        self, number: int, replicas: Sequence[Replica], model: str, version: str, until: float
    ) -> None:
        while True:
            why = []
            for own in replicas:
                left = max(0.05, min(1.0, until - monotonic()))
                code, told = own.ready(model, version, left)
                if code is None:
                    return
                if code == grpc.StatusCode.NOT_FOUND and own.ready(model, "", left)[0] == code:
                    raise UserError(
                        f"{own.address} is not shard {number} of this cut ({told}): give the addresses in "
                        "the order of the shards, of the same cut"
                    )
                why.append(f"{own.address}: {told}")
            if monotonic() >= until:
                raise UserError(
                    f"shard {number} does not answer ({'; '.join(why)}): start it by 'recpipe serve "
                    f"{model} port=PORT'"
                )
            sleep(AGAIN)

    def _require_all(self, models: Sequence[str]) -> None:
        if len(models) != len(self.shards):
            raise UserError(
                f"shards= has the addresses of {len(self.shards)} shards, and the package was cut into "
                f"{len(models)}"
            )

    def reached(self, models: Sequence[str], version: str, seconds: float) -> bool:
        """Wait until a replica of each shard answers for its model of this ``version``; False if one does so
        for later ones alone. ``UserError`` after so many ``seconds``, and at once for another cut's."""
        self._require_all(models)
        until = monotonic() + seconds
        every = enumerate(zip(models, self.shards, strict=True))
        reached = [self._reached(n, replicas, model, version, until) for n, (model, replicas) in every]
        return all(reached)

    def _reached(
        self, number: int, replicas: Sequence[Replica], model: str, version: str, until: float
    ) -> bool:
        wanted = sequence_of(version)
        while True:
            found, why = list[str](), list[str]()
            for own in replicas:
                left = max(0.05, min(1.0, until - monotonic()))
                asked = messages.RepositoryIndexRequest(ready=True)
                try:
                    told = own.stub.RepositoryIndex(
                        asked, timeout=left, wait_for_ready=True, metadata=((APPLICATION, model),)
                    ).models
                except grpc.RpcError as fault:
                    why.append(f"{own.address}: {shown(fault.details(), 200)}")
                    continue
                found += (here := [one.version for one in told if one.name == model])
                why.append(f"{own.address} has {', '.join(here) or 'other shards'}")
                if not here or any(one != version and sequence_of(one) == wanted for one in here):
                    raise UserError(
                        f"{own.address} is not shard {number} of this cut and this chain of deltas: give the "
                        "addresses in the order of the shards, of the same cut, and all servers the same "
                        "follow="
                    )
            if version in found:
                return True
            if found and min(map(sequence_of, found)) > wanted:
                return False
            if monotonic() >= until:
                raise UserError(
                    f"shard {number} has not come to version {version}, of delta {wanted}; {'; '.join(why)}"
                )
            sleep(0.02)

    def close(self) -> None:
        """Ask nothing more."""
        for replicas in self.shards:
            for own in replicas:
                own.close()


def _fault(asked: Any, call: Any) -> str | None:
    """Why an ended call has no answer to the question ``asked``; None: it has one."""
    if call.code() != grpc.StatusCode.OK:
        return shown(call.details(), 200)
    answer = call.result()
    wanted, found = ((own.model_name, own.model_version) for own in (asked, answer))
    if wanted != found:
        return f"it answered for {shown(' '.join(found))}, and was asked for {' '.join(wanted)}"
    return None


def _given_up(own: _Open) -> None:
    """Nobody waits any more for those that were asked and have not answered."""
    for call, replica in own.calls.items():
        replica.was_late(own.message.model_name)
        call.cancel()


def _end_span(span: Any, call: Any) -> None:
    """A call has ended that ``span`` is of."""
    span.set_attribute("rpc.grpc.status_code", call.code().value[0])
    if call.code() == grpc.StatusCode.OK:
        span.set_attribute("recpipe.received_bytes", call.result().ByteSize())
    span.end()


def addresses(word: str) -> list[list[str]]:
    """The addresses in ``HOST:PORT,HOST:PORT|HOST:PORT``: of each shard, those of its replicas. ``UserError``
    for others."""
    found = [[address.strip() for address in own.split("|")] for own in word.split(",")]
    for own in found:
        for address in own:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise UserError(
                    f"shards={shown(word)}: '{shown(address)}' is no HOST:PORT; shards are separated by "
                    "commas, and the replicas of one by |"
                )
    return found
