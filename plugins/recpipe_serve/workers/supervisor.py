"""``recpipe serve PACKAGE workers=N``: starts N workers, and starts those again that die.

All workers accept from one socket, which stays open while they come and go. uvicorn's own supervisor starts
a worker that dies again without a pause, however often, and ends all workers on SIGHUP.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from prometheus_client.multiprocess import mark_process_dead

from recpipe.errors import UserError
from recpipe_serve.config import ServeConfig
from recpipe_serve.http.metrics import DIRECTORY
from recpipe_serve.workers.asking import FOLLOW, GO_TO, Question
from recpipe_serve.workers.worker import LARGEST, RELOAD, arguments

log = logging.getLogger("recpipe")
SOON = 10.0
"""Seconds after it was ready in which a worker's death counts as one at once."""
MOST_DEATHS = 5
"""So many deaths at once of one worker in a row end the server."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a worker that died at once twice is started again; they double up to the longest."""
GRACE = 5.0
"""Seconds beside ``stop_seconds`` after which workers that do not stop are killed."""


@dataclass
class Slot:
    """The place of one worker."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket | None = None
    package: str | None = None
    """What it serves; None: it is loading."""
    ready: float | None = None
    """When it was ready to answer."""
    refused: str | None = None
    """Why it could not start."""
    deaths: int = 0
    """At once, in a row."""
    due: float = 0.0
    """When the worker is started, or started again."""
    at: int | None = None
    """The version that it was started with; None: the latest."""


class Supervisor:
    """Keeps ``config.workers`` workers alive, which answer on ``listening``. ``folder``: for their figures.

    ``started``: called with the largest difference of golden scores when all of them answer. ``plugins``: the
    words that choose what each of them puts requests to before the model.
    """

    def __init__(
        self,
        directory: Path,
        config: ServeConfig,
        name: str,
        listening: socket.socket,
        folder: Path,
        started: Callable[[str], None],
        plugins: Sequence[str] = (),
    ) -> None:
        self.directory, self.config, self.name, self.plugins = directory, config, name, plugins
        self.listening, self.folder, self.started = listening, folder, started
        self.slots = [Slot(number) for number in range(config.workers)]
        self._selector = selectors.DefaultSelector()
        self._answering = False
        self._to_load: list[Slot] = []
        """Workers that are to load the package anew, one after the other; the first one does."""
        self._questions: list[Question] = []
        """What some have asked all, and not all have answered."""
        self._asked = 0
        self.at: int | None = None
        """The version that all answer from, those that start again, too; None: the latest."""

    def run(self) -> None:
        """Start the workers and watch them until KeyboardInterrupt. ``UserError`` if the package cannot be
        used, or a worker dies again and again."""
        try:
            with self._hang_ups() as came:
                self._selector.register(came, selectors.EVENT_READ)
                while True:
                    for slot in self.slots:
                        if slot.process is None and slot.due <= monotonic():
                            self._start(slot)
                    due = [slot.due for slot in self.slots if slot.process is None]
                    pause = max(0.0, min(due) - monotonic()) if due else None
                    for key, _ in self._selector.select(pause):
                        if key.data is None:
                            came.recv(LARGEST)
                            self._reload([slot for slot in self.slots if slot.package])
                        else:
                            self._hear(key.data)
        finally:
            self._stop()

    @contextmanager
    def _hang_ups(self) -> Iterator[socket.socket]:
        """A socket that can be read when SIGHUP has come."""
        came, send = socket.socketpair()
        send.setblocking(False)

        def tell(*_: object) -> None:
            with suppress(BlockingIOError):
                send.send(b"!")

        before = signal.signal(signal.SIGHUP, tell)
        try:
            yield came
        finally:
            signal.signal(signal.SIGHUP, before)
            came.close()
            send.close()

    def _start(self, slot: Slot) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        slot.at = self.at
        sockets = [self.listening.fileno(), its.fileno()]
        with its:
            # In a process group of its own: Ctrl-C reaches the supervisor, which stops all of them.
            slot.process = subprocess.Popen(
                arguments(
                    self.directory, self.config, self.name, slot.number, sockets, self.plugins, self.at
                ),
                pass_fds=sockets,
                process_group=0,
                env={**os.environ, DIRECTORY: str(self.folder)},
            )
        slot.channel, slot.package, slot.ready, slot.refused = mine, None, None, None
        self._selector.register(mine, selectors.EVENT_READ, slot)

    def _hear(self, slot: Slot) -> None:
        assert slot.channel is not None
        try:
            message = slot.channel.recv(LARGEST).decode()
        except ConnectionError:
            message = ""
        what, _, about = message.partition(" ")
        package, _, difference = about.partition(" ")
        if not message:
            self._died(slot)
        elif what == "ask":
            self._ask(slot, *about.split(" ", 1))
        elif what == "said":
            number, _, said = about.partition(" ")
            for question in [one for one in self._questions if one.key == number]:
                self._answered(question, slot, said)
        elif what == "refused" and slot.package is None:
            slot.refused = about
        elif what == "refused":
            log.warning("%s; the package before is still served", about)
            self._to_load = []
        elif what == "ready":
            slot.ready, slot.package = monotonic(), package
            if slot.at != self.at:  # all have gone to another version while it started
                slot.channel.send(f"asked 0 {GO_TO} {FOLLOW if self.at is None else self.at}".encode())
            if not self._answering and all(other.package for other in self.slots):
                self._answering = True
                self.started(difference)
            elif self._answering:
                log.info("worker %d answers again", slot.number)
            others = [other for other in self.slots if other.package not in (None, package)]
            if others and self._answering:
                log.info("worker %d found another package; the others load it, too", slot.number)
                self._reload(others)
        else:
            slot.package = package
            self._to_load = [other for other in self._to_load if other is not slot]
            self._load_next()
            if not self._to_load:
                log.info("now serving package %s; golden scores differ by %s", package, difference)

    def _ask(self, asker: Slot, number: str, text: str) -> None:
        """Ask all workers that answer what one of them asks."""
        others = [slot for slot in self.slots if slot.package is not None and slot.channel is not None]
        self._asked += 1
        question = Question(asker, number, text, others, str(self._asked))
        self._questions.append(question)
        for slot in [*others]:
            assert slot.channel is not None
            with suppress(OSError):  # it has died, which its channel says
                slot.channel.send(f"asked {question.key} {text}".encode())

    def _answered(self, question: Question, slot: Slot, said: str | None) -> None:
        if not question.answered(slot, said):
            return
        self._questions.remove(question)
        if question.moves:
            self.at = question.where
        if question.asker.channel is not None:
            with suppress(OSError):
                question.asker.channel.send(
                    f"heard {question.number} {json.dumps(question.said)}".encode()[:LARGEST]
                )

    def _reload(self, slots: list[Slot]) -> None:
        """Let these workers load the package anew, one after the other."""
        idle = not self._to_load
        self._to_load += slots
        if idle:
            self._load_next()

    def _load_next(self) -> None:
        while self._to_load:
            slot = self._to_load[0]
            if slot.channel is not None and slot.package is not None:
                with suppress(OSError):  # it has died, which its channel says
                    slot.channel.send(RELOAD)
                    return
            self._to_load.pop(0)

    def _died(self, slot: Slot) -> None:
        assert slot.process is not None
        assert slot.channel is not None
        self._selector.unregister(slot.channel)
        slot.channel.close()
        status = slot.process.wait()
        mark_process_dead(slot.process.pid, str(self.folder))  # type: ignore[no-untyped-call]
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        at_once = slot.ready is None or monotonic() < slot.ready + SOON
        slot.process = slot.channel = slot.package = None
        for question in [*self._questions]:
            self._answered(question, slot, None)
        if slot.refused is not None:
            if not self._answering:
                raise UserError(slot.refused)
            pause = LONGEST_PAUSE
            log.warning("worker %d cannot start: %s; tried again in %g s", slot.number, slot.refused, pause)
        else:
            slot.deaths = slot.deaths + 1 if at_once else 1
            if slot.deaths >= MOST_DEATHS:
                raise UserError(
                    f"worker {slot.number} died {slot.deaths} times, each time within {SOON:g} s, and {how} "
                    "at last: the server ends; see what it printed above"
                )
            pause = 0.0 if slot.deaths == 1 else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (slot.deaths - 2))
            log.warning("worker %d %s; it is started again", slot.number, how)
        slot.due = monotonic() + pause
        loading = self._to_load[:1] == [slot]
        self._to_load = [other for other in self._to_load if other is not slot]
        if loading:
            self._load_next()

    def _stop(self) -> None:
        """Let all workers answer what they have; kill those that take too long, or all at the next signal."""
        self._selector.close()
        running = [slot for slot in self.slots if slot.process is not None]
        for slot in running:
            if slot.channel is not None:
                slot.channel.close()
        deadline = monotonic() + self.config.stop_seconds + GRACE
        processes = [slot.process for slot in running if slot.process is not None]
        try:
            for process in processes:
                process.wait(max(0.1, deadline - monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            log.warning("workers that did not stop are killed")
            for process in processes:
                process.kill()
        for process in processes:
            process.wait()
