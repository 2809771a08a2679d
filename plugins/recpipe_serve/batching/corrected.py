"""What the effects of a package add to the logits of requests, and what they see of labelled events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from recpipe.answers.score import Bags, Effects
from recpipe_serve.batching.forms import Array, Asked

Seen = list[tuple[Array, Array]]
"""By each effect, the ids int64 [N] of samples' entities and their inputs float64 [N, D]."""


class Learns(Protocol):
    """Effects that go on learning while they are asked (``recpipe_lambda_learner.online``)."""

    def logits(self, seen: Seen, offsets: Array) -> Array:
        """The model's logits ``offsets`` float64 [N] of samples with what the effects add; from any
        thread."""


class Corrected:
    """Corrects what the model says of requests, by the coefficients of its package's ``effects``, or by those
    of ``live`` ones."""

    def __init__(self, effects: Effects, live: Learns | None = None) -> None:
        self.effects, self.live = effects, live

    def __call__(self, asked: Sequence[Asked], dense: torch.Tensor, logits: Array) -> Array:
        """The corrected logits float32 [B] of these requests' samples; events are handed on instead."""
        with torch.inference_mode():
            seen = self.effects.seen(dense, _OfRequests(asked))
            if self.live is None:
                corrected: Array = self.effects(torch.from_numpy(logits), seen).numpy()
        arrays = [(ids.numpy(), inputs.numpy()) for ids, inputs in seen]
        if self.live is not None:
            corrected = self.live.logits(arrays, logits.astype(np.float64)).astype(np.float32)
        end = 0
        for one in asked:
            start, end = end, end + one.samples
            if one.taught is not None:
                own = [(ids[start:end], inputs[start:end]) for ids, inputs in arrays]
                one.taught(self.live, own, logits[start:end])
        return corrected


class _OfRequests(dict[int, Bags]):
    """The bags of all samples of requests, by the place of the feature; made where they are asked for."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        super().__init__()
        self._asked = asked

    def __missing__(self, place: int) -> Bags:
        rows, keys = ([one.bags(place, True, keyed) for one in self._asked] for keyed in (False, True))
        weights = [own.weights for own in rows if own.weights is not None]
        lengths = [np.broadcast_to(np.asarray(own.lengths), own.samples) for own in rows]
        self[place] = found = Bags(
            torch.from_numpy(np.concatenate([own.ids for own in keys])),
            torch.from_numpy(np.concatenate([own.ids for own in rows])),
            torch.from_numpy(np.concatenate(lengths).astype(np.int64)),
            torch.from_numpy(np.concatenate(weights)) if weights else None,
        )
        return found
