"""A server that answers in this process, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recpipe_serve.http.acceptor import Acceptor
from recpipe_serve.http.app import Server


@contextmanager
def listening(server: Server) -> Iterator[tuple[int, Any]]:
    """In the block ``server`` answers on a free port, which is given with what runs it."""
    accepting = socket.create_server(("127.0.0.1", 0))
    runner = server.listener(Acceptor(server.config, server.metrics), stop=5)
    thread = threading.Thread(target=runner.run, args=([accepting],))
    thread.start()
    try:
        while not runner.started:
            time.sleep(0.005)
        yield accepting.getsockname()[1], runner
    finally:
        runner.should_exit = True
        thread.join()
        accepting.close()
