"""The open inference protocol's service: its calls, answered by whatever models a server has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, time_ns
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer

from recpipe.common.versions import installed_version
from recpipe_serve.access.record import Observer, Record
from recpipe_serve.errors import Refused
from recpipe_serve.grpc.messages import read_parameters, read_request, write_response
from recpipe_serve.http.protocol import NO_REGIONS
from recpipe_serve.models import EXTENSIONS, READY, ServedModels, require_own_files
from recpipe_serve.settings import LOGS, TRACES, log_settings, require_unchanged, trace_settings

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
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
STREAMED = 64
"""Requests of one stream that are answered at once; its client sends no more of them meanwhile."""
FINAL = "triton_final_response"
"""A parameter of responses of a stream: whether it is the last one of its request. Here each is."""


@dataclass(frozen=True)
class _Answer:
    """What a request of a stream will be answered."""

    id: str
    outputs: asyncio.Task[tuple[Any, Refused | None]]


class InferenceService(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The service over ``models``; ``observers`` are told of each request for outputs. ``begin``: begins the
    span of one (``Spans.begin``); None: those who observe it do so afterwards. ``traces``: whether spans are
    exported."""

    def __init__(
        self,
        models: ServedModels[Any],
        observers: Sequence[Observer] = (),
        traces: bool = False,
        begin: Callable[[str | None, float], Any] | None = None,
    ) -> None:
        self.models, self.observers, self.traces, self.begin = models, observers, traces, begin

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
        response, refused = await self._infer(request, context, INFER)
        if refused is not None:
            await self._abort(context, refused)
        return response

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Outputs of each request of a stream, in their order. What is wrong with one is the error of its
        answer; the stream goes on."""
        room, answers = asyncio.Semaphore(STREAMED), asyncio.Queue[_Answer | None]()

        async def read() -> None:
            try:
                async for request in requests:
                    await room.acquire()
                    own = asyncio.create_task(self._infer(request, context, STREAM))
                    answers.put_nowait(_Answer(request.id, own))
            finally:
                answers.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                response, refused = await answer.outputs
                room.release()
                if refused is not None:
                    own = messages.ModelInferResponse(id=answer.id)
                    yield messages.ModelStreamInferResponse(error_message=str(refused), infer_response=own)
                    continue
                response.parameters[FINAL].bool_param = True
                yield messages.ModelStreamInferResponse(infer_response=response)
            await reading
        finally:
            reading.cancel()

    async def _infer(self, request: Any, context: Any, call: str) -> tuple[Any, Refused | None]:
        """The response to a request for outputs that came by this ``call``, or why there is none."""
        began = perf_counter()
        response: Any = None
        span: Any = None
        refused: Refused | None = None
        try:
            model = self.models.chosen(request.model_name, request.model_version)
        except Refused as fault:
            refused = fault
            self.models.count_unknown(refused, perf_counter() - began)
        else:
            span = None if self.begin is None else self.begin(_traceparent(context), began)
            try:
                asked = read_request(request, context.time_remaining())
                outputs = await model.answer(asked if span is None else replace(asked, span=span))
                response = write_response(model.name, model.version, request.id, outputs)
            except Exception as fault:
                refused = model.refused(fault)
            model.count(200 if refused is None else refused.status, perf_counter() - began)
        status = 200 if refused is None else refused.status
        self._observe(request, response, call, status, perf_counter() - began, context, span)
        return response, refused

    def _observe(
        self,
        request: Any,
        response: Any,
        call: str,
        status: int,
        seconds: float,
        context: Any,
        span: Any = None,
    ) -> None:
        if not self.observers:
            return
        sent = 0 if response is None else response.ByteSize()
        host = context.peer().partition(":")[2].rpartition(":")[0]  # ipv4:HOST:PORT
        own = ("grpc", "POST", call, status, time_ns(), seconds, request.ByteSize(), sent, host)
        for observer in self.observers:
            observer(Record(*own, _traceparent(context), span))

    async def TraceSetting(self, request: Any, context: Any) -> Any:
        """Which requests are traced, of a model as of all; it is not changed from afar."""
        told = trace_settings(self.traces)
        asked = {name: list(own.value) or None for name, own in request.settings.items()}
        try:
            if request.model_name:
                self.models.find(request.model_name)
            require_unchanged(told, asked, TRACES)
        except Refused as refused:
            await self._abort(context, refused)
        own = {name: {"value": values} for name, values in told.items()}
        return ParseDict({"settings": own}, messages.TraceSettingResponse())

    async def LogSettings(self, request: Any, context: Any) -> Any:
        """What the server logs; it is not changed from afar."""
        told = log_settings()
        try:
            require_unchanged(told, read_parameters(request.settings), LOGS)
        except Refused as refused:
            await self._abort(context, refused)
        response = messages.LogSettingsResponse()
        for name, value in told.items():
            kind = "bool" if isinstance(value, bool) else "uint32" if isinstance(value, int) else "string"
            setattr(response.settings[name], f"{kind}_param", value)
        return response

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """There are no regions of shared memory."""
        if request.name:
            await self._abort(context, Refused(404, "shared_memory", NO_REGIONS))
        return messages.SystemSharedMemoryStatusResponse()

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        """There are no regions of shared memory."""
        await self._abort(context, Refused(501, "shared_memory", NO_REGIONS))

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        """There are none, of which a client may let go."""
        return messages.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        """There are no regions of a GPU's memory."""
        if request.name:
            await self._abort(context, Refused(404, "shared_memory", NO_REGIONS))
        return messages.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        """There are no regions of a GPU's memory."""
        await self._abort(context, Refused(501, "shared_memory", NO_REGIONS))

    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        """There are none, of which a client may let go."""
        return messages.CudaSharedMemoryUnregisterResponse()

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """All models, or those that are ready."""
        found = [own for own in self.models.index() if not request.ready or own["state"] == READY]
        return ParseDict({"models": found}, messages.RepositoryIndexResponse())

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        """Serve a model, or serve it as it is now."""
        try:
            require_own_files(request.parameters)
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


def _traceparent(context: Any) -> str | None:
    """The header of W3C Trace Context of a call, as it came."""
    found: str | None = dict(context.invocation_metadata() or ()).get("traceparent")
    return found
