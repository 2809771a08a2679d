"""Spans of OpenTelemetry: each request is one, in the trace that its client says (``traceparent``)."""

from __future__ import annotations

import os

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from recpipe.common.versions import installed_version
from recpipe_serve.access.record import Record

HEADER = "traceparent"


class Spans:
    """Exports a span for each request by ``exporter``; None: by OTLP over HTTP to where the environment says
    (``OTEL_EXPORTER_OTLP_ENDPOINT``, or this machine's collector). What is sampled is as the environment says
    (``OTEL_TRACES_SAMPLER``), by itself what the client has sampled, and all that has no trace yet."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        named = "OTEL_SERVICE_NAME" in os.environ  # which would count less than what is said here
        self._provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: "recpipe"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("recpipe_serve", installed_version("recpipe"))
        self._propagator = TraceContextTextMapPropagator()

    def saw(self, record: Record) -> None:
        """A request was answered."""
        parent = None
        if record.traceparent is not None:
            parent = self._propagator.extract({HEADER: record.traceparent})
        span = self._tracer.start_span(
            f"{record.method} {record.path}",
            parent,
            SpanKind.SERVER,
            start_time=record.ended - round(1e9 * record.seconds),
            attributes={
                "network.protocol.name": record.protocol,
                "http.request.method": record.method,
                "url.path": record.path,
                "http.response.status_code": record.status,
                "http.request.body.size": record.received,
                "http.response.body.size": record.sent,
                "client.address": record.address,
            },
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.ended)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()
