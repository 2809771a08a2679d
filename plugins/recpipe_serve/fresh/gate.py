"""The gate of deltas: a version answers only if, on the latest requests, it scores about as the one before
did, and where labels have come it predicts them about as well."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers import figures as drift
from recpipe.model.metrics import judged
from recpipe.model.scores import Kind
from recpipe_serve.batching.forms import Asked, together
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.config import ServeConfig
from recpipe_serve.fresh.versions import Kept

Floats = NDArray[np.float32]


@dataclass
class Answered:
    """A request, the scores that it got, [N, T], and its labels once they have come, NaN where not known."""

    asked: Asked
    scores: Floats
    labels: Floats | None = None


class Recent:
    """The latest requests of at most ``most`` samples together."""

    def __init__(self, most: int) -> None:
        self.most, self.samples = most, 0
        self._requests: deque[tuple[str | None, Answered]] = deque()
        self._named: dict[str, Answered] = {}

    def keep(self, ident: str | None, asked: Asked, scores: Floats) -> None:
        """Keep a request that was answered."""
        one = Answered(asked, scores.copy())
        self._requests.append((ident, one))
        if ident is not None:
            self._named[ident] = one
        self.samples += len(scores)
        while self.samples > self.most and len(self._requests) > 1:
            name, old = self._requests.popleft()
            self.samples -= len(old.scores)
            if name is not None and self._named.get(name) is old:
                del self._named[name]

    def label(self, ident: str, labels: Floats) -> None:
        """Take in the labels [N, T] of the request ``ident``, if it is kept."""
        one = self._named.get(ident)
        if one is not None and len(one.scores) == len(labels):
            one.labels = labels

    def all(self) -> list[Answered]:
        """What is kept now."""
        return [one for _, one in self._requests]


class Gate:
    """What ``config`` says of versions of a model with outputs of these ``kinds``."""

    def __init__(self, config: ServeConfig, kinds: Mapping[str, Kind]) -> None:
        self.config, self.kinds = config, kinds
        limits = (config.gate_ne, config.gate_drift, config.gate_calibration)
        self.looks = any(limit is not None for limit in limits)
        """Whether anything is judged."""

    def against(
        self, kept: Kept, before: Kept, scorer: RequestScorer, recent: Sequence[Answered]
    ) -> str | None:
        """Why the version ``kept``, to which ``scorer`` has come, must not answer in the place of ``before``;
        None: it may. In any thread."""
        if not self.looks:
            return None
        why = self._of_training(kept, before)
        if why is not None or sum(len(one.scores) for one in recent) < self.config.gate_samples:
            return why
        scores = self._scored(scorer, recent)
        answered = np.concatenate([one.scores for one in recent])
        unknown = [np.full_like(one.scores, np.nan) if one.labels is None else one.labels for one in recent]
        labels = np.concatenate(unknown)
        for n, (output, kind) in enumerate(self.kinds.items()):
            why = self._of_output(output, kind, scores[:, n], answered[:, n], labels[:, n])
            if why is not None:
                return why
        return None

    def _of_training(self, kept: Kept, before: Kept) -> str | None:
        """By the figures of training's own predictions, made before it learned from the samples."""
        bound = self.config.gate_ne
        for output, own in kept.progressive.items():
            ne, earlier = own.get("ne"), before.progressive.get(output, {}).get("ne")
            if bound is not None and ne is not None and earlier is not None and ne > earlier * (1 + bound):
                return (
                    f"training's NE is {ne:.4g}, and was {earlier:.4g} with the version that answers: more "
                    f"than gate_ne={bound:g} above"
                )
        return None

    def _scored(self, scorer: RequestScorer, recent: Sequence[Answered]) -> Floats:
        found, batch, samples = [], list[Asked](), 0

        def score() -> None:
            dense, sides = together(batch)
            scores = scorer(dense, sides).numpy()
            found.append(scores if scorer.correct is None else scorer.correct(batch, dense, scores))

        for one in recent:
            batch.append(one.asked)
            samples += one.asked.samples
            if samples >= self.config.batch:
                score()
                batch, samples = [], 0
        if batch:
            score()
        joined: Floats = np.concatenate([one.reshape(len(one), -1) for one in found])
        return joined

    def _of_output(
        self, output: str, kind: Kind, scores: Floats, answered: Floats, labels: Floats
    ) -> str | None:
        config, on = self.config, f"of '{output}' on the last {len(scores):,} samples"
        if not np.isfinite(scores).all():
            return f"scores {on} are no finite numbers"
        inner = drift.edges(answered)
        index = drift.stability(drift.histogram(scores, inner), drift.histogram(answered, inner).tolist())
        if config.gate_drift is not None and index > config.gate_drift:
            return f"scores {on} drift from what was answered: PSI {index:.3g}, above {config.gate_drift:g}"
        known = ~np.isnan(labels)
        if kind != "clicks" or known.sum() < config.gate_samples:
            return None
        own, others = (_quality(kind, each[known], labels[known]) for each in (scores, answered))
        counted = f"of '{output}' on the last {int(known.sum()):,} labelled samples"
        ne, before, bound = own["ne"], others["ne"], config.gate_ne
        if bound is not None and ne > before * (1 + bound):
            return f"NE {counted} is {ne:.4g}, and was {before:.4g}: more than gate_ne={bound:g} above"
        calibration, most = own["calibration"], config.gate_calibration
        if most is not None and abs(calibration - 1) > most:
            return f"calibration {counted} is {calibration:.3g}, further from 1 than {most:g}"
        return None


def _quality(kind: Kind, scores: Floats, labels: Floats) -> Mapping[str, float]:
    return judged(kind, torch.from_numpy(labels), torch.from_numpy(scores))
