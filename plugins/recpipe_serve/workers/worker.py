"""One process that answers: it loads what it serves, and loads it anew when it is told to.

It is the whole server, or one of several workers. A worker is started by the supervisor as
``python -m recpipe_serve``, and has two sockets from it: the one that it answers on, and a
channel. On the channel come ``reload``, and the end of it when the worker is to stop; on it go ``ready``,
``loaded`` and ``refused``; and what workers ask each other (``asking``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvloop

from recpipe.answers.words import the_plugins
from recpipe.common.console import alone, capture_logs
from recpipe.common.process import old_objects_kept, quieted
from recpipe.errors import UserError
from recpipe.tasks.process import prepare_process
from recpipe_serve.access.log import AccessLog
from recpipe_serve.answer_server import AnswerServer
from recpipe_serve.config import ServeConfig
from recpipe_serve.http.acceptor import Acceptor, Shares
from recpipe_serve.http.metrics import DIRECTORY
from recpipe_serve.repository.layout import is_repository
from recpipe_serve.repository.models import Repository
from recpipe_serve.row_server import RowServer
from recpipe_serve.served import ServedPackage
from recpipe_serve.workers.asking import Asking, all_go_to, answered

if TYPE_CHECKING:
    from recpipe_serve.access.spans import Spans

log = logging.getLogger("recpipe")
LARGEST = 65536
"""Bytes of a message on the channel."""
BACKLOG = 2048
"""Connections that wait to be taken."""
RELOAD = b"reload"
CONNECTIONS = "connections"
"""The file in which workers tell each other how many connections they have."""
TURN = 2e-4
"""Seconds after which the thread that scores lets the one that answers go on in Python, and the other way
round. With Python's 5 ms, a request waits for that long now and then."""


class Worker:
    """One package, or a repository of several, answered for by this process.

    ``rows``: keeps the tables' rows; None: all in DRAM. ``answers``: what requests are put to before the
    model; None: nothing. ``several``: whether there are other workers, which then share the tables' memory;
    ``number``: this one's. ``at``: the version that all answer from; None: the latest.
    """

    def __init__(
        self,
        directory: Path,
        config: ServeConfig,
        name: str,
        rows: RowServer | None = None,
        several: bool = False,
        number: int = 0,
        answers: AnswerServer | None = None,
        at: int | None = None,
    ) -> None:
        torch.set_num_threads(config.threads)
        self.config = config
        folder = Path(os.environ[DIRECTORY]) if several else None
        self.served: ServedPackage | Repository
        if is_repository(directory):
            self.served = Repository(directory, config, folder, number)
        else:
            self.served = ServedPackage(
                directory, config, name, rows=rows, answers=answers, folder=folder, number=number, at=at
            )
        file = folder and folder / CONNECTIONS
        self.access = None if config.access_log is None else AccessLog(config.access_log)
        self.spans: Spans | None = None
        if config.traces:
            from recpipe_serve.access.spans import Spans as Exported

            self.spans = Exported()
            if isinstance(self.served, ServedPackage):
                self.served.trace(self.spans)
        self.observers = [own.saw for own in (self.access, self.spans) if own is not None]
        shares = Shares(config.workers, number, file)
        self.acceptor = Acceptor(config, self.served.metrics, shares, self.observers)
        self.runner = self.served.listener(self.acceptor, config.stop_seconds)
        self._reloading = asyncio.Lock()
        self._asking: Asking | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, listening: socket.socket, channel: socket.socket | None = None) -> None:
        """Answer on ``listening`` until SIGINT, SIGTERM, or the end of ``channel``. Without one, SIGHUP loads
        the package anew."""
        sys.setswitchinterval(TURN)
        # Not for good: the scorer removes the folder that torch unpacked the package into, when it goes.
        with old_objects_kept(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(listening, channel))

    async def _run(self, listening: socket.socket, channel: socket.socket | None) -> None:
        listening.listen(BACKLOG)
        loop = asyncio.get_running_loop()
        if channel is None:
            loop.add_signal_handler(signal.SIGHUP, self._begin)
        else:
            channel.setblocking(False)
            if isinstance(self.served, Repository):
                self._asking = Asking(channel, self.served.answered)
                self.served.everywhere = self._asking.all
            elif self.served.follower is not None:
                self._asking = Asking(channel, partial(answered, self.served.follower))
                self.served.server.go_to = partial(all_go_to, self._asking)
            loop.add_reader(channel, self._told, channel)
            _say(channel, "ready", self.served.described)
        self.served.begin()
        writing = None if self.access is None else loop.create_task(self.access.keep_writing())
        # The runner stops gracefully, and then raises the signal that stopped it.
        try:
            async with self._rpc():
                await self.runner.serve(sockets=[listening])
        finally:
            self.served.end()
            if self.access is not None and writing is not None:
                writing.cancel()
                self.access.close()
            if self.spans is not None:
                self.spans.close()

    def _rpc(self) -> AbstractAsyncContextManager[None]:
        """In which gRPC is answered, if it is to be."""
        config = self.config
        if config.grpc_port is None:
            return nullcontext()
        from recpipe_serve.grpc.listener import answering, at
        from recpipe_serve.grpc.service import InferenceService

        begin = None if self.spans is None else self.spans.begin
        service = InferenceService(self.served.models, self.observers, config.traces, begin)
        return answering(service, at(config.host, config.grpc_port), config.body_bytes, config.stop_seconds)

    def _told(self, channel: socket.socket) -> None:
        try:
            message = channel.recv(LARGEST)
        except ConnectionError:
            message = b""
        if message == RELOAD:
            self._begin(channel)
        elif message and self._asking is not None:
            self._soon(self._asking.told(message.decode()))
        else:
            self.runner.should_exit = True
            asyncio.get_running_loop().remove_reader(channel)

    def _begin(self, channel: socket.socket | None = None) -> None:
        self._soon(self._reload(channel))

    def _soon(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self, channel: socket.socket | None) -> None:
        """Load what is served anew, and say how that went."""
        async with self._reloading:
            try:
                await self.served.reload()
            except UserError as fault:
                if channel is None or isinstance(self.served, Repository):
                    log.warning("%s; the package before is still served", fault)
                else:
                    _say(channel, "refused", str(fault))
                if channel is None or isinstance(self.served, ServedPackage):
                    return  # the other models of a repository are served as they are now
            if channel is None:
                package, _, difference = self.served.described.rpartition(" ")
                log.info("now serving package %s; golden scores differ by %s", package, difference)
            else:
                _say(channel, "loaded", self.served.described)


