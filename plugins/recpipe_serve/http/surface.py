"""The addresses of the open inference protocol, and of what Triton adds to it, over a server's models."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from recpipe.common.versions import installed_version
from recpipe.errors import shown
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused, bad
from recpipe_serve.http.compression import decoded, encoded, too_large
from recpipe_serve.http.connections import ENCODING, Answer, IncomingRequest, error, header_fault
from recpipe_serve.http.openapi import described
from recpipe_serve.http.protocol import NO_REGIONS
from recpipe_serve.models import EXTENSIONS, READY, ServedModel, ServedModels, require_own_files
from recpipe_serve.settings import LOGS, TRACES, log_settings, require_unchanged, trace_settings

JSON = {"content-type": "application/json"}
Endpoint = Callable[[Request], Awaitable[Response]]
OWN = {
    "labels": ["POST"],
    "learn": ["POST"],
    "retrieve": ["POST"],
    "monitor": ["GET"],
    "deltas": ["GET", "POST"],
    "routes": ["GET"],
}
"""What a model answers beside the protocol, and the methods of these addresses."""


class HttpModel(ServedModel):
    """A model that answers HTTP itself."""

    @abstractmethod
    def infer(self, request: IncomingRequest) -> None:
        """Answer a request for scores."""

    @abstractmethod
    def endpoint(self, what: str) -> Endpoint:
        """What answers its address of this word, which is in ``OWN``."""


class Surface:
    """An application for an ASGI server, without what ``infer`` of the models answers.

    ``text``: gives the figures for Prometheus. ``lifespan``: in which requests are answered.
    """

    def __init__(
        self,
        models: ServedModels[Any],
        config: ServeConfig,
        text: Callable[[], Awaitable[bytes]],
        lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    ) -> None:
        self.models, self.config = models, config
        self._text, self._lifespan = text, lifespan

    def app(self) -> ASGIApp:
        """The application."""
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._described),
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2/models/stats", self._statistics),
            Route("/v2/logging", self._logging, methods=[*get, *post]),
            Route("/v2/trace/setting", self._tracing, methods=[*get, *post]),
            Route("/v2/models/{model}/trace/setting", self._tracing, methods=[*get, *post]),
            Route("/v2/repository/index", self._index, methods=post),
            Route("/v2/repository/models/{model}/load", self._load, methods=post),
            Route("/v2/repository/models/{model}/unload", self._unload, methods=post),
        ]
        for kind in ("system", "cuda"):
            memory = f"/v2/{kind}sharedmemory"
            routes += [
                Route(f"{memory}/status", self._no_regions, methods=get),
                Route(f"{memory}/unregister", self._no_regions, methods=post),
                Route(f"{memory}/region/{{region}}/{{what}}", self._no_region, methods=[*get, *post]),
            ]
        model = "/v2/models/{model}"
        for path in (model, model + "/versions/{version}"):
            routes += [
                Route(path, self._model),
                Route(f"{path}/ready", self._model_ready),
                Route(f"{path}/config", self._configuration),
                Route(f"{path}/stats", self._statistics),
                Route(f"{path}/infer", self._unknown, methods=post),
            ]
            routes += [
                Route(f"{path}/{what}", partial(self._own, what), methods=list(methods))
                for what, methods in OWN.items()
            ]
        faults: Any = {Refused: _refused, HTTPException: _not_found, Exception: _failed}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=faults)

    def _found(self, request: Request) -> HttpModel:
        """The model of an address; ``Refused`` if it is not here."""
        given = request.path_params
        found: HttpModel = self.models.find(given["model"], given.get("version", ""))
        return found

    async def _metrics(self, _: Request) -> Response:
        return Response(await self._text(), media_type="text/plain; version=0.0.4")

    async def _server(self, _: Request) -> Response:
        version = installed_version("recpipe") or ""
        return json_response({"name": "recpipe", "version": version, "extensions": EXTENSIONS})

    async def _described(self, _: Request) -> Response:
        return json_response(described(self.models.every()))

    async def _live(self, _: Request) -> Response:
        return Response(status_code=200)

    async def _ready(self, _: Request) -> Response:
        return Response(status_code=200 if self.models.ready else 503)

    async def _model(self, request: Request) -> Response:
        return json_response(self._found(request).metadata())

    async def _model_ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._found(request).ready else 503)

    async def _configuration(self, request: Request) -> Response:
        return json_response(self._found(request).configuration())

    async def _statistics(self, request: Request) -> Response:
        named = [self._found(request)] if "model" in request.path_params else self.models.every()
        return json_response({"model_stats": [model.statistics() for model in named]})

    async def _index(self, request: Request) -> Response:
        """All models, or with ``{"ready": true}`` those that are."""
        asked = await self._asked(request)
        ready = asked.get("ready") is True
        return json_response([own for own in self.models.index() if not ready or own["state"] == READY])

    async def _tracing(self, request: Request) -> Response:
        """Which requests are traced: of a model as of all."""
        if "model" in request.path_params:
            self._found(request)
        told: dict[str, Any] = dict(trace_settings(self.config.traces))
        if request.method == "POST":
            require_unchanged(told, await self._asked(request), TRACES)
        return json_response(told | {"trace_mode": told["trace_mode"][0]})

    async def _logging(self, request: Request) -> Response:
        """What the server logs."""
        told = log_settings()
        if request.method == "POST":
            require_unchanged(told, await self._asked(request), LOGS)
        return json_response(told)

    async def _asked(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body, empty if there is none."""
        asked = await read_json(request, self.config, {})
        if not isinstance(asked, dict):
            raise bad("the body is no JSON object")
        return asked

    async def _load(self, request: Request) -> Response:
        parameters = (await self._asked(request)).get("parameters")
        require_own_files(parameters if isinstance(parameters, dict) else ())
        await self.models.load(request.path_params["model"])
        return Response(status_code=200)

    async def _unload(self, request: Request) -> Response:
        await self.models.unload(request.path_params["model"])
        return Response(status_code=200)

    async def _no_regions(self, _: Request) -> Response:
        """There is no shared memory, of which a client may be told, and which it may let go."""
        return json_response([])

    async def _no_region(self, request: Request) -> Response:
        what = request.path_params["what"]
        if what == "unregister":  # which Triton does not refuse either
            return Response(status_code=200)
        if what not in ("status", "register"):
            raise HTTPException(404)
        raise Refused(501 if what == "register" else 404, "shared_memory", NO_REGIONS)

    async def _unknown(self, request: Request) -> Response:
        """A request for scores of another model, or version; the others do not come here."""
        began = perf_counter()
        try:
            self._found(request)
        except Refused as refused:
            self.models.count_unknown(refused, perf_counter() - began)
            raise
        raise AssertionError("the connection answers it")

    async def _own(self, what: str, request: Request) -> Response:
        """A model's own address; candidates are ranked by the version whose turn it is."""
        given = request.path_params
        find = self.models.chosen if what == "retrieve" else self.models.find
        try:
            model: HttpModel = find(given["model"], given.get("version", ""))
            return await model.endpoint(what)(request)
        except ClientDisconnect:
            return Response(status_code=499)


