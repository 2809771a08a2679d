"""A version that scores requests which another one answers: how far it is from it, before it answers any."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from recpipe_serve.batching.forms import Array, Asked
from recpipe_serve.errors import Refused
from recpipe_serve.http.app import Server
from recpipe_serve.repository.counted import Routed, SharedRouted
from recpipe_serve.repository.turns import Turns


@dataclass
class Shadow:
    """Has ``server`` score this share of the requests that are answered by ``by``, whose outputs it has."""

    by: Server
    server: Server
    share: float
    counted: SharedRouted

    def __post_init__(self) -> None:
        self._turns = Turns(self.share)
        self._places = [self.server.outputs.index(name) for name in self.by.outputs]
        self.server.batcher.beside = True

    def saw(self, inputs: Asked, scores: Array, ident: str | None) -> None:
        """The request ``ident`` with these ``inputs`` was answered with these ``scores`` [N, T]."""
        if inputs.taught is not None or not self._turns.take():
            return
        batcher = self.server.batcher
        if 2 * len(batcher.queue) >= batcher.config.queue:
            self.counted.own.dropped += 1
            return
        try:
            own = self.server.heads.anew(inputs)
            if own is inputs:
                own = replace(inputs)  # the other one's batcher has this one
            own.alone, own.ticket = False, None
            batcher.put(own, partial(self._compare, scores, ident))
        except Refused:
            self.counted.own.failed += 1

    def _compare(self, answered: Array, ident: str | None, scores: Array | Exception) -> None:
        if isinstance(scores, Exception):
            self.counted.own.failed += 1
            return
        columns = scores.reshape(len(scores), -1)
        if ident is not None:  # for its labels: they tell of its quality beside the other's
            self.server.monitor.keep(ident, columns)
        self.counted.own.compared(self.by.outputs, answered, columns[:, self._places])

    def told(self, counted: Routed) -> dict[str, Any]:
        """What all have compared, for people."""
        return {
            "version": int(self.server.version),
            "share": self.share,
            "requests": counted.requests,
            "samples": counted.samples,
            "failed": counted.failed,
            "dropped": counted.dropped,
            "outputs": {
                name: counted.outputs[name].told(counted.samples)
                for name in self.by.outputs
                if name in counted.outputs
            },
        }
