"""A package that is served under a name: loaded, and loaded anew beside the one that answers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recpipe.answers import score
from recpipe.answers.encoded import read_encoding
from recpipe.answers.manifest import RETRIEVAL, read_manifest
from recpipe.common.process import imported_from
from recpipe.data.preparation import Preparation
from recpipe.errors import UserError, shown
from recpipe_serve.answer_server import AnswerServer
from recpipe_serve.batching.corrected import Corrected
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.config import ServeConfig
from recpipe_serve.fresh.follower import Follower, catch_up
from recpipe_serve.fresh.reading import ReaderProcess
from recpipe_serve.fresh.versions import Versions
from recpipe_serve.http.acceptor import Acceptor
from recpipe_serve.http.app import VERSION, Server
from recpipe_serve.http.connections import Listener
from recpipe_serve.http.learning import Learner, Learning, read_token
from recpipe_serve.http.metrics import DoorMetrics
from recpipe_serve.models import ServedModels
from recpipe_serve.row_server import RowServer
from recpipe_serve.store.filled import FeatureStore
from recpipe_serve.store.sources import opened

if TYPE_CHECKING:
    from recpipe_serve.access.spans import Spans
    from recpipe_serve.candidates import Candidates

log = logging.getLogger("recpipe")


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
    base: str | None = None
    """The package without deltas, as ``package``; None: it follows none."""

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
    goes_back: bool = False,
    at: int | None = None,
) -> Loaded:
    """Load the package, once more if it was replaced meanwhile. ``UserError`` if it cannot be used, or is not
    signed by the owner of the key ``trust``. ``follow``: a directory of deltas, those of which that are there
    are taken, up to number ``at``; so many versions are ``kept``, and what leads back if it ``goes_back``."""
    while True:
        try:
            before = directory.stat()
        except OSError as fault:
            raise UserError(
                f"{directory}: {fault.strerror}; make a package with 'recpipe package CHECKPOINT {directory}'"
            ) from fault
        try:
            sharded = rows is not None and rows.sharded
            read_manifest(directory, None if trust is None else Path(trust), sharded)
            versions = None
            if follow is not None:
                made = Versions if rows is None else rows.followed
                versions = made(directory, kept, goes_back)
                catch_up(versions, follow, None if trust is None else Path(trust), at)
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
            base = None
            if versions is not None:
                base, digest = digest[:12], versions.version.of.digest
            if os.path.samestat(before, directory.stat()):
                return Loaded(scorer, digest[:12], preparation, candidates, versions, base=base)
        except (score.PackageError, UserError, OSError) as fault:
            with suppress(OSError):
                if not os.path.samestat(before, directory.stat()):
                    continue
            raise UserError(str(fault)) from fault


class ServedPackage:
    """The package ``directory``, answered for by ``server``, which has its ``name`` and ``version``.

    ``rows``: keeps the tables' rows; None: all in DRAM. ``answers``: what requests are put to before the
    model; None: nothing. ``folder``: where the workers of a server, of which this is the one of this
    ``number``, share what they see, and the tables' memory; None: there is one. ``at``: the delta
    that all workers have gone back to; None: they follow. ``labelled``: whether its figures have its name and
    version as labels.
    """

    def __init__(
        self,
        directory: Path,
        config: ServeConfig,
        name: str,
        version: str = VERSION,
        rows: RowServer | None = None,
        answers: AnswerServer | None = None,
        folder: Path | None = None,
        number: int = 0,
        at: int | None = None,
        labelled: bool = False,
    ) -> None:
        if config.shards is not None:
            rows = imported_from("recpipe_scale_out.row_server:ShardedRows")(config)
        self.directory, self.config, self.rows, self.answers = directory, config, rows, answers
        self._at = at
        self.several = folder is not None
        self.follow = None if config.follow is None else Path(config.follow).expanduser()
        self.learning = Learning(read_token(config.token), config.queue) if config.learn else None
        self.loaded = self._load()
        scorer = self.loaded.scorer
        if answers is not None:
            answers.begin(scorer)
        self.server = Server(
            self.loaded.request_scorer,
            scorer.manifest,
            name,
            config,
            self.several,
            folder,
            number,
            self.loaded.preparation,
            scorer.maps,
            self.loaded.candidates,
            answers,
            self.learning,
            self.loaded.learner,
            version,
            labelled,
        )
        self.server.metrics.serves(self.loaded.package)
        self.follower: Follower | None = None
        if self.loaded.versions is not None:
            kinds = {output["name"]: output["kind"] for output in scorer.manifest["outputs"]}
            drained = self.server.batcher.drained
            own = (config, self.loaded.versions, kinds, self._use, drained)
            self.follower = Follower(*own, ReaderProcess)
            self.follower.stays = at is not None
            self.server.follow(self.follower)
        if rows is not None:
            self.server.metrics.show(rows.counted, totals=True)
        if config.store is not None:
            self.server.fill_from(self._store(config.store))
        self._following: asyncio.Task[None] | None = None

    def _store(self, place: str) -> FeatureStore:
        """What fills the rows of requests; ``UserError`` if the package takes none, or it cannot be used."""
        config, preparation = self.config, self.loaded.preparation
        if preparation is None or preparation.features is None:
            raise UserError(
                f"store= fills raw values, and {self.directory} does not say how these are encoded: package "
                "a model that was trained with data from files"
            )
        if config.store_key not in preparation.features.inputs:
            raise UserError(
                f"store_key={shown(config.store_key)} is no column of the package's features; they are "
                f"{', '.join(preparation.features.inputs)}"
            )
        source = opened(place, config.store_key, config.store_prefix)
        seconds = config.store_ms / 1e3, config.store_seconds
        return FeatureStore(source, config.store_key, *seconds, config.store_kept)

    def trace(self, spans: Spans) -> None:
        """Have requests, and what is called for them, be spans of ``spans``."""
        self.server.trace(spans)
        if self.rows is not None:
            self.rows.trace(spans)

    @property
    def metrics(self) -> DoorMetrics:
        """Its figures."""
        return self.server.metrics

    @property
    def models(self) -> ServedModels[Server]:
        """The one model."""
        return self.server.models

    def listener(self, acceptor: Acceptor, stop: float = 10.0) -> Listener:
        """What serves it on the connections of ``acceptor``; ``stop``: seconds for the last requests."""
        return self.server.listener(acceptor, stop)

    @property
    def difference(self) -> float:
        """By how much golden scores differ."""
        return self.loaded.scorer.difference

    @property
    def described(self) -> str:
        """The first digits of the package's digest, and by how much golden scores differ."""
        return f"{self.loaded.base or self.loaded.package} {self.difference:.1e}"

    def begin(self) -> None:
        """Follow deltas from now on, in the running event loop."""
        if self.follower is not None:
            self._following = asyncio.get_running_loop().create_task(self.follower.run())

    def end(self) -> None:
        """Follow none any more, and let go of what learns and of rows: nothing is asked any more.
        ``UserError`` if what was learnt last cannot be written."""
        if self._following is not None:
            self._following.cancel()
        if self.follower is not None:
            self.follower.close()
        try:
            if self.learning is not None and self.loaded.learner is not None:
                self.learning.in_thread(self.loaded.learner.close)
        finally:
            if self.learning is not None:
                self.learning.close()
            if self.rows is not None:
                self.rows.close()  # which ends a change-over to another package

    def _use(
        self, scorer: RequestScorer, package: str, changed: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Let another version of the package answer; ``changed``: by the places of features the rows in which
        alone it differs from the one before."""
        server = self.server
        if self.answers is not None and changed is not None:
            self.answers.changed(scorer.scorer, {place: rows.numpy() for place, rows in changed.items()})
        elif self.answers is not None:
            self.answers.begin(scorer.scorer)
        own = (server.preparation, scorer.scorer.maps, server.candidates)
        server.use(scorer, server.manifest, package, *own)

    async def reload(self) -> None:
        """Load the package beside the one that is served, and let it take its place between two batches;
        ``UserError`` says why the one before is served still."""
        reloads = self.server.metrics.reloads
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
            reloads.labels("refused").inc()
            if isinstance(fault, UserError):
                raise
            log.exception("loading the package anew failed")
            raise UserError(f"{self.directory}: {fault}") from fault
        before, self.loaded = self.loaded.learner, loaded
        if self.learning is not None and before is not None:
            try:
                await asyncio.to_thread(self.learning.in_thread, before.close)
            except UserError as fault:
                log.warning("%s; what the package before had learnt and not written is lost", fault)
        reloads.labels("done").inc()

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
        loaded = load(
            self.directory,
            self.rows,
            self.several,
            *limits,
            follow=self.follow,
            kept=config.versions,
            goes_back=config.rollback,
            at=self._at,
        )
        if self.learning is None:
            return loaded
        if loaded.scorer.effects is None:
            raise UserError(
                f"learn=true: {self.directory} has no effects: package with effects=RUN of task=lambda"
            )
        made = imported_from("recpipe_lambda_learner.online:Learner")
        place = None if config.learnt is None else Path(config.learnt).expanduser() / loaded.package
        how = config.kept, config.learn_seconds, config.learn_store
        return replace(loaded, learner=made(self.directory, place, *how))

    def _require_same(self, manifest: dict[str, Any]) -> None:
        require_same(self.directory, self.loaded.scorer.manifest, manifest)


def require_same(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """``UserError`` unless clients can go on with the package ``directory``, which has the manifest ``now``,
    as they did ``before``."""
    then, found = _relied_on(before), _relied_on(now)
    for what in then:
        if found[what] != then[what]:
            raise UserError(
                f"{directory}: its manifest's '{what}' differs, on which clients rely: start a server of its "
                "own for it"
            )


def _relied_on(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What clients send and read by, under its names in the manifest; of candidates that there are some, and
    what names one and a user: these themselves may be others."""
    found = {what: manifest.get(what) for what in ("dense", "sparse", "outputs")}
    retrieval = manifest.get(RETRIEVAL)
    return found | {RETRIEVAL: retrieval and [retrieval[what] for what in ("item", "ids", "user")]}
