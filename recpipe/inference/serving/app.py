"""The server's addresses: health, metadata, inference, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from recpipe.common.versions import installed_version
from recpipe.errors import StoreError, shown
from recpipe.inference.serving.batcher import Batcher, Limits, Score
from recpipe.inference.serving.errors import Refused, WrongIds, bad
from recpipe.inference.serving.features import Features
from recpipe.inference.serving.heads import Heads
from recpipe.inference.serving.metrics import Metrics
from recpipe.inference.serving.monitor import Monitor, Watch
from recpipe.inference.serving.protocol import HEADER_LENGTH, answer, chosen

log = logging.getLogger("recpipe")
VERSION = "1"
_JSON = {"content-type": "application/json"}
Headers = Mapping[bytes, bytes]
"""Of a request, by name in small letters."""
Answer = tuple[int, bytes, dict[str, str]]
"""Status, body, and headers without the body's length."""


@dataclass(frozen=True)
class Bounds:
    """What one request may take."""

    body: int = 16 * 2**20
    """Bytes of a request's body."""
    samples: int = 4096
    """Samples of a request."""
    reading: float = 10.0
    """Seconds in which a request's body must have come."""


class Server:
    """One package behind the open inference protocol.

    ``score`` and ``manifest``: a ``RequestScorer`` and its package's. ``name``: of the model in addresses.
    ``several``: whether it is one of several processes, whose metrics are shown together. ``watch``: how the
    model is watched.
    """

    def __init__(
        self,
        score: Score,
        manifest: Mapping[str, Any],
        name: str,
        limits: Limits,
        bounds: Bounds,
        several: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self.manifest, self.name, self.bounds = manifest, name, bounds
        self.outputs = [output["name"] for output in manifest["outputs"]]
        self.features = Features(manifest, bounds.samples)
        self.heads = Heads(self.features)
        self.batcher = Batcher(score, limits)
        self.metrics = Metrics(name, lambda: self.monitor.compared(), several)
        self.batcher.saw = self.metrics.saw
        self.watch = watch or Watch()
        self.monitor = Monitor(manifest, self.watch)
        self.batcher.scored = self.monitor.saw

    def use(self, score: Score, manifest: Mapping[str, Any], package: str) -> None:
        """Score by ``score`` of another package with this ``manifest`` from the next batch on. It takes and
        gives what the one before did; the metrics call it ``package``. It is watched anew."""
        if manifest != self.manifest:
            monitor = Monitor(manifest, self.watch)
            self.monitor.close()
            self.manifest, self.monitor, self.batcher.scored = manifest, monitor, monitor.saw
        self.batcher.score = score
        self.metrics.serves(package)

    def app(self) -> ASGIApp:
        """The application for an ASGI server.

        Requests to this model for scores do not go through Starlette's routes and middleware, which would be
        a good part of their time beside the model.
        """
        model = "/v2/models/{model}"
        routes = [Route("/metrics", self._metrics), Route("/v2", self._server)]
        routes += [Route(f"/v2/health/{what}", self._health) for what in ("live", "ready")]
        for path in (model, model + "/versions/{version}"):
            routes += [
                Route(path, self._model),
                Route(f"{path}/ready", self._model_ready),
                Route(f"{path}/infer", self._unknown, methods=["POST"]),
                Route(f"{path}/labels", self._labels, methods=["POST"]),
                Route(f"{path}/monitor", self._monitor),
            ]
        others = Starlette(routes=routes, lifespan=self._lifespan)
        own = f"/v2/models/{self.name}"
        infer = {f"{own}/infer", f"{own}/versions/{VERSION}/infer"}

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] in infer and scope["method"] == "POST":
                await self._infer(scope, receive, send)
            else:
                await others(scope, receive, send)

        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.batcher.start()
        yield
        await self.batcher.close()

    async def _metrics(self, _: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _monitor(self, request: Request) -> Response:
        try:
            self._known(request)
        except Refused as refused:
            return _error(refused)
        compared = await asyncio.to_thread(self.monitor.compared)
        return _json({"name": self.name, "step": self.manifest.get("step"), **compared.to_dict()})

    async def _labels(self, request: Request) -> Response:
        """Labels of requests that were answered before."""
        try:
            self._known(request)
            headers = dict(request.scope["headers"])
            return _json(await self.monitor.labelled(await self._body(headers, request.receive)))
        except Refused as refused:
            self.monitor.refused()
            return _error(refused)
        except ClientDisconnect:
            return Response(status_code=499)

    async def _server(self, _: Request) -> Response:
        version = installed_version("recpipe") or ""
        return _json({"name": "recpipe", "version": version, "extensions": ["binary_tensor_data"]})

    async def _health(self, request: Request) -> Response:
        live = request.url.path.endswith("live") or self.batcher.alive
        return Response(status_code=200 if live else 503)

    async def _model(self, request: Request) -> Response:
        try:
            self._known(request)
        except Refused as refused:
            return _error(refused)
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1]} for name in self.outputs]
        about = {"name": self.name, "versions": [VERSION], "platform": "recpipe"}
        return _json({**about, "inputs": self.features.described(), "outputs": outputs})

    async def _model_ready(self, request: Request) -> Response:
        try:
            self._known(request)
        except Refused as refused:
            return _error(refused)
        return Response(status_code=200 if self.batcher.alive else 503)

    def _known(self, request: Request) -> None:
        model, version = request.path_params["model"], request.path_params.get("version", VERSION)
        if model != self.name or version != VERSION:
            what = f"'{shown(model)}' of version {shown(version)}"
            raise Refused(
                404, "unknown_model", f"no model {what} here; there is '{self.name}' of version {VERSION}"
            )

    async def _unknown(self, request: Request) -> Response:
        """A request for scores of another model, or version."""
        began = perf_counter()
        try:
            self._known(request)
        except Refused as refused:
            self.metrics.refused.labels(refused.reason).inc()
            self.metrics.answered(refused.status, perf_counter() - began, self.batcher.waiting)
            return _error(refused)
        raise AssertionError("the application answers it")

    async def _infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Score a request; whatever is wrong with it is an answer of one line."""
        began = perf_counter()
        try:
            answered = await self._scored(dict(scope["headers"]), receive)
        except Refused as refused:
            self.metrics.refused.labels(refused.reason).inc()
            if isinstance(refused, WrongIds):
                self.monitor.wrong_ids(refused.counts)
            answered = _refusal(refused)
        except ClientDisconnect:
            self.metrics.refused.labels("client_gone").inc()
            answered = 499, b"", {}
        except StoreError as fault:
            log.error("a request failed: %s", fault)
            self.metrics.refused.labels("rows").inc()
            lacking = "rows that the request looks up cannot be read; the server's log names them"
            answered = _refusal(Refused(500, "rows", lacking))
        except Exception:
            log.exception("a request failed")
            self.metrics.refused.labels("fault").inc()
            answered = _refusal(Refused(500, "fault", "the server failed; its log says why"))
        status, content, headers = answered
        raw = [(key.encode(), value.encode()) for key, value in headers.items()]
        raw.append((b"content-length", str(len(content)).encode()))
        # Before it is sent: a worker that is killed then has counted it.
        self.metrics.answered(status, perf_counter() - began, self.batcher.waiting)
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": content})

    async def _scored(self, headers: Headers, receive: Receive) -> Answer:
        length = headers.get(HEADER_LENGTH)
        body = await self._body(headers, receive)
        asked, inputs = self.heads.read(body, None if length is None else length.decode("latin-1"))
        names = chosen(asked, self.outputs)
        scores = await self.batcher.scores(inputs, asked.timeout)
        columns = scores.reshape(len(scores), -1)
        if asked.id is not None:
            self.monitor.keep(asked.id, columns)
        found = {name: columns[:, self.outputs.index(name)] for name in names}
        return 200, *answer(asked, self.name, VERSION, found)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """A request's body; ``Refused`` if it is too large, compressed, or comes too slowly."""
        encoding = headers.get(b"content-encoding", b"identity")
        if encoding != b"identity":
            told = shown(encoding.decode("latin-1"))
            raise Refused(415, "encoding", f"Content-Encoding {told} is not taken; send it as it is")
        most = self.bounds.body
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit():
            raise bad("Content-Length is no number")
        if len(declared) > 18 or int(declared) > most:
            raise _too_large(most)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.bounds.reading):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    parts.append(part)
        except TimeoutError:
            raise Refused(408, "slow", f"the body did not come within {self.bounds.reading:g} s") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most: int) -> Refused:
    return Refused(413, "too_large", f"the body is larger than {most} bytes")


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content), status, _JSON)


def _error(refused: Refused) -> Response:
    status, content, headers = _refusal(refused)
    return Response(content, status, headers)


def _refusal(refused: Refused) -> Answer:
    headers = {"retry-after": "1"} if refused.status == 503 else {}
    return refused.status, json.dumps({"error": str(refused)}).encode(), _JSON | headers
