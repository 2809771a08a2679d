"""``ShardCalls``: what the main server asks its shards, each in one call, all at once.

The calls are gRPC's own futures and not its asyncio ones: the thread that scores waits for all of a batch,
and would have to hand each over to an event loop and back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from recpipe.errors import UserError, shown
from recpipe_scale_out.versions import sequence_of

log = logging.getLogger("recpipe")
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A shard that is started again is found within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
REST = 1.0
"""Seconds for which a replica that failed is the last to be asked."""
Called = tuple[int, "Replica", Any]
"""A shard, which of its replicas was asked, and gRPC's future."""


class Replica:
    """One server of a shard."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self.stub = GRPCInferenceServiceStub(self._channel)
        self.failed = -REST
        """When it did so last."""
        self.asked = 0

    def close(self) -> None:
        """Ask it nothing more."""
        self._channel.close()


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
    calls: list[Any] = field(default_factory=list)
    """gRPC's futures that may still answer it."""
    why: str = ""


class ShardCalls:
    """Asks the shards at ``addresses``: of each one, or several replicas that hold the same rows.

    ``seconds``: for all answers to a batch. ``hedge``: seconds after which another replica is asked too;
    None: one is asked once the one before has failed.
    """

    def __init__(self, addresses: Sequence[Sequence[str]], seconds: float, hedge: float | None) -> None:
        self.shards = [[Replica(address) for address in own] for own in addresses]
        self.seconds, self.hedge, self.counts = seconds, hedge, Counts()

    def ask(self, questions: Mapping[int, Any]) -> Callable[[], dict[int, Any]]:
        """Send each shard its question, a message of the protocol. What is returned waits for the answers:
        such messages; or, in the place of one, text that says why there is none."""
        until = monotonic() + self.seconds
        came: SimpleQueue[Called] = SimpleQueue()
        waiting = {shard: _Open(message, self._order(shard)) for shard, message in questions.items()}
        for shard, own in waiting.items():
            self._send(shard, own, until, came)
        return lambda: self._answers(waiting, until, came)

    def _answers(self, waiting: dict[int, _Open], until: float, came: SimpleQueue[Called]) -> dict[int, Any]:
        began = monotonic()
        hedge_at = None if self.hedge is None else until - self.seconds + self.hedge
        answers: dict[int, Any] = {}
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
                        self._send(shard, own, until, came)
                continue
            if shard not in waiting or call not in waiting[shard].calls:
                continue  # another replica was faster
            own = waiting[shard]
            if call.code() == grpc.StatusCode.OK:
                answers[shard] = answer = call.result()
                self.counts.received_bytes += answer.ByteSize()
                _cancel(waiting.pop(shard), call)
                continue
            self._failed(own, replica, call)
            if own.untried:
                self._send(shard, own, until, came)
            elif not own.calls:
                answers[shard] = waiting.pop(shard).why
        for shard, own in waiting.items():
            for replica in self.shards[shard]:
                replica.failed = monotonic()
            _cancel(own)
            answers[shard] = f"no answer within {self.seconds * 1e3:g} ms"
        self.counts.lost += sum(isinstance(answer, str) for answer in answers.values())
        self.counts.seconds += monotonic() - began
        return answers

    def _order(self, shard: int) -> list[Replica]:
        """A shard's replicas as they are to be asked, the first one last: in turn, those that failed a moment
        ago after the others."""
        now = monotonic()
        return sorted(self.shards[shard], key=lambda own: (now - own.failed < REST, own.asked))[::-1]

    def _send(self, shard: int, own: _Open, until: float, came: SimpleQueue[Called]) -> None:
        replica = own.untried.pop()
        replica.asked += 1
        self.counts.calls += 1
        self.counts.sent_bytes += own.message.ByteSize()
        # Beyond the time that anybody waits: what is late is told from what failed.
        call = replica.stub.ModelInfer.future(own.message, timeout=max(0.0, until - monotonic()) + 1.0)
        own.calls.append(call)
        call.add_done_callback(lambda done: came.put((shard, replica, done)))

    def _failed(self, own: _Open, replica: Replica, call: Any) -> None:
        own.calls.remove(call)
        own.why = f"{replica.address}: {shown(call.details(), 200)}"
        replica.failed = monotonic()
        self.counts.failed += 1

    def require(self, models: Sequence[str], version: str, seconds: float) -> None:
        """Return once a replica of each shard answers for its model of this ``version``; ``UserError`` after
        so many ``seconds``, and at once for one that answers for others."""
        self._require_all(models)
        until = monotonic() + seconds
        for number, (model, replicas) in enumerate(zip(models, self.shards, strict=True)):
            self._require(number, replicas, model, version, until)

    def _require(
        self, number: int, replicas: Sequence[Replica], model: str, version: str, until: float
    ) -> None:
        asked = messages.ModelReadyRequest(name=model, version=version)
        while True:
            why = []
            for own in replicas:
                left = max(0.05, min(1.0, until - monotonic()))
                try:
                    if own.stub.ModelReady(asked, timeout=left, wait_for_ready=True).ready:
                        return
                    why.append(f"{own.address} is not ready")
                except grpc.RpcError as fault:
                    if fault.code() == grpc.StatusCode.NOT_FOUND:
                        raise UserError(
                            f"{own.address} is not shard {number} of this cut "
                            f"({shown(fault.details(), 200)}): give the addresses in the order of the "
                            "shards, of the same cut"
                        ) from fault
                    why.append(f"{own.address}: {shown(fault.details(), 200)}")
            if monotonic() >= until:
                raise UserError(
                    f"shard {number} does not answer ({'; '.join(why)}): start it by 'recpipe serve "
                    f"{model} port=PORT'"
                )

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
                    told = own.stub.RepositoryIndex(asked, timeout=left, wait_for_ready=True).models
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


def _cancel(own: _Open, but: Any = None) -> None:
    """Nobody waits for its other calls."""
    for call in own.calls:
        if call is not but:
            call.cancel()


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
