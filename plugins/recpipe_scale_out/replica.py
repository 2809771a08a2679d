"""``Replica``: one server of a shard, as the main server knows it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from recpipe.errors import shown

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A shard that is started again is found within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # So is one that has another address behind its name, as a pod has that is started again; not after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A connection on which nothing comes is given up, and made anew: TCP would wait for minutes, and once the
    # network is back for as long as it was away.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
)
REST = 1.0
"""Seconds for which a replica that failed is the last to be asked."""
APPLICATION = "application"
"""By this header Ray Serve's proxy, behind which a shard may be, knows whose a call is."""


class Replica:
    """One server of a shard."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self.stub = GRPCInferenceServiceStub(self._channel)
        self.failed = -REST
        """When it did so last."""
        self.asked = 0
        self.late = False
        """Whether it has let a question wait, and has not said since then that it is ready."""

    def was_late(self, model: str) -> None:
        """It has let a question to ``model`` wait: it is asked nothing until it says that it is ready, for
        which it is asked again and again."""
        if not self.late:
            self.late = True
            self._look(model)

    def _look(self, model: str) -> None:
        asked = messages.ModelReadyRequest(name=model)
        with suppress(ValueError):  # the channel is closed
            call = self.stub.ModelReady.future(
                asked, timeout=REST, wait_for_ready=True, metadata=((APPLICATION, model),)
            )
            call.add_done_callback(partial(self._looked, model))

    def _looked(self, model: str, call: Any) -> None:
        if call.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._look(model)
        else:  # it is there; or calls fail at once, for which nobody waits
            self.late = False

    def ready(self, model: str, version: str, seconds: float) -> tuple[Any, str]:
        """None if it answers for this ``version`` of the model (empty: for any one); else gRPC's code, and
        why not."""
        asked = messages.ModelReadyRequest(name=model, version=version)
        try:
            found = self.stub.ModelReady(
                asked, timeout=seconds, wait_for_ready=True, metadata=((APPLICATION, model),)
            )
        except grpc.RpcError as fault:
            return fault.code(), shown(fault.details(), 200)
        return (None, "") if found.ready else (grpc.StatusCode.UNAVAILABLE, "it is not ready")

    def close(self) -> None:
        """Ask it nothing more."""
        self._channel.close()
