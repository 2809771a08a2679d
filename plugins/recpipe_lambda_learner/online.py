"""``Learner``: effects of a served package that go on learning, each event once."""

from __future__ import annotations

import logging
import shutil
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from recpipe.answers.effects import FOLDER, newest_effects, write_effects
from recpipe.common.files import unwritable
from recpipe.common.tensors import save_tensors
from recpipe.errors import UserError
from recpipe_lambda_learner.effects import Effects, Seen
from recpipe_lambda_learner.posterior import Floats, Learning, Precision
from recpipe_lambda_learner.rows import Entities, Keeping

log = logging.getLogger("recpipe")
EVENTS = "events.safetensors"
"""Beside saved effects: of which events they are."""
SCRATCH = "store-"
"""How folders of coefficients in files begin."""
REMEDY = "choose another learnt=DIRECTORY"
_BYTES = 16


class Learner:
    """The effects in ``package``, which learn events of one mini-batch after the other.

    What was learnt is written into ``place`` every ``seconds`` that events come, and when it is closed; None:
    nowhere. It goes on from what it finds there. The ids of the last ``kept`` events are known, so that one
    that is sent again, since its sender has not got the answer, is not learnt again.

    ``store``: where coefficients lie, in memory (``host``) or in files (``ssd``) beside what is written, or
    where there is nothing written in a temporary folder."""

    def __init__(
        self, package: Path, place: Path | None, kept: int, seconds: float, store: str = "host"
    ) -> None:
        directory, self.learnt = newest_effects(package / FOLDER)
        if place is not None and any(place.glob(f"{FOLDER}/[0-9]*")):
            directory, self.learnt = newest_effects(place)
        self.place, self.kept, self.seconds = place, kept, seconds
        self.total = self.saved = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._claimed: set[bytes] = set()
        """Events that will be learnt; what is written must not say that they have been."""
        precision: Precision = self.learnt.precision  # type: ignore[assignment]
        how = Learning(self.learnt.ridge, self.learnt.keep, precision)
        widths = {own.entity: own.width for own in self.learnt.effects}
        where = None if store == "host" else _scratch(place)
        if where is not None:  # kept until nobody scores by these coefficients any more
            finalize(self, shutil.rmtree, where, ignore_errors=True)
        self.effects = Effects(widths, how, Keeping(self.learnt.entities, store, where))
        self.effects.load(directory)
        if (file := directory / EVENTS).is_file():
            try:
                found = load_file(file)
                self._known.update(dict.fromkeys(map(bytes, found["ids"])))
                self.total = self.saved = int(found["total"][0])
            except (OSError, SafetensorError, LookupError, ValueError) as fault:
                raise UserError(f"{file} is damaged ({fault}): remove {directory}") from fault
        self._written, self._lock = monotonic(), threading.Lock()

    def logits(self, seen: Sequence[tuple[Entities, Floats]], offsets: Floats) -> Floats:
        """The model's logits ``offsets`` float64 [N] of samples with what the effects add; from any
        thread."""
        return self.effects.logits([Seen(*own) for own in seen], offsets)

    def claim(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Which of these events have not come before, bool [N]; they have, from now on."""
        fresh = np.zeros(len(ids), bool)
        with self._lock:
            for number, key in enumerate(map(_key, ids)):
                fresh[number] = key not in self._known and key not in self._claimed
                if fresh[number]:
                    self._claimed.add(key)
        return fresh

    def release(self, ids: Sequence[str]) -> None:
        """Take back that these have come, which have not been learnt."""
        with self._lock:
            self._claimed.difference_update(map(_key, ids))

    def evicts(self, seen: Sequence[tuple[Entities, Floats]]) -> bool:
        """Whether learning these may take other entities' coefficients away; while nothing is learnt."""
        return self.effects.evict([Seen(*own) for own in seen])

    def learn(
        self,
        ids: Sequence[str],
        seen: Sequence[tuple[Entities, Floats]],
        clicks: Floats,
        weights: Floats,
        offsets: Floats,
    ) -> list[Entities]:
        """Learn N events, whose fixed logits are ``offsets``, as one mini-batch, or release their ``ids``.
        One thread calls it. By effect the entities whose coefficients are others now, int64 [n]."""
        try:
            changed = self.effects.learn([Seen(*own) for own in seen], clicks, weights, offsets)
        except BaseException:
            self.release(ids)
            raise
        with self._lock:
            self._known.update(dict.fromkeys(map(_key, ids)))
            while len(self._known) > self.kept:
                self._known.popitem(last=False)
        self.release(ids)
        self.total += len(ids)
        self.learnt = replace(self.learnt, number=self.learnt.number + 1)
        if self.place is not None and monotonic() - self._written >= self.seconds:
            try:
                self.save()
            except OSError as fault:  # it is told as not saved, and tried again in as many seconds
                self._written = monotonic()
                log.warning("%s; what was learnt is in memory alone", unwritable(self.place, fault, REMEDY))
        return changed

    def save(self) -> None:
        """Write what was learnt; by whoever learns. ``OSError`` if that fails."""
        if self.place is None or self.saved == self.total:
            return
        with self._lock:
            known = b"".join(self._known)

        def write(folder: Path) -> None:
            self.effects.save(folder)
            ids = torch.from_numpy(np.frombuffer(bytearray(known), np.uint8).reshape(-1, _BYTES))
            save_tensors(folder / EVENTS, {"ids": ids, "total": torch.tensor([self.total])})

        write_effects(self.place / FOLDER, self.learnt, write)
        self.saved, self._written = self.total, monotonic()

    def close(self) -> None:
        """Write what was learnt; nothing is learnt any more, and what is still being scored is scored by
        it. ``UserError`` if it cannot be written."""
        try:
            self.save()
        except OSError as fault:
            assert self.place is not None, "it is written there"
            raise unwritable(self.place, fault, REMEDY) from fault


def _scratch(place: Path | None) -> Path:
    """A new folder for the files of a store, in ``place`` without those that a killed process has left
    there."""
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        for left in place.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
    return Path(mkdtemp(prefix=SCRATCH, dir=place))


def _key(ident: str) -> bytes:
    return blake2b(ident.encode(), digest_size=_BYTES).digest()
