"""What a model answers over HTTP beside the protocol: its monitor and labels, its versions, what it learns,
and the best candidates of a user."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from recpipe_serve.errors import Refused, bad
from recpipe_serve.fresh.follower import wanted_version
from recpipe_serve.http.learning import Posted
from recpipe_serve.http.protocol import HEADER_LENGTH, json_length
from recpipe_serve.http.surface import JSON, Endpoint, json_response, read_body, read_json

if TYPE_CHECKING:
    from recpipe_serve.candidates import Candidates, Wanted
    from recpipe_serve.http.app import Server

LACKING = "features_lacking"
"""A parameter of responses: for how many keys defaults stand for the values of the feature store."""


class OwnAddresses:
    """Those of ``server``."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def endpoint(self, what: str) -> Endpoint:
        """What answers the address of this word, which is in ``OWN``."""
        own: dict[str, Endpoint] = {
            "labels": self._labels,
            "learn": self._learn,
            "retrieve": self._retrieve,
            "monitor": self._monitor,
            "deltas": self._deltas,
            "routes": self._routes,
        }
        return own[what]

    async def _routes(self, _: Request) -> Response:
        if self.server.routes is None:
            raise bad("one version of the model is served: serve a repository of several")
        return json_response(await asyncio.to_thread(self.server.routes))

    async def _monitor(self, _: Request) -> Response:
        server = self.server
        server.batcher.tell()
        compared = await asyncio.to_thread(server.monitor.compared)
        told = {"name": server.name, "step": server.manifest.get("step"), **compared.to_dict()}
        return json_response(told if server.answers is None else told | {"answers": server.answers.told()})

    async def _deltas(self, request: Request) -> Response:
        """Which versions are kept and which one answers; or another one is to answer."""
        server = self.server
        if server.follower is None:
            raise bad("the server follows no deltas: start it with follow=DIRECTORY")
        if request.method == "POST":
            if not server.config.rollback:
                raise Refused(403, "not_allowed", "versions are chosen where the server has rollback=true")
            await server.go_to(wanted_version(await read_json(request, server.config)))
        return json_response({"name": server.name, **server.follower.told()})

    async def _labels(self, request: Request) -> Response:
        """Labels of requests that were answered before."""
        return json_response(await self.server.join(await read_body(request, self.server.config)))

    async def _learn(self, request: Request) -> Response:
        """Labelled events, which the package's effects learn."""
        server = self.server
        try:
            learning, learner = server.learning, server.learner
            if learning is None or learner is None:
                raise Refused(404, "learning", "nothing is learnt here: start the server with learn=true")
            learning.require(request.headers.get("authorization"))
            body, header = (
                await read_body(request, server.config),
                request.headers.get(HEADER_LENGTH.decode()),
            )
            _, inputs = server.heads.read(body, header)
            posted = Posted.parse(body[: json_length(header, len(body))], inputs.samples)
            names = [feature["name"] for feature in server.manifest["sparse"]]
            entities = [names.index(about["entity"]) for about in server.manifest.get("effects", ())]
            told = await learning.learn(learner, posted, inputs, server.batcher, entities)
        except ClientDisconnect:
            raise
        except Exception as fault:
            server.metrics.events.labels("refused").inc()
            status, content, headers = server.fault(fault)
            return Response(content, status, dict(headers))
        for result in ("learnt", "again"):
            server.metrics.events.labels(result).inc(told[result])
        return json_response(told)

    async def _retrieve(self, request: Request) -> Response:
        """The best candidates of a user: found in the index, and scored by the ranker in one batch with what
        else waits."""
        began = perf_counter()
        try:
            answered = 200, *await self._retrieved(await read_body(request, self.server.config))
        except ClientDisconnect:
            raise
        except Exception as fault:
            status, content, headers = self.server.fault(fault)
            answered = status, content, dict(headers)
        self.server.count(answered[0], perf_counter() - began)
        return Response(answered[1], answered[0], answered[2])

    async def _retrieved(self, body: bytes) -> tuple[bytes, dict[str, str]]:
        server = self.server
        if server.candidates is None:
            raise bad("the package has no candidates: package the ranker with index=INDEX")
        from recpipe_serve.candidates import Wanted

        asked, candidates = Wanted.parse(body, server.config.samples), None
        while candidates is not server.candidates:  # another package has taken its place meanwhile
            candidates = server.candidates
            assert candidates is not None
            wanted, lacking = await self._filled(asked, candidates)
            found = await asyncio.to_thread(candidates.find, wanted)
            inputs = candidates.asked(wanted, found) if len(found.places) else None
        scores = np.empty((0, len(server.outputs)), np.float32)
        if inputs is not None:
            scored = await server.scores(inputs)
            scores = scored.reshape(len(scored), -1)
            if wanted.id is not None:
                by = server.outputs.index(candidates.output(wanted.by))
                order = np.argsort(-scores[:, by], kind="stable")
                server.monitor.keep(wanted.id, scores[order[: wanted.k]])
        told: dict[str, Any] = {"model_name": server.name, "model_version": server.version}
        if wanted.id is not None:
            told["id"] = wanted.id
        said = {LACKING: lacking} if lacking else {}
        if inputs is not None:
            said |= server.said(inputs)
        if said:
            told["parameters"] = said
        return json.dumps(told | candidates.answer(wanted, found, scores)).encode(), JSON

    async def _filled(self, wanted: Wanted, candidates: Candidates) -> tuple[Wanted, int]:
        """The request, whose user has what the store has of it, and how many keys have no values."""
        if self.server.store is None:
            return wanted, 0

        def user_of(rows: Any) -> Any:
            candidates.require(rows[0])
            return rows[0]

        filled = await self.server.store.fill([wanted.user], candidates.columns, user_of)
        return replace(wanted, user=filled.inputs), filled.lacking