def _say(channel: socket.socket, what: str, about: str) -> None:
    with suppress(OSError):  # the supervisor has gone; the channel's end says so, too
        channel.send(f"{what} {about}".encode()[:LARGEST])


def arguments(
    directory: Path,
    config: ServeConfig,
    name: str,
    number: int,
    sockets: list[int],
    plugins: Sequence[str] = (),
    at: int | None = None,
) -> list[str]:
    """The command that starts the worker ``number`` with these sockets' descriptors, as ``main`` reads it;
    ``plugins``: the words that choose what each worker puts requests to before the model; ``at``: the version
    that all answer from."""
    about = {
        "directory": str(directory),
        "config": asdict(config),
        "name": name,
        "number": number,
        "sockets": sockets,
        "plugins": [*plugins],
        "at": at,
    }
    return [sys.executable, "-m", "recpipe_serve", json.dumps(about)]


def main() -> int:
    """A worker; 2 if it cannot use the package, which the supervisor is told."""
    about: dict[str, Any] = json.loads(sys.argv[1])
    listening, channel = (socket.socket(fileno=number) for number in about["sockets"])
    directory, config = Path(about["directory"]), ServeConfig(**about["config"])
    supervisor = os.getppid()
    try:
        prepare_process()
        with quieted(), alone(), capture_logs(None), suppress(KeyboardInterrupt):
            try:
                answers = None
                if about["plugins"]:
                    (answers,) = the_plugins(about["plugins"], (AnswerServer,), "serve", "answer_cache")
                own = about["name"], None, True, about["number"]
                worker = Worker(directory, config, *own, answers=answers, at=about["at"])
            except UserError as fault:
                _say(channel, "refused", str(fault))
                return 2
            worker.run(listening, channel)
        return 0
    finally:
        if os.getppid() != supervisor:  # it was killed, and cannot remove the folder of the figures itself
            shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
