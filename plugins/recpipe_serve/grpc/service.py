"""The open inference protocol's service: its calls, answered by whatever models a server has."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, time_ns
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer

from recpipe.common.versions import installed_version
from recpipe_serve.access.record import Observer, Record
from recpipe_serve.errors import Refused
from recpipe_serve.grpc.messages import read_request, write_response
from recpipe_serve.models import EXTENSIONS, READY, ServedModels

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The status of a refusal, by that of HTTP."""


INFER = "/inference.GRPCInferenceService/ModelInfer"


class InferenceService(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The service over ``models``; ``observers`` are told of each request for outputs. What it does not have
    (shared memory, settings of traces and logs, streams) is UNIMPLEMENTED."""

    def __init__(self, models: ServedModels[Any], observers: Sequence[Observer] = ()) -> None:
        self.models, self.observers = models, observers

    async def _abort(self, context: Any, refused: Refused) -> None:
        await context.abort(CODES.get(refused.status, grpc.StatusCode.INTERNAL), str(refused))

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """The process answers."""
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """Whether requests are scored."""
        return messages.ServerReadyResponse(ready=self.models.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """Whether a model's are."""
        try:
            ready = self.models.find(request.name, request.version).ready
        except Refused as refused:
            await self._abort(context, refused)
        return messages.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Who answers."""
        version = installed_version("recpipe") or ""
        return messages.ServerMetadataResponse(name="recpipe", version=version, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """A model's inputs and outputs."""
        try:
            metadata = self.models.find(request.name, request.version).metadata()
        except Refused as refused:
            await self._abort(context, refused)
        return ParseDict(metadata, messages.ModelMetadataResponse())

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """A model's configuration, as Triton has them."""
        try:
            found = self.models.find(request.name, request.version).configuration()
        except Refused as refused:
            await self._abort(context, refused)
        return ParseDict({"config": found}, messages.ModelConfigResponse())

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        """How many requests a model has had, or each of all, and how long they took."""
        try:
            named = [self.models.find(request.name, request.version)] if request.name else self.models.every()
        except Refused as refused:
            await self._abort(context, refused)
        found = {"model_stats": [model.statistics() for model in named]}
        return ParseDict(found, messages.ModelStatisticsResponse())

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Outputs of a request."""
        began = perf_counter()
        try:
            model = self.models.chosen(request.model_name, request.model_version)
        except Refused as refused:
            self.models.count_unknown(refused, perf_counter() - began)
            self._observe(request, None, refused.status, perf_counter() - began, context)
            await self._abort(context, refused)
        refusal = response = None
        try:
            outputs = await model.answer(read_request(request, context.time_remaining()))
            response = write_response(model.name, model.version, request.id, outputs)
        except Exception as fault:
            refusal = model.refused(fault)
        status, seconds = 200 if refusal is None else refusal.status, perf_counter() - began
        model.count(status, seconds)
        self._observe(request, response, status, seconds, context)
        if refusal is not None:
            await self._abort(context, refusal)
        return response

    def _observe(self, request: Any, response: Any, status: int, seconds: float, context: Any) -> None:
        if not self.observers:
            return
        sent = 0 if response is None else response.ByteSize()
        trace = dict(context.invocation_metadata() or ()).get("traceparent")
        host = context.peer().partition(":")[2].rpartition(":")[0]  # ipv4:HOST:PORT
        own = ("grpc", "POST", INFER, status, time_ns(), seconds, request.ByteSize(), sent, host, trace)
        for observer in self.observers:
            observer(Record(*own))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """All models, or those that are ready."""
        found = [own for own in self.models.index() if not request.ready or own["state"] == READY]
        return ParseDict({"models": found}, messages.RepositoryIndexResponse())

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        """Serve a model, or serve it as it is now."""
        try:
            await self.models.load(request.model_name)
        except Refused as refused:
            await self._abort(context, refused)
        return messages.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        """Serve a model no longer."""
        try:
            await self.models.unload(request.model_name)
        except Refused as refused:
            await self._abort(context, refused)
        return messages.RepositoryModelUnloadResponse()
