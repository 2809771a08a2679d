"""Spans of OpenTelemetry: each request is one, in the trace that its client says (``traceparent``), and so is
each call of another process that its scores need.

Requests that are scored together have such calls together. They are in the trace of the first of them, and
the spans of the others have a link to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

from opentelemetry.context import attach, detach
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from recpipe.common.versions import installed_version
from recpipe_serve.access.record import Record

if TYPE_CHECKING:
    from recpipe_serve.batching.forms import Asked

HEADER = "traceparent"


class Spans:
    """Exports a span for each request by ``exporter``; None: by OTLP over HTTP to where the environment says
    (``OTEL_EXPORTER_OTLP_ENDPOINT``, or this machine's collector). What is sampled is as the environment says
    (``OTEL_TRACES_SAMPLER``), by itself what the client has sampled, and all that has no trace yet.
    ``service``: who made them, if the environment does not say (``OTEL_SERVICE_NAME``)."""

    def __init__(self, exporter: SpanExporter | None = None, service: str = "recpipe") -> None:
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        named = "OTEL_SERVICE_NAME" in os.environ  # which would count less than what is said here
        self._provider = TracerProvider(resource=Resource.create({} if named else {SERVICE_NAME: service}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("recpipe_serve", installed_version("recpipe"))
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, traceparent: str | None, began: float) -> Span:
        """The span of a request that came at ``began``, by ``perf_counter``; ``saw`` ends it."""
        came = time_ns() - round(1e9 * (perf_counter() - began))
        return self._started(traceparent, "request", came)

    def _started(self, traceparent: str | None, name: str, at: int) -> Span:
        parent = None if traceparent is None else self._propagator.extract({HEADER: traceparent})
        begun: Span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=at)
        return begun

    @contextmanager
    def within(self, asked: Sequence[Asked]) -> Iterator[None]:
        """In the block calls are made for these requests, in the thread that is here."""
        traced = [one.span for one in asked if one.span is not None and one.span.is_recording()]
        if not traced:
            yield
            return
        first, *others = traced
        for other in others:
            other.add_link(first.get_span_context())
        token = attach(set_span_in_context(first))
        try:
            yield
        finally:
            detach(token)

    def call(self, name: str, attributes: Mapping[str, Any]) -> tuple[Span | None, list[tuple[str, str]]]:
        """The span of a call of another process, ended by who makes it, and the headers by which that one
        belongs to the same trace; None for requests that nobody traces."""
        if not get_current_span().is_recording():
            return None, []
        span = self._tracer.start_span(name, None, SpanKind.CLIENT, attributes)
        headers: dict[str, str] = {}
        self._propagator.inject(headers, set_span_in_context(span))
        return span, [*headers.items()]

    def saw(self, record: Record) -> None:
        """A request was answered."""
        span: Span | None = record.span
        if span is None:
            span = self._started(record.traceparent, "request", record.ended - round(1e9 * record.seconds))
        span.update_name(f"{record.method} {record.path}")
        span.set_attributes(
            {
                "network.protocol.name": record.protocol,
                "http.request.method": record.method,
                "url.path": record.path,
                "http.response.status_code": record.status,
                "http.request.body.size": record.received,
                "http.response.body.size": record.sent,
                "client.address": record.address,
            }
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.ended)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()
