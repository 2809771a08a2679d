"""One process that answers: it loads a package, serves it, and loads it anew when it is told to.

It is the whole server, or one of several workers. A worker is started by the supervisor as
``python -m recpipe_serve``, and has two sockets from it: the one that it answers on, and a
channel. On the channel come ``reload``, and the end of it when the worker is to stop; on it go ``ready``,
``loaded`` and ``refused``.
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
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvloop

from recpipe.answers import score
from recpipe.answers.encoded import read_encoding
from recpipe.answers.manifest import RETRIEVAL, read_manifest
from recpipe.common.console import alone, capture_logs
from recpipe.common.process import imported_from, old_objects_kept, quieted
from recpipe.data.preparation import Preparation
from recpipe.errors import UserError
from recpipe.tasks.process import prepare_process
from recpipe_serve.answer_server import AnswerServer
from recpipe_serve.batching.corrected import Corrected
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.config import ServeConfig
from recpipe_serve.fresh.follower import Follower, catch_up
from recpipe_serve.fresh.versions import Versions, require_followable
from recpipe_serve.http.acceptor import Acceptor, Shares
from recpipe_serve.http.app import Server
from recpipe_serve.http.learning import Learner, Learning, read_token
from recpipe_serve.http.metrics import DIRECTORY
from recpipe_serve.row_server import RowServer

if TYPE_CHECKING:
    from recpipe_serve.candidates import Candidates

log = logging.getLogger("recpipe")
LARGEST = 65536
"""Bytes of a message on the channel."""
BACKLOG = 2048
"""Connections that wait to be taken."""
CONNECTIONS = "connections"
"""The file in which workers tell each other how many connections they have."""
TURN = 2e-4
"""Seconds after which the thread that scores lets the one that answers go on in Python, and the other way
round. With Python's 5 ms, a request waits for that long now and then."""


@dataclass(frozen=True)
class Loaded:
    """A package that was loaded; ``package``: the first digits of its manifest's digest."""

    scorer: score.Scorer
    package: str
    preparation: Preparation | None
    """How raw values are encoded, if it says that."""
    candidates: Candidates | None = None
    """What finds candidates, if it has some."""
    versions: Versions | None = None
    """Its scorer and what deltas make of it; None: it follows none."""
    learner: Learner | None = None
    """What learns, if the server is to."""

    @property
    def request_scorer(self) -> RequestScorer:
        """Scores requests, with what the package's effects add."""
        effects = self.scorer.effects
        return RequestScorer(self.scorer, None if effects is None else Corrected(effects, self.learner))


def load(
    directory: Path,
    rows: RowServer | None = None,
    mapped: bool = False,
    trust: str | None = None,
    most: int = ServeConfig.samples,
    threads: int = 1,
    follow: Path | None = None,
    kept: int = ServeConfig.versions,
) -> Loaded:
    """Load the package, once more if it was replaced meanwhile. ``UserError`` if it cannot be used, or is not
    signed by the owner of the key ``trust``. ``follow``: a directory of deltas, those of which that are there
    are taken; so many versions are ``kept``."""
    while True:
        try:
            before = directory.stat()
        except OSError as fault:
            raise UserError(
                f"{directory}: {fault.strerror}; make a package with 'recpipe package CHECKPOINT {directory}'"
            ) from fault
        try:
            read_manifest(directory, None if trust is None else Path(trust))
            versions = None
            if follow is not None:
                versions = Versions(directory, kept)
                require_followable(versions.answering)
                catch_up(versions, follow, None if trust is None else Path(trust))
                scorer: score.Scorer = versions.answering
            else:
                scorer = score.Scorer(directory, mapped) if rows is None else rows.scorer(directory)
            preparation = read_encoding(directory, scorer.manifest)
            candidates = None
            if RETRIEVAL in scorer.manifest and preparation is not None:
                from recpipe_serve.candidates import Candidates  # with pyarrow, which most servers do without

                own = (scorer.manifest, preparation, scorer.maps)
                candidates = Candidates(directory, *own, most, threads)
            digest = (directory / score.DIGEST).read_text()
            if versions is not None:
                digest = versions.version.of.digest
            if os.path.samestat(before, directory.stat()):
                return Loaded(scorer, digest[:12], preparation, candidates, versions)
        except (score.PackageError, UserError, OSError) as fault:
            with suppress(OSError):
                if not os.path.samestat(before, directory.stat()):
                    continue
            raise UserError(str(fault)) from fault


