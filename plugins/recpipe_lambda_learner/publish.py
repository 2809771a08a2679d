"""``lambda.publish``: a stream writes what its effects have learnt as deltas of a package, for servers that
follow it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.answers.apply import BASE
from recpipe.answers.delta import Change, Version, following, write_delta
from recpipe.answers.effects import FOLDER, Coefficients, Learnt, newest_effects
from recpipe.answers.manifest import PrivateKey, is_package, private_key, read_manifest
from recpipe.answers.score import DEFAULT_ROW, tensors
from recpipe.common.files import LockFile, Taken, unwritable
from recpipe.errors import UserError
from recpipe.tables.dynamic.loops import FIRST_ROW
from recpipe_lambda_learner.config import PublishConfig
from recpipe_lambda_learner.effects import Effect, Effects
from recpipe_lambda_learner.posterior import Floats

log = logging.getLogger("recpipe")
LOCK = ".publish.lock"
BLOCK = 65_536
"""Rows that are compared at a time."""


class Publisher:
    """Writes the deltas of ``effects``, which are as ``learnt`` says, as ``config`` says.

    The chain begins with a package of the same model with the same effects. The first delta has whatever
    differs between the chain's latest version and the effects as they are now, so that a stream that was
    killed goes on with the chain wherever it was. ``UserError`` for a package of other effects, and for a
    directory that another one writes into.
    """

    def __init__(self, config: PublishConfig, effects: Effects, learnt: Learnt) -> None:
        assert config.dir is not None, "it is asked for"
        self.config, self.effects = config, effects
        self.folder = Path(config.dir).expanduser().absolute()
        self.key: PrivateKey | None = None if config.sign is None else private_key(Path(config.sign))
        base = base_of(config)
        if not is_package(base):
            raise UserError(
                f"lambda.publish.base={base} is no package: make it with 'recpipe package CHECKPOINT {base} "
                "effects=RUN', or leave it out"
            )
        manifest = read_manifest(base)
        self._require_same(base, learnt)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = LockFile(self.folder / LOCK)
        except Taken as fault:
            raise UserError(f"lambda.publish.dir={self.folder}: another run publishes there") from fault
        except OSError as fault:
            raise unwritable(self.folder, fault, "choose another lambda.publish.dir") from fault
        self.version = Version.of_package(base, manifest)
        self._since = time.time()
        held = {about["entity"]: _Held(base, about["ids"], about["file"]) for about in manifest["effects"]}
        for delta in following(self.folder, self.version):
            delta.require_one_kind(manifest)
            for entity, changed in delta.coefficients(manifest):
                held[entity].take(changed)
            self.version = delta.version
        self.written = 0
        for effect in effects.each:
            effect.noted = [held[effect.name].other_rows(effect)]

    def _require_same(self, base: Path, learnt: Learnt) -> None:
        theirs = newest_effects(base / FOLDER)[1] if (base / FOLDER).is_dir() else None
        told = None if theirs is None else (theirs.model, theirs.effects, theirs.precision)
        if told != (learnt.model, learnt.effects, learnt.precision):
            raise UserError(
                f"lambda.publish.base={base} has effects of another model, or others than lambda.effects: "
                "take another directory, or package a run of these, effects=RUN"
            )

    def publish(self, number: int) -> None:
        """Write what has changed since the delta before, after so many mini-batches; nothing if nothing
        has."""
        changed = {}
        for effect in self.effects.each:
            assert effect.noted is not None
            rows = np.unique(np.concatenate(effect.noted)) if effect.noted else np.empty(0, np.int64)
            if len(rows):
                changed[effect.name] = coefficients(effect, rows)
        if not changed:
            return
        now = time.time()
        change = Change(self.version.step, now, self._since, {}, {}, {}, effects=changed, learnt=number)
        try:
            self.version = write_delta(self.folder, self.version, change, self.key).version
        except OSError as fault:  # what has changed stays noted, and comes with the next one
            log.warning("%s", unwritable(self.folder, fault, "choose another lambda.publish.dir"))
            return
        self._since, self.written = now, self.written + 1
        for effect in self.effects.each:
            effect.noted = []

    def close(self) -> None:
        """Let another one write there."""
        self._lock.release()


def base_of(config: PublishConfig) -> Path:
    """The package that the chain begins with."""
    assert config.dir is not None, "it is asked for"
    if config.base is not None:
        return Path(config.base).expanduser()
    return Path(config.dir).expanduser().absolute() / BASE


def coefficients(effect: Effect, rows: NDArray[np.int64]) -> Coefficients:
    """What is believed of the entities of ``rows`` int64 [n], ascending."""
    content = effect.rows.map.content
    parts = {part: effect.rows.read(part, rows) for part in effect.rows.first}
    figures = content.figures
    return Coefficients(rows, effect.records(rows), parts, content.used, content.now, figures)


class _Held:
    """What servers have of one effect: the package's, and what deltas brought."""

    def __init__(self, base: Path, ids: str, file: str) -> None:
        records = tensors(base / ids)["records"].numpy()
        first = np.zeros((FIRST_ROW, 2), np.int64)
        self.records = np.concatenate([first, records])
        self.parts: dict[str, Floats] = {n: v.numpy() for n, v in tensors(base / file).items()}

    def take(self, changed: Coefficients) -> None:
        """Take in a delta."""
        self.records = _resized(self.records, changed.used)
        self.records[changed.rows] = changed.records
        for name, own in changed.parts.items():
            self.parts[name] = _resized(self.parts[name], changed.used)
            self.parts[name][changed.rows] = own

    def other_rows(self, effect: Effect) -> NDArray[np.int64]:
        """The rows of ``effect`` that differ from these, int64 [n]."""
        used, found = effect.rows.map.content.used, list[NDArray[np.int64]]()
        for start in range(0, used, BLOCK):
            rows = np.arange(start, min(used, start + BLOCK))
            there = rows[rows < len(self.records)]
            differs = np.ones(len(rows), bool)
            differs[: len(there)] = (effect.records(there) != self.records[there]).any(axis=1)
            for name, own in self.parts.items():
                mine = effect.rows.read(name, there)
                differs[: len(there)] |= (mine.view(np.int64) != own[there].view(np.int64)).any(axis=1)
            found.append(rows[differs & (rows != DEFAULT_ROW)])
        return np.concatenate(found) if found else np.empty(0, np.int64)


def _resized(values: NDArray[Any], rows: int) -> NDArray[Any]:
    """A copy with so many rows, new ones 0."""
    found = np.zeros((rows, values.shape[1]), values.dtype)
    kept = min(rows, len(values))
    found[:kept] = values[:kept]
    return found
