"""The server's addresses: health, metadata, inference, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from recpipe.answers.score import RowMap
from recpipe.common.versions import installed_version
from recpipe.data.preparation import Preparation
from recpipe.errors import StoreError, shown
from recpipe_serve.answer_server import AnswerServer
from recpipe_serve.batching.batcher import Batcher, Score
from recpipe_serve.batching.forms import Array, Asked
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused, WrongIds, bad
from recpipe_serve.fresh.follower import Follower, wanted_version
from recpipe_serve.http.acceptor import Acceptor
from recpipe_serve.http.connections import (
    Answer,
    IncomingRequest,
    Listener,
    error,
    header_fault,
    too_large,
)
from recpipe_serve.http.features import NO_MAPS, Features, Heads
from recpipe_serve.http.learning import Posted
from recpipe_serve.http.metrics import Metrics
from recpipe_serve.http.protocol import HEADER_LENGTH, InferenceRequest, answer, json_length
from recpipe_serve.http.raw import DENSE
from recpipe_serve.monitor.monitor import Monitor
from recpipe_serve.monitor.windows import REFUSED

if TYPE_CHECKING:
    from recpipe_serve.candidates import Candidates
    from recpipe_serve.http.learning import Learner, Learning

log = logging.getLogger("recpipe")
VERSION = "1"
_JSON = {"content-type": "application/json"}


class Server:
    """One package behind the open inference protocol.

    ``score`` and ``manifest``: a ``RequestScorer`` and its package's. ``name``: of the model in addresses.
    ``config``: the words of ``recpipe serve``. ``several``: whether it is one of several processes, whose
    metrics are shown together; it is the one of this ``number``, and what the monitors see is in ``folder``.
    ``preparation``: by which raw values are encoded; None: they are refused. ``maps``: see ``Features``.
    ``candidates``: what finds these; None: the package has none. ``answers``: what requests are put to before
    the model, which has begun with this package; None: nothing. ``learning``: takes labelled events
    for ``learner``; None: nothing is learnt.
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
    ) -> None:
        self.candidates, self.answers = candidates, answers
        self.learning, self.learner = learning, learner
        self.manifest, self.name, self.config = manifest, name, config
        self.outputs = [output["name"] for output in manifest["outputs"]]
        self.features = Features(manifest, config.samples, maps)
        self.preparation = preparation
        self.heads = Heads(self.features, preparation)
        own = f"/v2/models/{name}"
        self.addresses = [f"{own}/infer", f"{own}/versions/{VERSION}/infer"]
        """The paths to which requests for scores are posted."""
        self.batcher = Batcher(score, config)
        self.metrics = Metrics(name, lambda: self.monitor.compared(), several)
        self.follower: Follower | None = None
        self.batcher.saw, self.batcher.answers = self.metrics.saw, answers
        if answers is not None:
            self.metrics.show(answers.counted)
        self._make_monitor = partial(Monitor, config=config, folder=folder, number=number)
        self.monitor = self._make_monitor(manifest)
        self.batcher.scored = self.monitor.saw

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
        if preparation != self.preparation or maps != self.features.maps:
            self.preparation, self.features.maps = preparation, maps
            self.heads.use(preparation)
            self.batcher.encode_anew(self.heads.anew)
        if manifest != self.manifest:
            self.batcher.tell()
            monitor = self._make_monitor(manifest)
            self.monitor.close()
            self.manifest, self.monitor, self.batcher.scored = manifest, monitor, monitor.saw
        self.batcher.score, self.candidates, self.learner = score, candidates, learner
        self.metrics.serves(package)

    def follow(self, follower: Follower) -> None:
        """Show where ``follower`` is, and hand it the requests by which it judges deltas."""
        self.follower = follower
        self.metrics.show(follower.figures)

    def app(self) -> ASGIApp:
        """The application for an ASGI server, without what ``infer`` answers."""
        model = "/v2/models/{model}"
        routes = [Route("/metrics", self._metrics), Route("/v2", self._server)]
        routes += [Route(f"/v2/health/{what}", self._health) for what in ("live", "ready")]
        for path in (model, model + "/versions/{version}"):
            routes += [
                Route(path, self._model),
                Route(f"{path}/ready", self._model_ready),
                Route(f"{path}/infer", self._unknown, methods=["POST"]),
                Route(f"{path}/labels", self._labels, methods=["POST"]),
                Route(f"{path}/learn", self._learn, methods=["POST"]),
                Route(f"{path}/retrieve", self._retrieve, methods=["POST"]),
                Route(f"{path}/monitor", self._monitor),
                Route(f"{path}/deltas", self._deltas, methods=["GET", "POST"]),
            ]
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={Refused: _refused})

    def listener(self, acceptor: Acceptor, stop: float = 10.0) -> Listener:
        """What serves it on the connections of ``acceptor``; ``stop``: seconds for the last requests."""
        return Listener(self.app(), acceptor, self.infer, self.addresses, stop)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.batcher.start()
        yield
        await self.batcher.close()

    async def _metrics(self, _: Request) -> Response:
        self.batcher.tell()
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _server(self, _: Request) -> Response:
        version = installed_version("recpipe") or ""
        return _json({"name": "recpipe", "version": version, "extensions": ["binary_tensor_data"]})

    async def _health(self, request: Request) -> Response:
        live = request.url.path.endswith("live") or self.batcher.alive
        return Response(status_code=200 if live else 503)

    def _require_known(self, request: Request) -> None:
        """``Refused`` for an address of another model, or version."""
        model, version = request.path_params["model"], request.path_params.get("version", VERSION)
        if model != self.name or version != VERSION:
            what = f"'{shown(model)}' of version {shown(version)}"
            raise Refused(
                404, "unknown_model", f"no model {what} here; there is '{self.name}' of version {VERSION}"
            )

    async def _model(self, request: Request) -> Response:
        self._require_known(request)
        inputs = [{"name": name, "datatype": "INT64", "shape": [-1]} for name in self.features.rows]
        if width := len(self.features.dense):
            inputs.insert(0, {"name": DENSE, "datatype": "FP32", "shape": [-1, width]})
        inputs += [{"name": name, "datatype": "FP32", "shape": [-1]} for name in self.features.weights]
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1]} for name in self.outputs]
        about = {"name": self.name, "versions": [VERSION], "platform": "recpipe"}
        return _json({**about, "inputs": inputs, "outputs": outputs})

    async def _model_ready(self, request: Request) -> Response:
        self._require_known(request)
        return Response(status_code=200 if self.batcher.alive else 503)

    async def _monitor(self, request: Request) -> Response:
        self._require_known(request)
        self.batcher.tell()
        compared = await asyncio.to_thread(self.monitor.compared)
        told = {"name": self.name, "step": self.manifest.get("step"), **compared.to_dict()}
        return _json(told if self.answers is None else told | {"answers": self.answers.told()})

    async def _deltas(self, request: Request) -> Response:
        """Which versions are kept and which one answers; or another one is to answer."""
        self._require_known(request)
        if self.follower is None:
            raise bad("the server follows no deltas: start it with follow=DIRECTORY")
        if request.method == "POST":
            if not self.config.rollback:
                raise Refused(403, "not_allowed", "versions are chosen where the server has rollback=true")
            body = await self._body(request)
            try:
                content = json.loads(body)
            except (ValueError, RecursionError) as fault:
                raise bad(f"the body is no JSON ({shown(fault, 100)})") from fault
            await self.follower.go_to(wanted_version(content))
        return _json({"name": self.name, **self.follower.told()})

    async def _labels(self, request: Request) -> Response:
        """Labels of requests that were answered before."""
        try:
            body = await self._body(request)
            counts = await self.monitor.labelled(body)
            if self.follower is not None:
                self.follower.labelled(json.loads(body)["labels"], self.monitor.tasks)
            return _json(counts)
        except Refused:
            self.monitor.mine.posted[REFUSED] += 1
            raise
        except ClientDisconnect:
            return Response(status_code=499)

    async def _learn(self, request: Request) -> Response:
        """Labelled events, which the package's effects learn."""
        try:
            self._require_known(request)
            learning, learner = self.learning, self.learner
            if learning is None or learner is None:
                raise Refused(404, "learning", "nothing is learnt here: start the server with learn=true")
            learning.require(request.headers.get("authorization"))
            body, header = await self._body(request), request.headers.get(HEADER_LENGTH.decode())
            _, inputs = self.heads.read(body, header)
            posted = Posted.parse(body[: json_length(header, len(body))], inputs.samples)
            told = await learning.learn(learner, posted, inputs, self.batcher)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as fault:
            self.metrics.events.labels("refused").inc()
            status, content, headers = self._fault(fault)
            return Response(content, status, dict(headers))
        for result in ("learnt", "again"):
            self.metrics.events.labels(result).inc(told[result])
        return _json(told)

    async def _body(self, request: Request) -> bytes:
        """The body of a request for this model, within the limits of size and time; ``Refused`` beyond."""
        most, seconds = self.config.body_bytes, self.config.body_seconds
        self._require_known(request)
        if (fault := header_fault(dict(request.scope["headers"]), most)) is not None:
            raise fault
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise too_large(most)
        except TimeoutError:
            raise Refused(408, "slow", f"the body did not come within {seconds:g} s") from None
        return bytes(body)

    async def _retrieve(self, request: Request) -> Response:
        """The best candidates of a user: found in the index, and scored by the ranker in one batch with what
        else waits."""
        began = perf_counter()
        try:
            answered = 200, *await self._retrieved(await self._body(request))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as fault:
            status, content, headers = self._fault(fault)
            answered = status, content, dict(headers)
        self.metrics.answered(answered[0], perf_counter() - began, len(self.batcher.queue))
        return Response(answered[1], answered[0], answered[2])

    async def _retrieved(self, body: bytes) -> tuple[bytes, dict[str, str]]:
        if self.candidates is None:
            raise bad("the package has no candidates: package the ranker with index=INDEX")
        from recpipe_serve.candidates import Wanted

        wanted, candidates = Wanted.parse(body, self.config.samples), None
        while candidates is not self.candidates:  # another package has taken its place meanwhile
            candidates = self.candidates
            assert candidates is not None
            places, similar = await asyncio.to_thread(candidates.find, wanted)
            inputs = candidates.asked(wanted, places) if len(places) else None
        scores = np.empty((0, len(self.outputs)), np.float32)
        if inputs is not None:
            done: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
            self.batcher.put(inputs, partial(_settle, done))
            found = await done
            scores = found.reshape(len(found), -1)
            if wanted.id is not None:
                order = np.argsort(
                    -scores[:, self.outputs.index(candidates.output(wanted.by))], kind="stable"
                )
                self.monitor.keep(wanted.id, scores[order[: wanted.k]])
        told = {"model_name": self.name, "model_version": VERSION}
        if wanted.id is not None:
            told["id"] = wanted.id
        return json.dumps(told | candidates.answer(wanted, places, similar, scores)).encode(), _JSON

    async def _unknown(self, request: Request) -> Response:
        """A request for scores of another model, or version; the others do not come here."""
        began = perf_counter()
        try:
            self._require_known(request)
        except Refused as refused:
            self.metrics.refused.labels(refused.reason).inc()
            self.metrics.answered(refused.status, perf_counter() - began, len(self.batcher.queue))
            raise
        raise AssertionError("the application answers it")

    def infer(self, request: IncomingRequest) -> None:
        """Score a request; whatever is wrong with it is an answer of one line."""
        try:
            if request.fault is not None:
                raise request.fault
            length = request.headers.get(HEADER_LENGTH)
            asked, inputs = self.heads.read(
                request.body, None if length is None else length.decode("latin-1")
            )
            names = self.outputs if asked.outputs is None else list(asked.outputs)
            unknown = next((name for name in names if name not in self.outputs), None)
            if unknown is not None:
                raise bad(f"the model has no output '{shown(unknown)}'; it has {', '.join(self.outputs)}")
            request.parts.clear()
            done = partial(self._answer, request, asked, names, inputs)
            self.batcher.put(inputs, done, asked.timeout)
        except Exception as fault:
            self._send(request, self._fault(fault))

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
            self._send(request, self._fault(scores))
            return
        try:
            columns = scores.reshape(len(scores), -1)
            if asked.id is not None:
                self.monitor.keep(asked.id, columns)
            if self.follower is not None and self.follower.gate.looks:
                self.follower.recent.keep(asked.id, inputs, columns)
            found = {name: columns[:, self.outputs.index(name)] for name in names}
            answered = 200, *answer(asked, self.name, VERSION, found)
        except Exception as fault:
            self._send(request, self._fault(fault))
        else:
            self._send(request, answered)

    def _fault(self, fault: Exception) -> Answer:
        """What is answered in the place of scores."""
        if isinstance(fault, Refused):
            self.metrics.refused.labels(fault.reason).inc()
            if isinstance(fault, WrongIds):
                self.monitor.mine.wrong += fault.counts
            return _refusal(fault)
        if isinstance(fault, StoreError):
            log.error("a request failed: %s", fault)
            self.metrics.refused.labels("rows").inc()
            lacking = "rows that the request looks up cannot be read; the server's log names them"
            return _refusal(Refused(500, "rows", lacking))
        log.error("a request failed", exc_info=fault)
        self.metrics.refused.labels("fault").inc()
        return _refusal(Refused(500, "fault", "the server failed; its log says why"))

    def _send(self, request: IncomingRequest, answered: Answer) -> None:
        seconds = perf_counter() - request.began
        if not self.metrics.several:
            request.respond(request, answered)
        self.metrics.answered(answered[0], seconds, len(self.batcher.queue))
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


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content), status, _JSON)


async def _refused(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, Refused)
    status, content, headers = _refusal(fault)
    return Response(content, status, headers)


def _refusal(refused: Refused) -> Answer:
    headers = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(refused.status, {})
    return refused.status, error(str(refused)), _JSON | headers
