"""A version that scores requests which another one answers: how far it is from it, before it answers any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from recpipe_serve.batching.forms import Array, Asked
from recpipe_serve.errors import Refused
from recpipe_serve.http.app import Server
from recpipe_serve.repository.turns import Turns


@dataclass
class Compared:
    """Sums over samples of one output."""

    answered: float = 0.0
    shadow: float = 0.0
    apart: float = 0.0
    most: float = 0.0


@dataclass
class Shadow:
    """Has ``server`` score this share of the requests that are answered by ``by``, whose outputs it has."""

    by: Server
    server: Server
    share: float
    requests: int = 0
    samples: int = 0
    failed: int = 0
    dropped: int = 0
    """Those that it had no time for: nobody waits because of it."""
    compared: dict[str, Compared] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._turns = Turns(self.share)
        self.compared = {name: Compared() for name in self.by.outputs}
        self.server.batcher.beside = True

    def saw(self, inputs: Asked, scores: Array) -> None:
        """``inputs`` were answered with these ``scores`` [N, T]."""
        if inputs.taught is not None or not self._turns.take():
            return
        batcher = self.server.batcher
        if 2 * len(batcher.queue) >= batcher.config.queue:
            self.dropped += 1
            return
        try:
            own = self.server.heads.anew(inputs)
            if own is inputs:
                own = replace(inputs)  # the other one's batcher has this one
            own.alone, own.ticket = False, None
            batcher.put(own, partial(self._compare, scores))
        except Refused:
            self.failed += 1

    def _compare(self, answered: Array, scores: Array | Exception) -> None:
        if isinstance(scores, Exception):
            self.failed += 1
            return
        self.requests += 1
        self.samples += len(scores)
        columns = scores.reshape(len(scores), -1)
        for place, name in enumerate(self.by.outputs):
            own, one = self.compared[name], answered[:, place].astype(np.float64)
            other = columns[:, self.server.outputs.index(name)].astype(np.float64)
            apart = np.abs(other - one)
            own.answered += float(one.sum())
            own.shadow += float(other.sum())
            own.apart += float(apart.sum())
            own.most = max(own.most, float(apart.max()))

    def told(self) -> dict[str, Any]:
        """What has been compared, for people."""
        return {
            "version": int(self.server.version),
            "share": self.share,
            "requests": self.requests,
            "samples": self.samples,
            "failed": self.failed,
            "dropped": self.dropped,
            "outputs": {name: self._figures(own) for name, own in self.compared.items()},
        }

    def _figures(self, own: Compared) -> Mapping[str, float | None]:
        samples = self.samples
        return {
            "mean": own.answered / samples if samples else None,
            "shadow_mean": own.shadow / samples if samples else None,
            "mean_difference": own.apart / samples if samples else None,
            "largest_difference": own.most if samples else None,
        }