class Worker:
    """One package, served by this process.

    ``rows``: keeps the tables' rows; None: all in DRAM. ``answers``: what requests are put to before the
    model; None: nothing. ``several``: whether there are other workers, which then share the tables' memory;
    ``number``: this one's.
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
    ) -> None:
        torch.set_num_threads(config.threads)
        self.directory, self.config, self.rows, self.several = directory, config, rows, several
        self.answers = answers
        self.follow = None if config.follow is None else Path(config.follow).expanduser()
        self.learning = Learning(read_token(config.token), config.queue) if config.learn else None
        self.loaded = self._load()
        scorer = self.loaded.scorer
        if answers is not None:
            answers.begin(scorer)
        folder = Path(os.environ[DIRECTORY]) if several else None
        self.server = Server(
            self.loaded.request_scorer,
            scorer.manifest,
            name,
            config,
            several,
            folder,
            number,
            self.loaded.preparation,
            scorer.maps,
            self.loaded.candidates,
            answers,
            self.learning,
            self.loaded.learner,
        )
        self.server.metrics.serves(self.loaded.package)
        self.follower: Follower | None = None
        if self.loaded.versions is not None:
            kinds = {output["name"]: output["kind"] for output in scorer.manifest["outputs"]}
            drained = self.server.batcher.drained
            self.follower = Follower(config, self.loaded.versions, kinds, self._use, drained)
            self.server.follow(self.follower)
        if rows is not None:
            self.server.metrics.show(rows.counted)
        file = folder and folder / CONNECTIONS
        self.acceptor = Acceptor(config, self.server.metrics, Shares(config.workers, number, file))
        self.runner = self.server.listener(self.acceptor, config.stop_seconds)
        self._reloading = asyncio.Lock()
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
            loop.add_reader(channel, self._told, channel)
            _say(channel, "ready", self.loaded)
        following = None if self.follower is None else loop.create_task(self.follower.run())
        # The runner stops gracefully, and then raises the signal that stopped it.
        try:
            async with self._rpc():
                await self.runner.serve(sockets=[listening])
        finally:
            if following is not None:
                following.cancel()
            if self.learning is not None and self.loaded.learner is not None:
                self.learning.in_thread(self.loaded.learner.close)
                self.learning.close()
        if self.rows is not None:
            self.rows.close()  # which ends a change-over to another package

    def _rpc(self) -> AbstractAsyncContextManager[None]:
        """In which gRPC is answered, if it is to be."""
        config = self.config
        if config.grpc_port is None:
            return nullcontext()
        from recpipe_serve.grpc.listener import answering, at
        from recpipe_serve.grpc.service import InferenceService

        service = InferenceService(self.server.models)
        return answering(service, at(config.host, config.grpc_port), config.body_bytes, config.stop_seconds)

    def _use(self, scorer: RequestScorer, package: str) -> None:
        """Let another version of the package answer."""
        server = self.server
        if self.answers is not None:
            self.answers.begin(scorer.scorer)
        own = (server.preparation, scorer.scorer.maps, server.candidates)
        server.use(scorer, server.manifest, package, *own)

    def _told(self, channel: socket.socket) -> None:
        try:
            message = channel.recv(LARGEST)
        except ConnectionError:
            message = b""
        if message:
            self._begin(channel)
        else:
            self.runner.should_exit = True
            asyncio.get_running_loop().remove_reader(channel)

    def _begin(self, channel: socket.socket | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._reload(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self, channel: socket.socket | None) -> None:
        """Load the package beside the one that is served, and let it take its place between two batches."""
        async with self._reloading:
            try:
                loaded = await asyncio.to_thread(self._anew)
                scorer = loaded.scorer
                answering = loaded.request_scorer
                if self.follower is not None and loaded.versions is not None:
                    self.follower.begin(loaded.versions)
                    answering = self.follower.answering
                if self.answers is not None:
                    self.answers.begin(answering.scorer)
                self.server.use(
                    answering,
                    scorer.manifest,
                    loaded.package,
                    loaded.preparation,
                    scorer.maps,
                    loaded.candidates,
                    loaded.learner,
                )
            except Exception as fault:
                if not isinstance(fault, UserError):
                    log.exception("loading the package anew failed")
                self.server.metrics.reloads.labels("refused").inc()
                if channel is None:
                    log.warning("%s; the package before is still served", fault)
                else:
                    _say(channel, "refused", str(fault))
                return
            before, self.loaded = self.loaded.learner, loaded
            if self.learning is not None and before is not None:
                await asyncio.to_thread(self.learning.in_thread, before.close)
            self.server.metrics.reloads.labels("done").inc()
            if channel is None:
                log.info(
                    "now serving package %s; golden scores differ by %.1e",
                    *(loaded.package, loaded.scorer.difference),
                )
            else:
                _say(channel, "loaded", loaded)

    def _anew(self) -> Loaded:
        """The package as it is now; ``UserError`` unless clients can go on as before."""
        with suppress(score.PackageError, OSError):  # loading it says what is wrong
            # A plugin puts rows in the place of others while it loads them.
            self._require_same(score.sealed(self.directory))
        loaded = self._load()
        self._require_same(loaded.scorer.manifest)
        return loaded

    def _load(self) -> Loaded:
        """The package, with what learns over it if the server is to; ``UserError`` if that is not
        possible."""
        config = self.config
        limits = (config.trust, config.samples, config.threads)
        loaded = load(self.directory, self.rows, self.several, *limits, self.follow, config.versions)
        if self.learning is None:
            return loaded
        if loaded.scorer.effects is None:
            raise UserError(
                f"learn=true: {self.directory} has no effects: package with effects=RUN of task=lambda"
            )
        made = imported_from("recpipe_lambda_learner.online:Learner")
        place = None if config.learnt is None else Path(config.learnt).expanduser() / loaded.package
        return replace(loaded, learner=made(self.directory, place, config.kept, config.learn_seconds))

    def _require_same(self, manifest: dict[str, Any]) -> None:
        then, now = map(_relied_on, (self.loaded.scorer.manifest, manifest))
        for what in then:
            if now[what] != then[what]:
                raise UserError(
                    f"{self.directory}: its manifest's '{what}' differs, on which clients rely: start a "
                    "server of its own for it"
                )


def _relied_on(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What clients send and read by, under its names in the manifest; of candidates that there are some, and
    what names one and a user: these themselves may be others."""
    found = {what: manifest.get(what) for what in ("dense", "sparse", "outputs")}
    retrieval = manifest.get(RETRIEVAL)
    return found | {RETRIEVAL: retrieval and [retrieval[what] for what in ("item", "ids", "user")]}


def _say(channel: socket.socket, what: str, about: Loaded | str) -> None:
    if isinstance(about, Loaded):
        about = f"{about.package} {about.scorer.difference:.1e}"
    with suppress(OSError):  # the supervisor has gone; the channel's end says so, too
        channel.send(f"{what} {about}".encode()[:LARGEST])


def arguments(directory: Path, config: ServeConfig, name: str, number: int, sockets: list[int]) -> list[str]:
    """The command that starts the worker ``number`` with these sockets' descriptors, as ``main`` reads it."""
    about = {
        "directory": str(directory),
        "config": asdict(config),
        "name": name,
        "number": number,
        "sockets": sockets,
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
                worker = Worker(directory, config, about["name"], several=True, number=about["number"])
            except UserError as fault:
                _say(channel, "refused", str(fault))
                return 2
            worker.run(listening, channel)
        return 0
    finally:
        if os.getppid() != supervisor:  # it was killed, and cannot remove the folder of the figures itself
            shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