async def read_body(request: Request, config: ServeConfig) -> bytes:
    """The body, within the limits of size and time; ``Refused`` beyond."""
    most, seconds = config.body_bytes, config.body_seconds
    headers = dict(request.scope["headers"])
    if (fault := header_fault(headers, most)) is not None:
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
    return decoded(bytes(body), headers.get(ENCODING, b"identity"), most)


async def read_json(request: Request, config: ServeConfig, default: Any = None) -> Any:
    """The JSON in a body; ``default`` of an empty one, if there is such. ``Refused`` for what is none."""
    body = await read_body(request, config)
    if not body and default is not None:
        return default
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as fault:
        raise bad(f"the body is no JSON ({shown(fault, 100)})") from fault


def json_response(content: Mapping[str, Any] | Sequence[Any], status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(json.dumps(content), status, JSON)


def compressed(answer: Answer, accepts: bytes | None) -> Answer:
    """``answer`` as a client with this ``Accept-Encoding`` is sent it."""
    status, content, headers = answer
    content, word = encoded(content, accepts)
    if word is None:
        return answer
    return status, content, {**headers, "content-encoding": word, "vary": "accept-encoding"}


def refusal(refused: Refused) -> Answer:
    """One line, with the headers that its status has."""
    headers = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(refused.status, {})
    return refused.status, error(str(refused)), JSON | headers


async def _refused(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, Refused)
    status, content, headers = refusal(fault)
    return Response(content, status, dict(headers))


async def _not_found(request: Request, fault: Exception) -> Response:
    """An address that is not here, or not by this method."""
    assert isinstance(fault, HTTPException)
    what = f"{request.method} {shown(request.url.path)}"
    told = {404: f"nothing is at {what}", 405: f"{what} is not taken"}.get(fault.status_code, fault.detail)
    return Response(error(told), fault.status_code, JSON | dict(fault.headers or {}))


async def _failed(_: Request, fault: Exception) -> Response:
    return Response(error("the server failed; its log says why"), 500, JSON)
