"""A server that answers in this process, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

import uvloop
from recpipe_serve.access.record import Observer
from recpipe_serve.http.acceptor import Acceptor


@contextmanager
def listening(
    server: Any,
    around: AbstractAsyncContextManager[None] | None = None,
    observers: Sequence[Observer] = (),
) -> Iterator[tuple[int, Any]]:
    """In the block ``server`` (a ``Server``, or a ``Repository``) answers on a free port, which is given with
    what runs it; ``around``: what else answers meanwhile in its event loop; ``observers``: are told of
    requests."""
    accepting = socket.create_server(("127.0.0.1", 0))
    runner = server.listener(Acceptor(server.config, server.metrics, observers=observers), stop=5)

    async def answer() -> None:
        async with around or nullcontext():
            await runner.serve(sockets=[accepting])

    thread = threading.Thread(target=lambda: uvloop.run(answer()))
    thread.start()
    try:
        while not runner.started:
            time.sleep(0.005)
        yield accepting.getsockname()[1], runner
    finally:
        runner.should_exit = True
        thread.join()
        accepting.close()
