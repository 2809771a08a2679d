"""Ports on which gRPC is answered."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from recpipe.errors import UserError, shown
from recpipe_serve.grpc.health import health
from recpipe_serve.grpc.service import InferenceService


def reserved_port(host: str, port: int) -> socket.socket:
    """A socket that has the address and takes no connections: those that share it (``SO_REUSEPORT``) answer
    there. ``port`` 0: any free one. ``UserError`` if another program answers there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            # One that shares its port would be shared with, too: so it is first asked for alone.
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((host, port))
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as fault:
        choose = "port" if fault.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise UserError(
            f"cannot listen on {shown(host)} port {port}: {fault.strerror}; choose another {choose}="
        ) from fault
    return held


def at(host: str, port: int) -> str:
    """An address as gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def answering(
    service: InferenceService, address: str, most_bytes: int, stop_seconds: float = 10.0
) -> AsyncIterator[None]:
    """In the block calls that come to ``address`` (a ``reserved_port``) are answered by ``service``, in the
    running event loop, and so is gRPC's health check; messages have at most ``most_bytes``. Those it has are
    answered at the end, for at most ``stop_seconds``."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", most_bytes),
            ("grpc.max_send_message_length", -1),
            # Clients may look whether a connection is alive; gRPC would close it on those who do so often.
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )
    server.add_generic_rpc_handlers((health(service.models),))
    add_GRPCInferenceServiceServicer_to_server(service, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(stop_seconds)
