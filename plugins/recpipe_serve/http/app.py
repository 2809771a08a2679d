"""The server's addresses: health, metadata, inference, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.types import ASGIApp

from recpipe.answers.score import RowMap
from recpipe.data.preparation import Preparation
from recpipe.errors import StoreError, shown
from recpipe_serve.answer_server import AnswerServer
from recpipe_serve.batching.batcher import Batcher, Score
from recpipe_serve.batching.forms import Array, Asked
from recpipe_serve.batching.scorer import Side
from recpipe_serve.batching.statistics import SHARED, SharedStatistics
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused, WrongIds, bad
from recpipe_serve.fresh.follower import Follower
from recpipe_serve.http.about import configuration, metadata
from recpipe_serve.http.acceptor import Acceptor
from recpipe_serve.http.connections import Answer, IncomingRequest, Infer, Listener
from recpipe_serve.http.features import NO_MAPS, Features, Heads
from recpipe_serve.http.metrics import Metrics
from recpipe_serve.http.own import LACKING, OwnAddresses
from recpipe_serve.http.protocol import HEADER_LENGTH, InferenceRequest, answer
from recpipe_serve.http.surface import Endpoint, HttpModel, Surface, compressed, refusal
from recpipe_serve.models import OneModel, Outputs
from recpipe_serve.monitor.monitor import Monitor
from recpipe_serve.monitor.windows import REFUSED

if TYPE_CHECKING:
    from recpipe_serve.access.spans import Spans
    from recpipe_serve.candidates import Candidates
    from recpipe_serve.http.learning import Learner, Learning
    from recpipe_serve.store.filled import FeatureStore

log = logging.getLogger("recpipe")
VERSION = "1"
LOST_SHARDS = "lost_shards"
"""A parameter of responses: the shards of a cut package without whose rows it was scored."""
GoTo = Callable[[int | None], Awaitable[None]]
"""Lets a version answer by its number, or the latest one and those after it; ``Refused`` if it cannot."""


class Server(HttpModel):
    """One package behind the open inference protocol: a model's ``version``, alone or beside others.

    ``score`` and ``manifest``: a ``RequestScorer`` and its package's. ``name``: of the model in addresses.
    ``config``: the words of ``recpipe serve``. ``several``: whether it is one of several processes, whose
    metrics are shown together; it is the one of this ``number``, and what the monitors see is in ``folder``.
    ``preparation``: by which raw values are encoded; None: they are refused. ``maps``: see ``Features``.
    ``candidates``: what finds these; None: the package has none. ``answers``: what requests are put to before
    the model, which has begun with this package; None: nothing. ``learning``: takes labelled events
    for ``learner``; None: nothing is learnt. ``labelled``: whether its figures have its name and version as
    labels.
    """

    def __init__(
        self,
        score: Score,
        manifest: Mapping[str, Any],
        name: str,
        config: ServeConfig,
        several: bool = False,
        folder: Path | None = None,
        number: int = 0,
        preparation: Preparation | None = None,
        maps: Mapping[int, RowMap] = NO_MAPS,
        candidates: Candidates | None = None,
        answers: AnswerServer | None = None,
        learning: Learning | None = None,
        learner: Learner | None = None,
        version: str = VERSION,
        labelled: bool = False,
    ) -> None:
        self.candidates, self.answers = candidates, answers
        self.learning, self.learner = learning, learner
        self.manifest, self.name, self.version, self.config = manifest, name, version, config
        self.outputs = [output["name"] for output in manifest["outputs"]]
        self.features = Features(manifest, config.samples, maps)
        self.preparation = preparation
        self.heads = Heads(self.features, preparation)
        self.batcher = Batcher(score, config)
        self.counted = SharedStatistics(folder, number)
        self.batcher.took = self.counted.own.took
        of = {"model": name, "version": version} if labelled else {}
        self.metrics = Metrics(name, lambda: self.monitor.compared(), several, of)
        self.follower: Follower | None = None
        self.go_to: GoTo
        """Lets a version that a client asks for answer, here, or in all workers."""
        self.batcher.saw, self.batcher.answers = self.metrics.saw, answers
        if answers is not None:
            self.metrics.show(answers.counted)
        self._make_monitor = partial(Monitor, config=config, folder=folder, number=number)
        self.monitor = self._make_monitor(manifest)
        self.batcher.scored = self._watch
        self.models = OneModel(self, self._count_unknown)
        self.store: FeatureStore | None = None
        """Fills raw rows."""
        self._filling: set[asyncio.Task[None]] = set()
        self.mirror: Callable[[Asked, Array, str | None], None] | None = None
        """Called after a request was answered, with its inputs, its scores [N, T] and its id."""
        self.join: Callable[[bytes], Awaitable[dict[str, int]]] = self.label
        """Takes a body of labels: its own, and where there are other versions those of their requests."""
        self.routes: Callable[[], Mapping[str, Any]] | None = None
        """Tells where requests for the model go, if it has several versions."""
        self._spans: Spans | None = None

    def _watch(self, sides: Sequence[Side], scores: Array) -> None:
        """What was scored lately, for the monitor."""
        self.monitor.saw(sides, scores)

    def trace(self, spans: Spans) -> None:
        """Begin a span of ``spans`` for each request before it is scored, in which what that calls is."""
        self._spans = spans
        self.batcher.within = spans.within

    def use(
        self,
        score: Score,
        manifest: Mapping[str, Any],
        package: str,
        preparation: Preparation | None = None,
        maps: Mapping[int, RowMap] = NO_MAPS,
        candidates: Candidates | None = None,
        learner: Learner | None = None,
    ) -> None:
        """Score by ``score`` of another package with this ``manifest`` from the next batch on, and encode raw
        values by its ``preparation``, and keys by its ``maps``. It takes and gives what the one before did;
        the metrics call it ``package``. It is watched anew."""
        self.batcher.whole_again()
        if preparation != self.preparation or maps != self.features.maps:
            self.preparation, self.features.maps = preparation, maps
            self.heads.use(preparation)
            self.batcher.encode_anew(self.heads.anew)
        if manifest != self.manifest:
            self.batcher.tell()
            monitor = self._make_monitor(manifest)
            self.monitor.close()
            self.manifest, self.monitor = manifest, monitor
        self.batcher.score, self.candidates, self.learner = score, candidates, learner
        if candidates is not None:
            candidates.use(maps)
        self.metrics.serves(package)

    def fill_from(self, store: FeatureStore) -> None:
        """Fill raw rows from ``store``, and show how that goes."""
        self.store = store
        self.metrics.show(store.counted)

    def follow(self, follower: Follower) -> None:
        """Show where ``follower`` is, and hand it the requests by which it judges deltas."""
        self.follower, self.go_to = follower, follower.go_to
        self.metrics.show(follower.figures)

    @property
    def ready(self) -> bool:
        """Whether requests are scored."""
        return self.batcher.alive

    def app(self) -> ASGIApp:
        """The application for an ASGI server, without what ``infer`` answers."""
        return Surface(self.models, self.config, self.text, self._lifespan).app()

    @property
    def addresses(self) -> dict[bytes, Infer]:
        """The paths to which requests for scores are posted."""
        own = f"/v2/models/{self.name}"
        return {
            path.encode(): self.infer for path in (f"{own}/infer", f"{own}/versions/{self.version}/infer")
        }

    def listener(self, acceptor: Acceptor, stop: float = 10.0) -> Listener:
        """What serves it on the connections of ``acceptor``; ``stop``: seconds for the last requests."""
        return Listener(self.app(), acceptor, self.addresses, stop)

    async def text(self) -> bytes:
        """Its figures for Prometheus."""
        self.batcher.tell()
        return await asyncio.to_thread(self.metrics.text)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.start()
        yield
        await self.close()

    def start(self) -> None:
        """Score requests from now on, in the running event loop."""
        self.batcher.start()
        self._sharing = asyncio.get_running_loop().create_task(self._keep_sharing())

    async def _keep_sharing(self) -> None:
        """Let the other workers see what is counted here, again and again."""
        while self.metrics.several:
            await asyncio.sleep(SHARED)
            self.counted.share()
            self.metrics.write()

    async def close(self) -> None:
        """Answer what it has, and then nothing."""
        self._sharing.cancel()
        await asyncio.gather(*self._filling)
        await self.batcher.close()
        if self.store is not None:
            await self.store.close()

    def metadata(self) -> dict[str, Any]:
        """Its inputs and outputs, as KServe has them."""
        return metadata(self.name, self.version, self.features, self.outputs)

    def configuration(self) -> dict[str, Any]:
        """As Triton has it."""
        return configuration(self.metadata(), self.config)

    def statistics(self) -> dict[str, Any]:
        """Of all workers, as Triton has them."""
        return self.counted.all().told(self.name, self.version)

    def endpoint(self, what: str) -> Endpoint:
        """What answers its own address of this word."""
        return OwnAddresses(self).endpoint(what)

    async def label(self, body: bytes) -> dict[str, int]:
        """Join the labels in ``body`` with scores that are kept; see ``Monitor.labelled``."""
        try:
            counts = await self.monitor.labelled(body)
        except Refused:
            self.monitor.mine.posted[REFUSED] += 1
            raise
        if self.follower is not None:
            self.follower.labelled(json.loads(body)["labels"], self.monitor.tasks)
        return counts

    async def answer(self, request: InferenceRequest) -> Outputs:
        """The scores of a request that did not come by HTTP."""
        names, told = self._names(request), dict[str, Any]()
        if request.rows:
            inputs, told = await self._encoded(request)
        else:
            inputs = self.features.asked(request.inputs)
        inputs.span = request.span
        scores = await self.scores(inputs, request.timeout, request.priority)
        return Outputs(self._found(request, names, inputs, scores), told | self.said(inputs))

    async def scores(self, inputs: Asked, timeout: float | None = None, priority: int | None = None) -> Array:
        """The scores float32 [N] or [N, T] of these inputs, scored with whatever else waits."""
        done: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self.batcher.put(inputs, partial(_settle, done), timeout, priority)
        return await done

    def infer(self, request: IncomingRequest) -> None:
        """Score a request; whatever is wrong with it is an answer of one line."""
        try:
            if request.fault is not None:
                raise request.fault
            length = request.headers.get(HEADER_LENGTH)
            body = request.whole_body(self.config.body_bytes)
            header = None if length is None else length.decode("latin-1")
            asked, inputs = self.heads.read_or_rows(body, header)
            request.parts.clear()
            if inputs is None and self.store is not None:
                filling = asyncio.get_running_loop().create_task(self._infer_filled(request, asked))
                self._filling.add(filling)
                filling.add_done_callback(self._filling.discard)
            else:
                self._put(request, asked, self.heads.encoded(asked.rows) if inputs is None else inputs)
        except Exception as fault:
            self._send(request, self.fault(fault))

    async def _infer_filled(self, request: IncomingRequest, asked: InferenceRequest) -> None:
        """Score a request with what the store has of its rows."""
        try:
            inputs, told = await self._encoded(asked)
            self._put(request, replace(asked, told=told), inputs)
        except Exception as fault:
            self._send(request, self.fault(fault))

    async def _encoded(self, asked: InferenceRequest) -> tuple[Asked, dict[str, Any]]:
        """The inputs of a request's rows with what the store has of them, and what its client is told of
        that."""
        if self.store is None:
            return self.heads.encoded(asked.rows), {}
        self.heads.require_few(asked.rows)
        filled = await self.store.fill(asked.rows, self.heads.columns, self.heads.encoded)
        return filled.inputs, {LACKING: filled.lacking} if filled.lacking else {}

    def _put(self, request: IncomingRequest, asked: InferenceRequest, inputs: Asked) -> None:
        if self._spans is not None:
            inputs.span = request.span = self._spans.begin(request.traceparent, request.began)
        done = partial(self._answer, request, asked, self._names(asked), inputs)
        self.batcher.put(inputs, done, asked.timeout, asked.priority)

    def _names(self, asked: InferenceRequest) -> list[str]:
        """The outputs that are asked for; ``Refused`` for one that the model does not have."""
        names = self.outputs if asked.outputs is None else list(asked.outputs)
        unknown = next((name for name in names if name not in self.outputs), None)
        if unknown is not None:
            raise bad(f"the model has no output '{shown(unknown)}'; it has {', '.join(self.outputs)}")
        return names

    def _answer(
        self,
        request: IncomingRequest,
        asked: InferenceRequest,
        names: Sequence[str],
        inputs: Asked,
        scores: Array | Exception,
    ) -> None:
        """Answer a request whose ``scores`` float32 [N] or [N, T] have come, or why there are none."""
        if isinstance(scores, Exception):
            self._send(request, self.fault(scores))
            return
        try:
            found = self._found(asked, names, inputs, scores)
            if inputs.lacking:
                asked = replace(asked, told={**asked.told, **self.said(inputs)})
            answered = 200, *answer(asked, self.name, self.version, found)
        except Exception as fault:
            self._send(request, self.fault(fault))
        else:
            self._send(request, compressed(answered, request.headers.get(b"accept-encoding")))

    def _found(
        self, asked: InferenceRequest, names: Sequence[str], inputs: Asked, scores: Array
    ) -> dict[str, Array]:
        """The outputs of these ``names``, of scores that are kept for what judges them later."""
        columns = scores.reshape(len(scores), -1)
        if asked.id is not None:
            self.monitor.keep(asked.id, columns)
        if self.follower is not None and self.follower.gate.looks:
            self.follower.recent.keep(asked.id, inputs, columns)
        if self.mirror is not None:  # once the answer is sent
            asyncio.get_running_loop().call_soon(self.mirror, inputs, columns, asked.id)
        return {name: columns[:, self.outputs.index(name)] for name in names}

    @staticmethod
    def said(inputs: Asked) -> dict[str, Any]:
        """What is said of the scores of a request."""
        return {LOST_SHARDS: inputs.lacking} if inputs.lacking else {}

    def refused(self, fault: Exception) -> Refused:
        """What a client is told in the place of scores; counted, and logged if it is the server's fault."""
        told = fault
        if isinstance(fault, WrongIds):
            self.monitor.mine.wrong += fault.counts
        elif isinstance(fault, StoreError):
            log.error("a request failed: %s", fault)
            lacking = "rows that the request looks up cannot be read; the server's log names them"
            told = Refused(500, "rows", lacking)
        elif not isinstance(fault, Refused):
            log.error("a request failed", exc_info=fault)
            told = Refused(500, "fault", "the server failed; its log says why")
        assert isinstance(told, Refused)
        self.metrics.refused.labels(told.reason).inc()
        return told

    def fault(self, fault: Exception) -> Answer:
        """The answer to a request that failed."""
        return refusal(self.refused(fault))

    def count(self, status: int, seconds: float) -> None:
        """Count an answer with HTTP's ``status``."""
        self.metrics.answered(status, seconds, len(self.batcher.queue))
        self.counted.own.answered(status, seconds)

    def _count_unknown(self, refused: Refused, seconds: float) -> None:
        """Count a request for scores of another model, or version."""
        self.metrics.refused.labels(refused.reason).inc()
        self.metrics.answered(refused.status, seconds)

    def _send(self, request: IncomingRequest, answered: Answer) -> None:
        seconds = perf_counter() - request.began
        if not self.metrics.several:
            request.respond(request, answered)
        self.count(answered[0], seconds)
        if self.metrics.several:  # a worker that is killed then has counted it
            request.respond(request, answered)


def _settle(done: asyncio.Future[Array], found: Array | Exception) -> None:
    """Give the waiting request its scores, or why there are none, if it still waits."""
    if done.done():
        return
    if isinstance(found, Exception):
        done.set_exception(found)
    else:
        done.set_result(found)
