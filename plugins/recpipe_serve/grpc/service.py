"""The open inference protocol's service: its calls, answered by whatever models a server has."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer

from recpipe.common.versions import installed_version
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


class InferenceService(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The service over ``models``. What it does not have (shared memory, settings of traces and logs, streams)
    is UNIMPLEMENTED."""

    def __init__(self, models: ServedModels[Any]) -> None:
        self.models = models

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
            await self._abort(context, refused)
        refusal = None
        try:
            outputs = await model.answer(read_request(request, context.time_remaining()))
            response = write_response(model.name, model.version, request.id, outputs)
        except Exception as fault:
            refusal = model.refused(fault)
        model.count(200 if refusal is None else refusal.status, perf_counter() - began)
        if refusal is not None:
            await self._abort(context, refusal)
        return response

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
