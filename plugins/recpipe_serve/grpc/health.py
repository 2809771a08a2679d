"""gRPC's own health check (``grpc.health.v1``), which Kubernetes' probes and load balancers ask.

Its two messages are one field each, and on the wire they are protobuf's ``StringValue`` (the service that is
asked about) and ``Int32Value`` (the status): no other package is needed for them.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from recpipe_serve.models import ServedModels

SERVING, NOT_SERVING = 1, 2
SERVICES = ("", "inference.GRPCInferenceService")
"""The whole server, and the one service that it has."""


def health(models: ServedModels[Any]) -> Any:
    """gRPC's handler of the check: whether ``models`` answer requests. ``Watch`` is UNIMPLEMENTED, which
    clients take for good health."""

    async def check(asked: Any, context: Any) -> Any:
        if asked.value not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service '{asked.value}' here")
        return Int32Value(value=SERVING if models.ready else NOT_SERVING)

    handler = grpc.unary_unary_rpc_method_handler(
        check, StringValue.FromString, lambda answer: answer.SerializeToString()
    )
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})
